"""Runs every snippet of docs/environments.md and docs/first-environment.md."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from builders import make_config, snippets_of, write_rows
from refusals import refused
from small import Dapo, events_of, recipe_in

from dapo_runner.config import EnvironmentConfig
from dapo_runner.environments.adapters import TextArena
from dapo_runner.environments.tools import make_environment

ROOT = Path(__file__).parents[3]
ROW = '{"prompt": "I think of a number from 1 to 20.", "seed": 1}'  # as the page shows it
PAGE, FIRST_PAGE = ((ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("environments", "first-environment"))
SNIPPETS, FIRST = snippets_of("environments"), snippets_of("first-environment")
FILES = {
    "my_tools": SNIPPETS["tool: function"],
    "my_games": SNIPPETS["game: class"],
    "my_arena": SNIPPETS["adapters"],
    "my_turns": SNIPPETS["turns: function"],
    "my_game": f"{FIRST['game']}\n\n{FIRST['player']}",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, text in FILES.items():
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(text)
    importlib.invalidate_caches()
    write_rows(tmp_path / "games.jsonl", [{**json.loads(ROW), "seed": seed} for seed in range(8)])
    return tmp_path


def train(dapo: Dapo, folder: Path, recipe: dict[str, Any]) -> dict[str, float]:
    """Return what the only step of a recipe logged."""
    recipe["run"] |= {"name": "page", "steps": 1, "threads": 1}
    recipe["data"] |= {"eval_size": 2}
    recipe["sampler"] |= {"prompts_per_step": 2, "max_rounds": 1}
    (folder / "page.yaml").write_text(yaml.safe_dump(recipe))
    dapo("train", "page.yaml")
    (step,) = events_of(folder / "runs" / "page", file="timings.jsonl")
    return step


def train_with(dapo: Dapo, folder: Path, model: Path, settings: str, **sections: Any) -> dict[str, float]:
    room = {"rollout": {"group_size": 4, "max_prompt_tokens": 200, "max_response_tokens": 40}}
    recipe = recipe_in(folder / "runs", model, **room, optimizer={"mini_batch_size": 8, "token_budget": 512})
    for section, values in (yaml.safe_load(SNIPPETS[settings]) | sections).items():
        recipe[section] = {**recipe.get(section, {}), **values}
    if "path" in recipe["data"]:
        del recipe["data"]["format"]
    return train(dapo, folder, recipe)


def test_every_snippet_is_tested() -> None:
    assert f"`{ROW}`" in PAGE
    assert PAGE.count("```") == 2 * len(SNIPPETS)
    settings, code = {"tool: settings", "game: settings", "gym"}, {"tool: function", "game: class", "adapters"}
    assert SNIPPETS.keys() == settings | code | {"turns: function"}
    assert FIRST.keys() == {"game", "play", "player", "recipe"}


def test_a_tool(folder: Path, model_folder: Path, dapo: Dapo) -> None:
    step = train_with(dapo, folder, model_folder, "tool: settings")
    assert step["env/episodes"] >= 8
    assert step["env/failed"] == 0
    config = EnvironmentConfig(**yaml.safe_load(SNIPPETS["tool: settings"])["env"])
    environment = make_environment(config)()
    assert environment.reset({"answer": "12"}) is None
    (call,) = re.findall(r"`(<tool_call>{.+?)`", PAGE)
    assert [message.content for message in environment.step(call)[0]] == ["12"]
    assert environment.step("12") == ((), None, True)
    assert environment.get_reward() is None  # but `reward.kind` has one


def test_a_game(folder: Path, model_folder: Path, dapo: Dapo) -> None:
    step = train_with(dapo, folder, model_folder, "game: settings", advantage={"kind": "my_turns:by_turn"})
    assert step["env/turns"] > step["env/episodes"] > 0
    game = make_environment(EnvironmentConfig(**yaml.safe_load(SNIPPETS["game: settings"])["env"]))()
    game.reset({"seed": 1, "answer": ""})
    results = [game.step(str(number)) for number in range(1, 21)]
    (won,) = [number for number, (_, _, done) in enumerate(results, start=1) if done]
    assert results[won - 1][1] == pytest.approx(1 - won / 10)
    hints = [hint for hint, _, done in results if not done]
    assert hints == ["higher"] * (won - 1) + ["lower"] * (20 - won)
    assert [game.step(text) for text in ("²", "9" * 5000, "word")] == [("lower", 0.0, False)] * 3


def test_the_first_game_and_its_player(capsys: pytest.CaptureFixture[str]) -> None:
    exec(FIRST["play"], {})
    assert capsys.readouterr().out in FIRST_PAGE
    player = importlib.import_module("my_game").player
    games = [player("", str(number), random.Random(number)) for number in range(30)]
    assert all(len(turns) % 2 and set(turns[1::2]) <= {"+", "-"} for turns in games)
    assert max(map(len, games)) <= 13


def test_the_first_recipe_trains(folder: Path, dapo: Dapo) -> None:
    recipe = yaml.safe_load(FIRST["recipe"])
    recipe["model"]["tiny"] |= {"hidden_size": 16}
    recipe["model"]["tiny"]["warmup"] |= {"steps": 10, "examples": 100}
    recipe["optimizer"] |= {"mini_batch_size": 16}
    step = train(dapo, folder, recipe)
    assert step["env/turns"] > step["env/episodes"] > 0 == step["env/failed"]


def test_the_output_that_the_first_page_shows_is_that_of_the_results() -> None:
    kept = (ROOT / "benchmarks" / "results" / "first-environment-20261128.md").read_text(encoding="utf-8")
    shown = re.findall(r"^evaluation after step \d+: avg@4 .+ reward \S+", FIRST_PAGE, re.MULTILINE)
    assert len(shown) == 4
    for text in (*shown, *re.findall(r"```\n(sample 1 .+?)```", FIRST_PAGE, re.DOTALL), "0.9 minutes"):
        assert text in FIRST_PAGE
        assert text in kept


def test_an_openenv_client() -> None:
    def result(message: str, *end: Any) -> Any:  # as of `openenv.core.SyncEnvClient`
        return SimpleNamespace(observation=SimpleNamespace(message=message), reward=0.5, done=True)

    client = SimpleNamespace(
        reset=lambda seed: result(f"go {seed}"), step=lambda action: result(f"did {action}"), close=lambda: 7
    )
    environment = importlib.import_module("my_arena").remote(lambda: client, str.upper)
    assert environment.reset({"seed": 3, "answer": ""}) == "go 3"
    assert environment.step("left") == ("did LEFT", 0.5, True)
    assert environment.close() == 7


class Duel:
    """A game as textarena has them: it draws from Python's global random numbers. Whoever moves to 0 wins."""

    def reset(self, num_players: int, seed: int) -> None:
        self.n, self.player, self.moves = num_players, 0, [random.random()]

    def get_observation(self) -> tuple[int, list[tuple[int, str, None]]]:
        return self.player, [(sender, f"{sender}: {self.moves[-1]}", None) for sender in (-1, self.player)]

    def step(self, action: str) -> tuple[bool, None]:
        self.moves.append(float(action) + random.random())
        self.player = (self.player + 1) % self.n
        return action == "0", None

    def close(self) -> tuple[dict[int, float], None]:
        return {0: 1.0 if self.player else -1.0}, None


def test_a_game_of_textarena_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = {"Duel-v0-raw": Duel}
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda name: made.get(name, int)()))

    def play(seed: int, last: str = "0") -> list[Any]:
        game = TextArena("Duel-v0", opponent=lambda text, rng: last if "7" in text[-8:] else str(rng.random()))
        found = [game.reset({"seed": seed}), *(game.step(str(turn)) for turn in range(3, 0, -1))]
        return [*found, game.step("0")]

    state = random.getstate()
    games = [play(seed) for seed in (1, 1, 2)]
    assert random.getstate() == state
    assert games[0] == games[1] != games[2]
    assert games[0][0].startswith("-1: ")
    assert games[0][0].count(":") == 1  # not what the policy said itself
    assert games[0][1][1:] == (0.0, False)  # not None: an episode that does not end earns nothing
    assert games[0][-1] == ("", 1.0, True)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with refused("env.kind"):
        TextArena("Duel-v0")


def test_games_of_textarena() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    arena = importlib.import_module("my_arena")
    game, low, high, is_done, text = arena.guess(), 1, 20, False, ""
    game.reset({"seed": 1})
    while not is_done:
        guess = (low + high) // 2
        text, reward, is_done = game.step(f"[{guess}]")
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    assert reward == 1.0
    duel = arena.tic_tac_toe()
    assert "[0]" in duel.reset({"seed": 1})
    assert {"O", "X"} <= {*duel.step("[8]").observation}


def test_reasoning_gym() -> None:
    """`tests/runner/data/test_reasoning_gym.py` generates problems."""
    config = make_config(data={"format": "auto", "eval_size": 10, **yaml.safe_load(SNIPPETS["gym"])["data"]})
    assert config.reward.kind == "reasoning_gym"
    assert [task.name for task in config.data.reasoning_gym] == ["chain_sum", "gcd"]
