"""Runs over an environment: ended by its failures, and sampled while an earlier step trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_server import FakeServer
from small import Dapo, Notes, config_in, events_of, steps_of, write_recipe
from talkers import ROOM
from transformers import AutoTokenizer

from dapo_runner.data.dataset import PromptCursor, load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.train import train


def test_a_run_that_ends_at_too_many_failures_has_saved_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dapo: Dapo
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", write_recipe(tmp_path, steps=3), "env={kind: 'talkers:Mortal', max_turn_tokens: 25}"]
    run = tmp_path / "runs" / "small"
    dapo(*command, *ROOM, code=1)
    assert [event["step"] for event in events_of(run)] == [1]
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["step_000001"]
    Path("healed").touch()
    dapo(*command, *ROOM)
    assert [event["step"] for event in events_of(run)] == [1, 2, 3]


def test_asynchronous_episodes_lose_nothing_and_take_nothing_twice(
    tmp_path: Path, model_folder: Path, servers: list[FakeServer]
) -> None:
    named = {"urls": [server.url for server in servers], "folder": str(tmp_path)}
    ahead = {"engine": "server", "server": named, "max_staleness": 1, "correction": {"weights": "token"}}
    config = config_in(
        tmp_path,
        model_folder,
        run={"eval_every": 0},
        env={"kind": "talkers:Digits", "max_turn_tokens": 20},
        sampler={"filter_groups": False, "max_age": 2},
        logging={"rollouts": {"groups": 4}},
        optimizer={"token_budget": 128},
        rollout={"max_response_tokens": 60, **ahead},
    )
    folder = train(config, Notes())
    steps = [read_step(path) for path in saved_steps(folder / "rollouts").values()]
    dataset = load_data(config, AutoTokenizer.from_pretrained(model_folder))
    wanted = PromptCursor(dataset.train, config.run.seed, dataset.heldout).take(16)
    assert [group["prompt"]["id"] for step in steps for group in step.groups] == [prompt.id for prompt in wanted]
    assert {len(group["samples"]) for step in steps for group in step.groups} == {4}
    assert sum(line.get("env/episodes", 0) for line in read_log(folder / "timings.jsonl")) >= 64
    assert max(steps_of(folder, "batch/age_max")) <= 2
