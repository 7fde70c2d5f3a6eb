"""Runs every snippet of docs/first-environment.md, and compares what the page shows with what was kept."""

from __future__ import annotations

import importlib
import random
import re
import sys
from pathlib import Path

import pytest
import yaml

from dapo_runner.cli import main
from dapo_runner.logging.metrics import read_log

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "first-environment.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- (.+?) -->\n```\w+\n(.+?)```", PAGE, re.DOTALL))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_game", raising=False)
    (tmp_path / "my_game.py").write_text(SNIPPETS["game"] + "\n\n" + SNIPPETS["player"])
    importlib.invalidate_caches()
    return tmp_path


def test_the_page_is_short_and_its_snippets_are_named() -> None:
    assert PAGE.count("\n") <= 128
    assert SNIPPETS.keys() == {"game", "play", "player", "recipe"}


def test_the_game_answers_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SNIPPETS["play"], {})
    assert capsys.readouterr().out in PAGE


def test_the_player_plays_to_the_end() -> None:
    player = importlib.import_module("my_game").player
    games = [player("", str(number), random.Random(number)) for number in range(30)]
    assert all(len(turns) % 2 and set(turns[1::2]) <= {"+", "-"} for turns in games)
    assert max(map(len, games)) <= 13


def test_the_output_is_that_of_the_results() -> None:
    kept = (ROOT / "benchmarks" / "results" / "first-environment-20261125.md").read_text(encoding="utf-8")
    shown = re.findall(r"^evaluation after step (\d+): avg@4 ([\d.]+)%", PAGE, re.MULTILINE)
    assert len(shown) == 4
    assert shown == re.findall(r"^evaluation after step (\d+): avg@4 ([\d.]+)%", kept, re.MULTILINE)
    (samples,) = re.findall(r"```\n(sample 1 .+?)```", PAGE, re.DOTALL)
    assert samples in kept
    assert "6.8 minutes" in PAGE
    assert "6.8 minutes" in kept


def test_the_recipe_trains(folder: Path) -> None:
    recipe = yaml.safe_load(SNIPPETS["recipe"])
    recipe["run"] |= {"steps": 1, "threads": 1}
    recipe["model"]["tiny"] |= {"hidden_size": 16, "warmup": {**recipe["model"]["tiny"]["warmup"], "steps": 10}}
    recipe["data"] |= {"eval_size": 2, "arithmetic": {"train_size": 2000}}
    recipe["sampler"] |= {"prompts_per_step": 2, "max_rounds": 1}
    recipe["optimizer"] |= {"mini_batch_size": 16}
    (folder / "guess.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "guess.yaml"]) == 0
    events = read_log(folder / "runs/guess/timings.jsonl")
    (step,) = [event for event in events if event["kind"] == "step"]
    assert step["env/turns"] > step["env/episodes"] > 0
    assert step["env/failed"] == 0
