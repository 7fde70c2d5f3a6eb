"""Whole runs with a critic, a KL in the reward and a reference that moves: figures, resume, forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import small_recipe

from dapo_runner.config import parse_config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.train import train

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {
        "loss": {"objective": "ppo", "reference_ema": 0.9},
        "advantage": {"kind": "gae"},
        "critic": {"lr": 1e-3, "warmup_steps": 1},
        "kl": {"coef": 0.05},
    },
    "shared": {"loss": {"objective": "ppo"}, "advantage": {"kind": "gae"}, "critic": {"share_trunk": True}},
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DAPO's, whose warmed-up model the others start from."""
    return train(parse_config(small_recipe(output_dir=str(tmp_path_factory.mktemp("runs")), steps=1)), Progress())


def recipe(folder: Path, kind: str, **run: Any) -> dict[str, Any]:
    raw = small_recipe(output_dir=str(folder), **run)
    sections = dict(KINDS[kind])
    raw["reward"]["kl"] = sections.pop("kl", None)
    raw["sampler"] |= {"filter_groups": False, "max_rounds": 1}
    return raw | sections


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted(origin: Path, tmp_path: Path, kind: str) -> None:
    raw = recipe(tmp_path, kind, steps=3)
    raw["model"] = {"dtype": "float32", "path": str(origin / "model")}
    whole = train(parse_config({**raw, "run": {**raw["run"], "name": "whole"}}), Progress())
    train(parse_config({**raw, "run": {**raw["run"], "steps": 2}}), Progress())
    resumed = train(parse_config(raw), Progress())
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    steps = [event for event in read_log(whole / "metrics.jsonl") if event["kind"] == "step"]
    for step in steps:
        assert {"train/value_loss", "train/value_clip", "train/explained_variance", "train/return"} <= step.keys()
        assert ("train/loss" in step) == (kind == "shared" or step["step"] > 1)  # the policy waits for one step
    if kind == "ppo":
        assert steps[-1]["train/reward_kl"] != 0
    logged = read_step(saved_steps(whole / "rollouts")[3]).groups
    assert any(sample["advantage"] != 0 for group in logged for sample in group["samples"])


def test_ppo_goes_on_from_a_run_without_a_critic(origin: Path, tmp_path: Path) -> None:
    raw = recipe(tmp_path, "ppo", name="forked", steps=3, eval_every=0, **{"from": f"{origin}@1"})
    forked = train(parse_config(raw), Progress())
    steps = [event for event in read_log(forked / "metrics.jsonl") if event["kind"] == "step"]
    assert ["train/loss" in step for step in steps] == [False, True]  # the warm-up is that of the fork


def test_offloaded_states_compute_the_same_also_after_a_resume(origin: Path, tmp_path: Path) -> None:
    """Of policy, critic and the moving reference, each with float32 weights beside those in bfloat16."""
    raw = recipe(tmp_path, "ppo", steps=3)
    raw["model"] = {"dtype": "bfloat16", "path": str(origin / "model")}
    beside = train(parse_config({**raw, "run": {**raw["run"], "name": "beside"}}), Progress())
    raw["optimizer"]["offload"] = True
    train(parse_config({**raw, "run": {**raw["run"], "steps": 2}}), Progress())
    resumed = train(parse_config(raw), Progress())
    assert (resumed / "metrics.jsonl").read_bytes() == (beside / "metrics.jsonl").read_bytes()
    step = [event for event in read_log(resumed / "metrics.jsonl") if event["kind"] == "step"][-1]
    assert step["train/reward_kl"] != 0
    assert {"train/loss", "train/value_loss"} <= step.keys()
