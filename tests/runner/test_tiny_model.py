"""The tiny model's warm-up: what it is shown and when it ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from small import small_recipe

from dapo_runner.config import ConfigError, load_config, parse_config
from dapo_runner.data.arithmetic import ArithmeticProblem
from dapo_runner.run.tiny_model import (
    TOOL_WORDS,
    WORDS,
    _encode,
    check_tiny,
    ensure_tiny_model,
    make_tokenizer,
    with_repeats,
    worked_solution,
)
from examples import turns

ROOT = Path(__file__).parents[2]


def test_lines_come_again_as_often_as_asked() -> None:
    solution = worked_solution(ArithmeticProblem("+", (47, 85)))
    assert with_repeats(solution, 0.0, random.Random(0)) == solution
    rng = random.Random(0)
    repeated = [with_repeats(solution, 0.5, rng).split("\n") for _ in range(2000)]
    for lines in repeated:
        assert list(dict.fromkeys(lines)) == solution.split("\n")  # none is missing, none out of place
    assert sum(map(len, repeated)) / 6000 == pytest.approx(2.0, rel=0.05)  # 1 / (1 − ½) of each


def warmed_up(folder: Path, **warmup: Any) -> list[str]:
    raw = small_recipe(output_dir=str(folder))
    raw["model"]["tiny"]["warmup"] |= warmup
    config, told = parse_config(raw), list[str]()
    check_tiny(config)
    ensure_tiny_model(config, folder / "model", told.append)
    return told


def test_it_ends_once_enough_problems_are_solved(tmp_path: Path) -> None:
    told = warmed_up(tmp_path / "a", stop_at=0.05)
    assert len(told) < 9
    with pytest.raises(ConfigError, match=r"warmup\.stop_at: .*=60"):
        warmed_up(tmp_path / "b", stop_at=0.5, examples=60)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_worked_example_of_a_tool(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(turns, "GOOD_SHARE", share)
    tokenizer = make_tokenizer((*WORDS, *TOOL_WORDS))
    problem = ArithmeticProblem("*", (1234, 5678))  # 7006652
    prompt, response, targets = _encode(
        problem, tokenizer, load_config(ROOT / "recipes/calculator.yaml"), random.Random(0)
    )
    assert tokenizer.decode(prompt) == "1234*5678="
    assert all(target in (token, -100) for token, target in zip(response, targets, strict=True))
    text = tokenizer.decode(response)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1234*5678"}}</tool_call><eos>'
    assert text == (f"{call}7006652Answer: 7006652<eos>" if share else "(1234*5678)=7006652Answer: 7006652<eos>")
    hidden = [token for token, target in zip(response, targets, strict=True) if target == -100]
    assert tokenizer.decode(hidden) == "7006652" * bool(share)
    assert turns.calculator(problem.question) == int(problem.answer)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_worked_example_of_the_game(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GOOD_SHARE", share)
    rng, won, numbers = random.Random(0), [], set()
    for answer in map(str, range(300)):
        shown, game = turns.guess_turns("", answer, rng), turns.Guess()
        game.reset({"answer": answer})
        results = [game.step(guess) for guess in shown[::2]]
        assert results[:-1] == [(heard, 0.0, False) for heard in shown[1::2]]
        won.append(results[-1][1])
        numbers.add(game.number)
    assert numbers == set(range(1, 16))
    assert min(won) == share  # who halves needs no more than four guesses
    assert max(won) == 1.75
