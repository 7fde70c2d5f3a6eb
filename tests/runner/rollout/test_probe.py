"""The probe of engine and learner: which gap is too large."""

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
from dapo_runner.types import Completion, Prompt, SamplingParams

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

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Completion]]:
        found = self.engine.generate(prompts, sampling)
        return [[replace(one, logprobs=one.logprobs - self.gap) for one in group] for group in found]


def drifting(policy: Policy, model: Path, **probe: Any) -> tuple[SyncProbe, Drifting, Learner]:
    config = make_config(model={"tiny": None, "path": str(model), "dtype": "bfloat16"}, rollout={"probe": probe})
    return SyncProbe(PROMPTS, config), Drifting(policy, model), Learner(policy, config)


def fall_behind(probe: SyncProbe, engine: Drifting, learner: Learner) -> None:
    for update in range(58):
        engine.gap = ROUNDING + update * 0.028 / 57
        probe(engine, learner)


def test_weights_that_fall_behind_slowly_are_found(policy: Policy, model_folder: Path) -> None:
    """Frozen for 57 updates, at the end off by 0.028, which is far below bfloat16's bound; rounding varies as ever."""
    probe, engine, learner = drifting(policy, model_folder)
    for step in range(40):
        engine.gap = ROUNDING * (0.5 + step % 3 / 2)
        assert probe(engine, learner)["gap"] == pytest.approx(engine.gap, rel=0.1)
    with pytest.raises(OutOfSyncError, match=r"rollout\.probe\.bound"):
        fall_behind(probe, engine, learner)
    resumed, *_ = drifting(policy, model_folder)
    for _ in range(3):
        resumed.remember(ROUNDING)
    engine.gap = 0.028
    with pytest.raises(OutOfSyncError):
        resumed(engine, learner)


def test_frozen_from_the_first_update_on(policy: Policy, model_folder: Path) -> None:
    probe, engine, learner = drifting(policy, model_folder)
    with pytest.raises(OutOfSyncError):
        fall_behind(probe, engine, learner)


def test_a_bound_that_is_set_is_the_only_one(policy: Policy, model_folder: Path) -> None:
    probe, engine, learner = drifting(policy, model_folder, bound=0.1)
    for engine.gap in (*[ROUNDING] * 10, 0.09):
        probe(engine, learner)
    engine.gap = 0.11
    with pytest.raises(OutOfSyncError):
        probe(engine, learner)


def test_an_engine_without_any_logprob_does_not_pass(policy: Policy, model_folder: Path) -> None:
    probe, engine, learner = drifting(policy, model_folder)
    engine.gap = math.nan
    with pytest.raises(OutOfSyncError):
        probe(engine, learner)
