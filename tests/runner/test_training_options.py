"""Runs every snippet of docs/training-options.md."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import snippets_of, write_rows
from refusals import refused
from small import Dapo, Notes, events_of, write_recipe

from dapo_runner.cli import main
from dapo_runner.config import flatten, load_config, parse_config
from dapo_runner.config.run import EarlyStopConfig
from dapo_runner.logging.metrics import read_log
from dapo_runner.train import train

SNIPPETS = snippets_of("training-options")
CODE = {"python", "python: recipe", "python: vary", "reading"}
COMMANDS = {"resuming", "forking"}
SETTINGS = [name for name in SNIPPETS if name not in CODE | COMMANDS]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, model_folder: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the snippets name: a recipe, a model and questions."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / "models" / "mine")
    write_rows(tmp_path / "questions.jsonl", [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(300)])
    write_recipe(tmp_path, start, name="mine", steps=2, keep=9, output_dir="runs").rename("mine.yaml")
    return tmp_path


def run_code(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(SNIPPETS[name], names)  # the page is the test
    return names


def run_commands(name: str) -> list[int]:
    lines = [shlex.split(line) for line in SNIPPETS[name].splitlines()]
    assert all(program == "dapo" for program, *_ in lines)
    return [main(arguments) for _, *arguments in lines]


def test_no_snippet_is_without_a_mark() -> None:
    page = Path(__file__).parents[2] / "docs" / "training-options.md"
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(SNIPPETS)
    assert SNIPPETS.keys() > CODE | COMMANDS


@pytest.mark.parametrize("name", SETTINGS)
def test_every_key_of_a_snippet_is_a_setting_and_has_its_value(name: str) -> None:
    written = yaml.safe_load(SNIPPETS[name])
    config = parse_config({"model": {"tiny": {}}, "data": {"path": "x.jsonl"}} | written)
    assert flatten(written).items() <= flatten(config.model_dump(mode="json")).items()


def test_python_and_copies_that_are_refused_as_the_command_refuses() -> None:
    assert [event["step"] for event in events_of(run_code("python")["folder"])] == [1, 2, 3]
    assert len(SNIPPETS["python"].strip().splitlines()) <= 15
    names = run_code("python: vary")
    assert names["longer"] == load_config("mine.yaml", ["run.steps=4"]) != names["config"]
    with pytest.raises(ValueError, match="frozen"):
        names["config"].run.steps = 4
    run = names["config"].run.model_copy(update={"eval_every": 0, "early_stop": EarlyStopConfig()})
    with refused("run.early_stop"):
        train(names["config"].model_copy(update={"run": run}), Notes())


def test_own_model(dapo: Dapo) -> None:
    Path("own.yaml").write_text(SNIPPETS["own model"])
    short = ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=8", "reward.overlong.cache_length=4"]
    assert re.search(r"data: 300\D+44\D+256\b", dapo("train", "own.yaml", *short, "--dry-run"))


def test_a_run_is_started_read_resumed_and_forked() -> None:
    assert run_code("python: recipe")["folder"] == Path("runs/mine")
    names = run_code("reading")
    assert names["rewards"].keys() == {1, 2}
    assert len(names["evaluations"]) == 2
    assert isinstance(names["worst"], str)
    assert sum(p.numel() for p in names["model"].parameters()) > 1000
    assert run_commands("resuming") == [0, 0]
    changes = {event["key"]: event["after"] for event in read_log(Path("runs/mine/changes.jsonl"))}
    assert changes == {"run.steps": 4, "optimizer.lr": 5e-4}
    assert run_commands("forking") == [0]
    assert [event["step"] for event in events_of(Path("runs/warmer"))] == [3, 4]
