"""The probe of engine and trainer: which gap is too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config
from served import PROMPTS

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import ModelConfig
from dapo_runner.policy.model import Policy, load_model
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.types import Completion, RolloutRequest

ROUNDING = 0.0016


class Drifting(RolloutEngine):
    """An engine whose log-probs are off by ``gap``."""

    def __init__(self, policy: Policy, path: Path) -> None:
        model = load_model(path, ModelConfig(path="x", dtype="float32"), torch.device("cpu"), "sdpa")
        self.engine = HFEngine(model, policy.tokenizer)
        self.gap = 0.0

    @classmethod
    def load(cls, *_: Any) -> RolloutEngine:
        raise NotImplementedError

    def update_weights(self, _: Any) -> None:
        pass

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        found = self.engine.generate(requests)
        return [[replace(one, logprobs=one.logprobs - self.gap) for one in group] for group in found]


def drifting(policy: Policy, model: Path) -> tuple[SyncProbe, Drifting, Learner]:
    config = make_config(model={"tiny": None, "path": str(model), "dtype": "bfloat16"})
    return SyncProbe(PROMPTS, config), Drifting(policy, model), Learner(policy, config)


NORMAL = [0.003 * (0.5 + step % 3 / 2) for step in range(12)]
FROZEN = [ROUNDING + update * 0.028 / 57 for update in range(58)]  # far below bfloat16's bound at the end


@pytest.mark.parametrize(
    ("passes", "fails"),
    [
        ([*NORMAL, 0.029], 0.031),  # ten times what was normal
        (FROZEN[:30], FROZEN[-1]),  # frozen from the first update on
        ([0.19], 0.21),  # the first probes: the bound of the dtype
        ([0.0001] * 3 + [0.019], 0.0201),  # a tenth of it at least
        ([0.19] * 4, 0.201),  # and never more
        ([], math.nan),  # no log-prob at all
    ],
)
def test_which_gap_is_too_large(passes: list[float], fails: float, policy: Policy, model_folder: Path) -> None:
    probe, engine, learner = drifting(policy, model_folder)
    for engine.gap in passes:
        found = probe(engine, learner)
        assert found["gap"] == pytest.approx(engine.gap, rel=0.1)
        assert found["gap_max"] >= found["gap"]
    resumed, *_ = drifting(policy, model_folder)
    for gap in passes:
        resumed.remember(gap)
    engine.gap = fails
    for one in (probe, resumed):
        with pytest.raises(OutOfSyncError, match=r"rollout\.probe:"):
            one(engine, learner)
