"""The task of the recipe `search`: examples/search.py and the files that it makes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from dapo_runner.config import load_config
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.types import Completion, Prompt
from examples import search

RECIPE = Path(__file__).parents[2] / "recipes" / "search.yaml"
PROBLEM = search.Problem(12, (3, 5), 27)


@pytest.mark.parametrize(
    ("walk", "is_correct"),
    [
        (" 9 27", True),
        (" 17 22; 17 22 27", True),  # a restart
        (" 9 28; 9 27", False),
        (" 19 24 27", False),  # 7 is not a number of the problem
        (" 17 22", False),
        (" 36 33 30 27", False),  # out of range
        (" 9  27", False),
        (" 9 27;", False),
    ],
)
def test_a_walk_is_correct_if_all_its_moves_are_possible(walk: str, is_correct: bool) -> None:
    assert search.read_problem(PROBLEM.prompt) == PROBLEM
    for reason in ("stop", "length"):
        completion = Completion(torch.zeros(1), torch.zeros(1), reason, walk)
        assert search.reached(Prompt("", (), PROBLEM.prompt, ""), completion) == (is_correct and reason == "stop")


def test_players_keep_the_rules_and_the_best_one_is_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SLIP", 0.0)
    rng, lengths = random.Random(1), {}
    problems = [search.make_problem(rng) for _ in range(200)]
    distances = [search.distances_from(problem.start, problem.numbers)[problem.target] for problem in problems]
    assert set(distances) == set(search.DISTANCES)
    for player in search.SHARES:
        monkeypatch.setattr(search, "SHARES", {player: 1.0})
        walks = [(problem, walk) for problem in problems if (walk := search.play(problem, rng)) is not None]
        assert all(search.is_reached(problem, walk) for problem, walk in walks)
        lengths[player] = [len(search.read_walk(walk)) for _, walk in walks]
    assert lengths["best"] == distances
    assert max(lengths["random"]) > 5 * min(lengths["random"])


def test_the_files_fit_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PROBLEMS", {"heldout": 20, "train": 50})
    monkeypatch.setattr(search, "WALKS", 30)
    search.make_files(tmp_path, [3])
    rows = {path.stem: list(map(json.loads, path.open())) for path in tmp_path.glob("*.jsonl")}
    prompts = {name: {row["prompt"] for row in found} for name, found in rows.items()}
    assert {name: len(found) for name, found in rows.items()} == {"heldout": 20, "train": 50, "walks": 30}
    assert not prompts["heldout"] & (prompts["train"] | prompts["walks"])
    config = load_config(RECIPE)
    tokenizer = load_tokenizer(tmp_path / "untrained_3", config.model)
    for row in rows["walks"]:
        prompt, response = (tokenizer(row[key])["input_ids"] for key in ("prompt", "completion"))
        assert tokenizer.unk_token_id not in (*prompt, *response)
        assert len(prompt) <= config.rollout.max_prompt_tokens
        assert len(response) == len(search.read_walk(row["completion"]))
