"""Ranks that share servers: each asks for its share, rank 0 sends the weights, any of them to one that is back."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_nccl import MEET, join
from fake_server import GENERATE, FakeServer
from launch import torchrun
from small import write_recipe

from dapo_runner.logging.metrics import read_log


def run(
    folder: Path,
    n: int,
    model: Path,
    servers: list[FakeServer],
    *more: str,
    program: tuple[str | Path, ...] = ("-m", "dapo_runner"),
    **settings_of_run: int,
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    recipe = write_recipe(folder, **{"steps": 2, "eval_every": 0, "save_every": 0, **settings_of_run})
    named = ", ".join(server.url for server in servers)
    settings = [
        f"run.name=on{n}", "model.tiny=null", f"model.path={model}", "sampler.filter_groups=false",
        "rollout.engine=server", "rollout.max_response_tokens=6", f"rollout.server.urls=[{named}]",
        f"rollout.server.folder={folder}", *more,
    ]  # fmt: skip
    done = torchrun(n, *program, "train", recipe, *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(folder.glob("dapo-*"))
    return read_log(folder / "runs" / f"on{n}" / "metrics.jsonl")


def test_two_ranks_and_a_server_that_is_lost(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    alone = run(tmp_path, 1, model_folder, servers)

    def lost_and_back(body: dict[str, Any]) -> None:
        if servers[1].alive and servers[0].seen(GENERATE) % 9 == 7:
            servers[1].kill()
            servers[1].start()

    servers[0].hooks[GENERATE] = lost_and_back
    events = run(tmp_path, 2, model_folder, servers)
    assert [(event["kind"], event["step"]) for event in events] == [(event["kind"], event["step"]) for event in alone]
    for event, other in zip(events, alone, strict=True):
        for key, value in other.items():
            if key.startswith("sampling/"):
                assert event[key] == pytest.approx(value, rel=1e-6), key
        if event["kind"] == "step":
            assert event["sync/gap"] < 1e-5


def test_two_ranks_that_sample_ahead(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    """Rank 0 alone asks for the training prompts, and both train on what it gets; the run is taken up again where a
    step ahead had been sampled.
    """
    ahead = ["rollout.max_staleness=1", "rollout.correction.weights=token", "sampler.max_age=1"]
    priorities = list[bool]()
    for server in servers:
        server.hooks[GENERATE] = lambda body: priorities.append(body.get("priority", -1) >= 0)

    def steps() -> list[dict[str, Any]]:
        events = run(tmp_path, 2, model_folder, servers, *ahead, steps=3, eval_every=3, save_every=1)
        assert [event["step"] for event in events if event["kind"] == "eval"] == [0, 3]
        return [event for event in events if event["kind"] == "step"]

    first = steps()
    n_asked = sum(priorities)
    assert n_asked == sum(step["sampling/groups"] for step in first)
    shutil.rmtree(tmp_path / "runs" / "on2" / "checkpoints" / "step_000003")
    again = steps()
    assert again[:2] == first[:2]
    assert [step["step"] for step in again] == [1, 2, 3]
    for step in again:
        assert step["sync/gap"] < 1e-5
        assert step["batch/age_max"] <= 1
        assert 0 < step["train/rollout_ess"] <= 1
    assert sum(priorities) - n_asked == again[2]["sampling/groups"]


def test_two_ranks_and_weights_that_rank_0_sends(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    """By NCCL, with a socket in its place; a server that dies meets rank 0 anew before any rank takes its answers."""
    for server in servers:
        join(server)

    count = itertools.count()

    def lost_and_back(body: dict[str, Any]) -> None:
        if next(count) % 9 == 7 and servers[1].alive:
            servers[1].kill()
            servers[1].start()

    servers[0].hooks[GENERATE] = lost_and_back
    program = (Path(__file__).with_name("by_nccl.py"),)
    events = run(tmp_path, 2, model_folder, servers, "rollout.server.transfer=nccl", program=program)
    assert servers[0].seen(MEET) == 1 < servers[1].seen(MEET)
    steps = [event for event in events if event["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["sync/gap"] < 1e-5
