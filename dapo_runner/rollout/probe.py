"""After weights went to the engine: does it hold them, and does it compute the same model?

The engine answers a few training prompts with a few tokens each, and the learner is asked for the log-probs of those
very tokens. Weights that never arrived, a cache of the ones before, a head that was left behind or a temperature that
only one side knows of all show in the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dapo_runner.config import AdvantageConfig, Config
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.types import Completion, Group, Prompt, Sample, SamplingParams, Verdict
from dapo_runner.update.advantage import make_sequences
from dapo_runner.update.correction import Mismatch, measure
from dapo_runner.update.learner import Learner
from dapo_runner.update.packing import Share, pack, padding_batch

# Mean |Δ log-prob| that is still rounding. SmolLM2-135M under vLLM on a CPU: 8e-6 and 0.045 in sync; 0.5 with nothing
# but a stale output head.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}


class OutOfSyncError(RuntimeError):
    """Engine and learner disagree beyond `rollout.probe.bound`."""


class SyncProbe:
    """``probe(engine, learner)`` after every update of the engine's weights."""

    def __init__(self, prompts: Sequence[Prompt], config: Config) -> None:
        rollout, settings = config.rollout, config.rollout.probe
        self.prompts = list(prompts[: settings.prompts])
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            max_tokens=min(settings.tokens, rollout.max_response_tokens),
            seed=config.run.seed,
        )
        if rollout.sampling_mask:  # elsewhere the learner's log-probs are those of the whole vocabulary
            cut = replace(self.sampling, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p)
            self.sampling = replace(cut, sampling_mask=True)
        self.bound = settings.bound if settings.bound is not None else BOUNDS[config.model.dtype]
        self.token_budget = config.optimizer.token_budget

    def __call__(self, engine: RolloutEngine, learner: Learner) -> dict[str, float]:
        """Mean and largest |Δ log-prob|; nothing when the probe is off. Raises OutOfSyncError."""
        if not self.prompts:
            return {}
        world = learner.world
        # Every engine is asked the same, and its own ranks about its answers; as many passes on each rank.
        answers = world.gather(engine.generate(self.prompts, self.sampling))
        mismatches = world.gather(self._measure(answers[world.data_rank * world.layout.sequence], learner))
        for rank, mismatch in enumerate(mismatches):
            gap = mismatch.figures()["rollout_gap"]
            if not gap <= self.bound:  # NaN as well
                where = "" if world.alone else f" on rank {rank}"
                raise OutOfSyncError(
                    f"sync: expected engine and learner to agree on the log-probs of the engine's own tokens to "
                    f"{self.bound:g} on average (rollout.probe.bound), got {gap:.3g} over {mismatch.tokens} tokens"
                    f"{where}: the engine does not hold the learner's weights, or does not compute the same model"
                )
        figures = sum(mismatches, Mismatch()).figures()
        return {"gap": figures["rollout_gap"], "gap_max": figures["rollout_gap_max"]}

    def _measure(self, completions: list[list[Completion]], learner: Learner) -> Mismatch:
        groups = [
            Group(prompt, tuple(Sample(completion, Verdict(correct=False), 0.0) for completion in answers))
            for prompt, answers in zip(self.prompts, completions, strict=True)
        ]
        mismatch, multiple = Mismatch(), learner.share.multiple
        sequences = make_sequences(groups, AdvantageConfig(kind="group_mean"))
        batches = pack(sequences, self.token_budget, Share(multiple=multiple))
        most = max(learner.world.gather(len(batches)))
        for batch in batches + [padding_batch(multiple)] * (most - len(batches)):
            own = learner.logprobs(batch).to(batch.mask.device)
            mismatch += measure(own, batch.old_logprobs, batch.mask)
        return mismatch
