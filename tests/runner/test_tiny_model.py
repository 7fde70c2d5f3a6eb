"""The tiny model's warm-up: what it is shown and when it ends. And AMX that a virtual machine hides a part of."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from refusals import refused
from small import small_recipe

from dapo_runner.config import Config, load_config, parse
from dapo_runner.data.arithmetic import ArithmeticProblem
from dapo_runner.preflight.amx import VARIABLE, WITHOUT_AMX, disable_broken_amx
from dapo_runner.tiny_model import (
    TOOL_WORDS,
    WORDS,
    _encode,
    ensure_tiny_model,
    make_tokenizer,
    with_repeats,
    worked_solution,
)
from examples import turns

ROOT = Path(__file__).parents[2]


def test_lines_come_again_as_often_as_asked() -> None:
    solution = worked_solution(ArithmeticProblem("+", (47, 85)))
    assert solution == "7+5+0=12\n4+8+1=13\nAnswer: 132"
    assert with_repeats(solution, 0.0, random.Random(0)) == solution
    lines = with_repeats(solution, 0.9, random.Random(0)).split("\n")
    assert list(dict.fromkeys(lines)) == solution.split("\n")  # none is missing, none out of place
    assert len(lines) > 9


def test_it_ends_once_enough_problems_are_solved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(**warmup: float | str) -> list[str]:
        raw = small_recipe(output_dir=str(tmp_path))
        raw["model"]["tiny"]["warmup"] |= warmup
        config, lines = parse(raw, Config), list[str]()
        assert ensure_tiny_model(config, tmp_path / "model", lines.append) == tmp_path / "model"
        return lines

    assert 1 < len(warm_up(stop_at=0.05)) < 9  # a line for every ten steps
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1  # also of the weights, which safetensors writes for the owner alone
    assert warm_up() == []  # it is there
    assert warm_up(turns="random:random") == []  # by this process
    monkeypatch.setattr("dapo_runner.tiny_model.MADE_HERE", set())
    (line,) = warm_up(turns="random:random")  # which may be others than it was shown
    assert str(tmp_path / "model") in line


class Fixed(random.Random):
    """Draws one number for ever: 0 is a good example, 1 a poor one."""

    def __init__(self, drawn: float) -> None:
        super().__init__(0)
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_only_the_policys_turns_of_an_example_train(drawn: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tokenizer, config = make_tokenizer((*WORDS, *TOOL_WORDS)), load_config(ROOT / "recipes/calculator.yaml")
    problem = ArithmeticProblem("*", (1234, 5678))  # 7006652
    tokens, labels = (tensor.tolist() for tensor in _encode(problem, tokenizer, config, Fixed(drawn)))
    n = len("1234*5678=")
    assert tokenizer.decode(tokens[:n]) == "1234*5678="
    assert labels[:n] == [-100] * n
    response, targets = tokens[n:], labels[n:]
    assert all(target in (token, -100) for token, target in zip(response, targets, strict=True))
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1234*5678"}}</tool_call><eos>'
    poor = "(1234*5678)=7006652Answer: 7006652<eos>"
    assert tokenizer.decode(response) == (poor if drawn else f"{call}7006652Answer: 7006652<eos>")
    hidden = [token for token, target in zip(response, targets, strict=True) if target == -100]
    assert tokenizer.decode(hidden) == ("" if drawn else "7006652")
    assert turns.calculator(problem.question) == int(problem.answer)


@pytest.mark.parametrize("shown", ["1 / 0", "'132'", "['4', '+']", "['4', 5, '6']", "['4', 'higher', '5']"])
def test_turns_that_cannot_be_shown_are_refused(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "shown", lambda *_: eval(shown), raising=False)
    raw = small_recipe()
    raw["model"]["tiny"]["warmup"] |= {"steps": 1, "turns": "examples.turns:shown"}
    with refused("model.tiny.warmup.turns", parts=["examples.turns:shown", "47+85", "132"]):
        _encode(ArithmeticProblem("+", (47, 85)), make_tokenizer(), parse(raw, Config), random.Random(0))


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_a_worked_example_of_the_game_follows_its_rules(drawn: float) -> None:
    paid, numbers = set(), set()
    for answer in map(str, range(300)):
        shown, game = turns.guess_turns("", answer, Fixed(drawn)), turns.Guess()
        game.reset({"answer": answer})
        results = [game.step(guess) for guess in shown[::2]]
        assert results[:-1] == [(heard, 0.0, False) for heard in shown[1::2]]
        paid.add(results[-1][1])
        numbers.add(game.number)
    assert numbers == set(range(1, 16))
    assert min(paid) == (0.0 if drawn else 1.0)  # who halves needs no more than four guesses
    assert max(paid) == 1.75


@pytest.mark.parametrize(
    ("level", "flags", "chosen", "is_broken"),
    [
        (28, "avx512_fp16 amx_tile amx_int8", None, True),
        (28, "amx_tile", "AVX2", True),  # a choice of the user stands
        (29, "avx512_fp16 amx_tile", None, False),
        (28, "avx512_fp16", None, False),
        (28, "xamx_tile", None, False),
    ],
)
def test_amx_without_tile_sizes_is_broken(
    level: int, flags: str, chosen: str | None, is_broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: {flags}\n")
    monkeypatch.setenv(VARIABLE, chosen or "")
    if chosen is None:
        monkeypatch.delenv(VARIABLE)
    assert disable_broken_amx(cpuinfo) is is_broken
    assert os.environ.get(VARIABLE) == (chosen or (WITHOUT_AMX if is_broken else None))
    assert not disable_broken_amx(tmp_path / "absent")
