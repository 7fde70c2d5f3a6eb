"""The probe of engine and trainer: which gap is too large."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config
from served import PROMPTS

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import ModelConfig
from dapo_runner.engines.hf import HFEngine
from dapo_runner.policy.model import Policy, load_model
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.types import Completion

ROUNDING = 0.0016


class Drifting(HFEngine):
    """An engine whose log-probs are off by ``gap``."""

    gap = 0.0

    def generate(self, *asked: Any) -> list[list[Completion]]:
        return [[replace(one, logprobs=one.logprobs - self.gap) for one in group] for group in super().generate(*asked)]


def drifting(policy: Policy, path: Path) -> tuple[SyncProbe, Drifting, Learner]:
    config = make_config(model={"tiny": None, "path": str(path), "dtype": "bfloat16"})
    model = load_model(path, ModelConfig(path="x", dtype="float32"), torch.device("cpu"), "sdpa")
    return SyncProbe(PROMPTS, config), Drifting(model, policy.tokenizer, 64), Learner(policy, config)


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
