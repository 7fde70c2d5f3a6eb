"""Check after each weight update that the engine holds the trainer's weights and computes the same model.

The engine samples a few tokens for a few training prompts, and the trainer computes the log-probs of the same tokens.
Missing weights, a stale cache, or a temperature that only one side applies are visible in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.correction import Mismatch, measure
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.packing import lay_out, pack_shares
from dapo_runner.config import AdvantageConfig, Config
from dapo_runner.engines.engine import Groups, RolloutEngine
from dapo_runner.errors import RunError
from dapo_runner.types import Group, Prompt, Sample, Verdict, make_requests

N_PROMPTS, N_TOKENS = 8, 4  # N_TOKENS per response
# Mean |Δ log-prob| that rounding explains. SmolLM2-135M with vLLM on a CPU: 8e-6 and 0.045 in sync, 0.5 if only the
# output head is stale.
BOUNDS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
# Weights that fall behind slowly stay below these bounds for long: 0.028 in bfloat16 after 57 updates, where 0.0016 was
# normal. So after the first N_USUAL probes of a run, MAX_TIMES their median is also too much, if it exceeds MIN_SHARE
# of the bound.
N_USUAL, MAX_TIMES, MIN_SHARE = 3, 10, 0.1


class OutOfSyncError(RunError):
    """The mismatch of trainer and rollout engine in a probe exceeds its bound."""


class SyncProbe:
    """Call ``probe(engine, learner)`` after every update of the engine's weights."""

    def __init__(self, prompts: Sequence[Prompt], config: Config) -> None:
        rollout, n_tokens = config.rollout, min(N_TOKENS, config.rollout.max_response_tokens)
        sampling = rollout.params(max_tokens=n_tokens, seed=config.run.seed, sampling_mask=rollout.sampling_mask)
        if not rollout.sampling_mask:  # the trainer's log-probs are over the whole vocabulary
            sampling = replace(sampling, top_p=1.0, top_k=None, min_p=0.0)
        self.requests = make_requests(prompts[:N_PROMPTS], sampling) if rollout.probe else []
        self.highest = BOUNDS[config.model.dtype]
        self.first_gaps: list[float] = []  # of the first probes of the run
        self.token_budget = config.optimizer.token_budget

    @property
    def bound(self) -> float:
        """The largest accepted mean |Δ log-prob|."""
        if len(self.first_gaps) < N_USUAL:
            return self.highest
        return min(self.highest, max(MAX_TIMES * median(self.first_gaps), MIN_SHARE * self.highest))

    def __call__(self, engine: RolloutEngine, learner: Learner) -> dict[str, float]:
        """Return mean and largest |Δ log-prob|; empty if the probe is off. Raises OutOfSyncError."""
        if not self.requests:
            return {}
        world = learner.world
        answers = engine.answers_to_probe(self.requests, world)
        local = [(name, self._measure(completions, learner)) for name, completions in answers]
        gathered = [item for part in world.all_gather_object(local) for item in part if item[0] is not None]
        for name, mismatch in gathered:
            gap = mismatch.metrics().get("rollout_gap", math.nan)  # NaN if the engine returned no log-probs
            if not gap <= self.bound:  # also true for NaN
                raise OutOfSyncError(
                    f"rollout.probe: expected log-probs of trainer and rollout engine to differ by at most "
                    f"{self.bound:.3g}, got {gap:.3g} over {mismatch.tokens} tokens{name}. The engine does not hold the"
                    " trainer's weights or computes another model. For nan: an update may have broken the weights."
                )
        total = sum((mismatch for _, mismatch in gathered), Mismatch()).metrics()
        self.remember(total["rollout_gap"])
        return {"gap": total["rollout_gap"], "gap_max": total["rollout_gap_max"]}

    def remember(self, gap: float) -> None:
        """Record the mean gap of a probe of this run. Call it in their order."""
        if len(self.first_gaps) < N_USUAL:
            self.first_gaps.append(gap)

    def _measure(self, completions: Groups, learner: Learner) -> Mismatch:
        groups = [
            Group(request.prompt, tuple(Sample(completion, Verdict(correct=False), 0.0) for completion in answers))
            for request, answers in zip(self.requests[: len(completions)], completions, strict=True)
        ]
        mismatch, multiple = Mismatch(), learner.world.layout.sequence
        sequences = make_sequences(groups, AdvantageConfig(kind="group_mean"))
        (batches,) = pack_shares(sequences, self.token_budget, multiple=multiple)
        most = max(learner.world.all_gather_object(len(batches)))
        for batch in batches + [lay_out([], 0, multiple)] * (most - len(batches)):
            mismatch += measure(learner.logprobs(batch).to(batch.mask.device), batch.old_logprobs, batch.mask)
        return mismatch
