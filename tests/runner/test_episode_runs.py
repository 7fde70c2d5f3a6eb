"""Runs over an environment: killed in the midst of episodes, and sampled while an earlier step trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from launch import torchrun
from small import small_recipe, write_recipe
from talkers import ROOM
from transformers import AutoTokenizer

from dapo_runner.cli import main
from dapo_runner.config import parse_config
from dapo_runner.data.dataset import PromptCursor, load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.train import train


def records(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "metrics.jsonl", *(run / "rollouts").iterdir())}


def test_killed_in_the_midst_of_episodes_and_resumed_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, steps=3)
    options = ["env={kind: 'talkers:Deadly', max_turn_tokens: 25}", *ROOM]
    killed = torchrun(1, "-m", "dapo_runner", "train", recipe, *options)
    assert killed.returncode == -9
    resumed = torchrun(1, "-m", "dapo_runner", "train", recipe, *options)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert re.findall(r"\b(\d)/3\b", resumed.stdout) == ["2", "3"]
    whole = torchrun(1, "-m", "dapo_runner", "train", recipe, *options, "run.name=whole")
    assert whole.returncode == 0, whole.stderr[-4000:]
    turns = [line["batch/turns"] for line in read_log(tmp_path / "runs/whole/metrics.jsonl") if line["kind"] == "step"]
    assert min(turns) > 1.2
    assert records(tmp_path / "runs" / "small") == records(tmp_path / "runs" / "whole")


def test_a_run_that_ends_at_too_many_failures_has_saved_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, steps=3)
    options = ["env={kind: 'talkers:Mortal', max_turn_tokens: 25}", *ROOM]
    assert main(["train", str(recipe), *options]) != 0
    run = tmp_path / "runs" / "small"
    assert [line["step"] for line in read_log(run / "metrics.jsonl") if line["kind"] == "step"] == [1]
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["step_000001"]
    Path("healed").touch()
    assert main(["train", str(recipe), *options]) == 0
    assert [line["step"] for line in read_log(run / "metrics.jsonl") if line["kind"] == "step"] == [1, 2, 3]


def test_asynchronous_episodes_lose_nothing_and_take_nothing_twice(
    tmp_path: Path, model_folder: Path, servers: list[FakeServer]
) -> None:
    raw: dict[str, Any] = small_recipe(output_dir=str(tmp_path), steps=4, eval_every=0)
    raw["model"] = {"dtype": "float32", "path": str(model_folder)}
    raw["env"] = {"kind": "talkers:Digits", "max_turn_tokens": 20}
    raw["sampler"] |= {"filter_groups": False, "max_age": 2}
    raw["logging"] |= {"rollouts": {"groups": 4}}
    raw["optimizer"]["token_budget"] = 128
    raw["rollout"] |= {
        "max_response_tokens": 60,
        "engine": "server",
        "server": {"urls": [server.url for server in servers], "folder": str(tmp_path)},
        "max_staleness": 1,
        "correction": {"weights": "token"},
    }
    config = parse_config(raw)
    folder = train(config, Progress())
    steps = [read_step(path) for path in saved_steps(folder / "rollouts").values()]
    dataset = load_data(config, AutoTokenizer.from_pretrained(model_folder))
    wanted = PromptCursor(dataset.train, config.run.seed, dataset.heldout).take(16)
    assert [group["prompt"]["id"] for step in steps for group in step.groups] == [prompt.id for prompt in wanted]
    assert {len(group["samples"]) for step in steps for group in step.groups} == {4}
    timings = read_log(folder / "timings.jsonl")
    assert sum(line.get("env/episodes", 0) for line in timings) >= 64
    assert max(line["batch/age_max"] for line in read_log(folder / "metrics.jsonl") if line["kind"] == "step") <= 2
