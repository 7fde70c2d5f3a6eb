"""After weights went to the engine: does it hold them, and does it compute the same model?

The engine answers a few training prompts with a few tokens each, and the learner computes the log-probs of those very
tokens. Weights that never arrived, a stale cache or a temperature that only one side knows of show in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.correction import Mismatch, measure
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.packing import pack, padding_batch
from dapo_runner.config import AdvantageConfig, Config
from dapo_runner.errors import RunError
from dapo_runner.rollout.engine import Groups, RolloutEngine
from dapo_runner.types import Group, Prompt, Sample, SamplingParams, Verdict

N_PROMPTS, N_TOKENS = 8, 4  # N_TOKENS of each answer
# Mean |Δ log-prob| that is still rounding. SmolLM2-135M under vLLM on a CPU: 8e-6 and 0.045 in sync; 0.5 with nothing
# but a stale output head.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}
# Weights that fall behind slowly stay below that for long: 0.028 in bfloat16 after 57 updates, where 0.0016 was usual.
# After the first N_USUAL probes of a run, MAX_TIMES their median is too much as well, if it is above MIN_SHARE of the
# bound.
N_USUAL, MAX_TIMES, MIN_SHARE = 3, 10, 0.1


class OutOfSyncError(RunError):
    """Engine and learner disagree beyond `rollout.probe.bound`."""


class SyncProbe:
    """``probe(engine, learner)`` after every update of the engine's weights."""

    def __init__(self, prompts: Sequence[Prompt], config: Config) -> None:
        rollout = config.rollout
        # Without a sampling mask the learner's log-probs are those of the whole vocabulary.
        cut = rollout.sampling_mask
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p if cut else 1.0,
            top_k=rollout.top_k if cut else None,
            min_p=rollout.min_p if cut else 0.0,
            max_tokens=min(N_TOKENS, rollout.max_response_tokens),
            seed=config.run.seed,
            sampling_mask=cut,
        )
        self.prompts = list(prompts[:N_PROMPTS]) if rollout.probe.enabled else []
        self.fixed_bound, self.highest = rollout.probe.bound, BOUNDS[config.model.dtype]
        self.first_gaps: list[float] = []  # of the first probes of the run
        self.token_budget = config.optimizer.token_budget

    @property
    def bound(self) -> float:
        """The largest mean |Δ log-prob| that is no error."""
        if self.fixed_bound is not None:
            return self.fixed_bound
        if len(self.first_gaps) < N_USUAL:
            return self.highest
        return min(self.highest, max(MAX_TIMES * median(self.first_gaps), MIN_SHARE * self.highest))

    def __call__(self, engine: RolloutEngine, learner: Learner) -> dict[str, float]:
        """Return the mean and largest |Δ log-prob|; nothing when the probe is off. Raises OutOfSyncError."""
        if not self.prompts:
            return {}
        world = learner.world
        answers = engine.answers_to_probe(self.prompts, self.sampling, world)
        own = [(name, self._measure(completions, learner)) for name, completions in answers]
        gathered = [item for of_rank in world.all_gather_object(own) for item in of_rank if item[0] is not None]
        for name, mismatch in gathered:
            gap = mismatch.metrics().get("rollout_gap", math.nan)  # the engine has no log-prob of any token
            if not gap <= self.bound:  # NaN as well
                raise OutOfSyncError(
                    f"rollout.probe.bound: expected log-probs of engine and learner to differ by at most "
                    f"{self.bound:.3g}, got {gap:.3g} over {mismatch.tokens} tokens{name}. The engine does not hold "
                    "the learner's weights, or does not compute the same model."
                )
        total = sum((mismatch for _, mismatch in gathered), Mismatch()).metrics()
        self.remember(total["rollout_gap"])
        return {"gap": total["rollout_gap"], "gap_max": total["rollout_gap_max"]}

    def remember(self, gap: float) -> None:
        """Add the mean gap of a probe of this run, in their order."""
        if len(self.first_gaps) < N_USUAL:
            self.first_gaps.append(gap)

    def _measure(self, completions: Groups, learner: Learner) -> Mismatch:
        groups = [
            Group(prompt, tuple(Sample(completion, Verdict(correct=False), 0.0) for completion in answers))
            for prompt, answers in zip(self.prompts[: len(completions)], completions, strict=True)
        ]
        mismatch, multiple = Mismatch(), learner.world.layout.sequence
        sequences = make_sequences(groups, AdvantageConfig(kind="group_mean"))
        batches = pack(sequences, self.token_budget, multiple)
        most = max(learner.world.all_gather_object(len(batches)))
        for batch in batches + [padding_batch(multiple)] * (most - len(batches)):
            own = learner.logprobs(batch).to(batch.mask.device)
            mismatch += measure(own, batch.old_logprobs, batch.mask)
        return mismatch
