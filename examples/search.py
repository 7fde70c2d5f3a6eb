"""The task of the recipe `search`: reach a number by written search. `python -m examples.search FOLDER` makes its data.

A prompt is `3 5>27:12`: start at 12 and reach 27 by adding, subtracting or multiplying by 3 and 5, as often as needed,
with every value between 1 and 30. A response is the walk ` 9 27`, a token for each value. `;` gives a walk up, and the
next move starts at 12 again. A response is correct if every move is possible, and the last value is the target.

The start model imitates walks of mostly poor players. Long walks, dead ends and restarts are frequent, and the good
player is rare, so reinforcement learning has strategies to choose from.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from dapo_runner.config import TinyModelConfig
from dapo_runner.tiny_model import make_model, make_tokenizer
from dapo_runner.types import Completion, Prompt

HIGHEST = 30  # value of a walk
NUMBERS = range(2, 8)
DISTANCES = range(1, 7)  # moves of a shortest walk; equally frequent, as long as there are problems left
VALUES = range(HIGHEST, 0, -1)  # from the highest: a tokenizer must not read ` 1` in ` 12`
WORDS = (*(f" {value}" for value in VALUES), *map(str, VALUES), *">:;")
RESTART = ";"
LONGEST = 30  # moves of a walk that the start model imitates
SHARES = {"best": 0.1, "greedy": 0.15, "random": 0.75}  # of the players
SLIP = 0.2  # probability that the best or the greedy player makes a random move
GIVE_UP = 0.05  # probability of a restart before a move
PROBLEMS = {"heldout": 200, "train": 500}
WALKS = 40_000
MODEL = TinyModelConfig(layers=2, hidden_size=64, heads=4, intermediate_size=128)  # 0.1 million weights


class Problem(NamedTuple):
    start: int
    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{self.numbers[0]} {self.numbers[1]}>{self.target}:{self.start}"


def read_problem(prompt: str) -> Problem:
    first, second, target, start = map(int, re.findall(r"\d+", prompt))
    return Problem(start, (first, second), target)


@cache
def moves_from(value: int, numbers: tuple[int, ...]) -> list[int]:
    """Return the values that one move leads to."""
    found = {result for number in numbers for result in (value + number, value - number, value * number)}
    return sorted(result for result in found if 1 <= result <= HIGHEST)


@cache
def distances_from(start: int, numbers: tuple[int, ...]) -> dict[int, int]:
    """Return the number of moves to every value that can be reached."""
    found, queue = {start: 0}, deque([start])
    while queue:
        value = queue.popleft()
        for result in moves_from(value, numbers):
            if result not in found:
                found[result] = found[value] + 1
                queue.append(result)
    return found


def make_problem(rng: random.Random) -> Problem:
    """Return a problem whose distance is uniform over ``DISTANCES``."""
    distance = rng.choice(DISTANCES)
    while True:
        # In order: the same problem the other way round must not be in both training and held-out problems.
        start, numbers = rng.randint(1, HIGHEST), tuple(sorted(rng.sample(NUMBERS, 2)))
        if targets := [value for value, moves in distances_from(start, numbers).items() if moves == distance]:
            return Problem(start, numbers, rng.choice(targets))


def read_walk(walk: str) -> list[str]:
    """Return the values and restarts of a walk; empty if the text is anything else."""
    return re.findall(r"\d+|;", walk) if re.fullmatch(r"(?: \d+|;)*", walk) else []


def is_reached(problem: Problem, walk: str) -> bool:
    """Return whether all moves of a walk are possible and its last value is the target."""
    value = problem.start
    for step in read_walk(walk):
        if step != RESTART and int(step) not in moves_from(value, problem.numbers):
            return False
        value = problem.start if step == RESTART else int(step)
    return value == problem.target


def reached(prompt: Prompt, completion: Completion) -> bool:
    """Return the reward of the recipe: whether a response ends, and reaches the target."""
    return not completion.truncated and is_reached(read_problem(prompt.text), completion.text)


def remaining(player: str, problem: Problem, value: int) -> int:
    """Return what a player makes as small as possible: the moves that are left, the difference, or nothing."""
    if player == "best":
        return distances_from(value, problem.numbers).get(problem.target, HIGHEST)
    return abs(value - problem.target) if player == "greedy" else 0


def play(problem: Problem, rng: random.Random) -> str | None:
    """Return the walk of a random player, None if it is longer than ``LONGEST``."""
    (player,) = rng.choices(list(SHARES), list(SHARES.values()))
    value, walk = problem.start, ""
    for _ in range(LONGEST):
        if value == problem.target:
            return walk
        if walk and player != "best" and rng.random() < GIVE_UP:
            value, walk = problem.start, walk + RESTART
            continue
        options = moves_from(value, problem.numbers)
        if rng.random() >= SLIP:
            least = min(remaining(player, problem, result) for result in options)
            options = [result for result in options if remaining(player, problem, result) == least]
        value = rng.choice(options)
        walk += f" {value}"
    return None


def sample_problems(rng: random.Random, count: int, known: set[Problem]) -> Iterator[Problem]:
    """Yield problems that are not in ``known``, and add them to it."""
    while count:
        if (problem := make_problem(rng)) not in known:
            known.add(problem)
            count -= 1
            yield problem


def make_walks(rng: random.Random, heldout: set[Problem]) -> Iterator[dict[str, str]]:
    """Yield ``WALKS`` walks that reach their target, as examples for `dapo sft`."""
    count = 0
    while count < WALKS:
        problem = make_problem(rng)
        walk = None if problem in heldout else play(problem, rng)
        if walk is not None:
            count += 1
            yield {"prompt": problem.prompt, "completion": walk}


def make_files(folder: Path, seeds: Iterable[int]) -> None:
    """Write problems, walks, and an untrained model for each seed."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, known = random.Random("search"), set[Problem]()
    problems = {name: list(sample_problems(rng, count, known)) for name, count in PROBLEMS.items()}
    rows = {name: [{"prompt": problem.prompt} for problem in found] for name, found in problems.items()}
    rows["walks"] = list(make_walks(rng, set(problems["heldout"])))
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    tokenizer = make_tokenizer(WORDS)
    for seed in seeds:
        torch.manual_seed(seed)
        make_model(MODEL, tokenizer, 512).save_pretrained(folder / f"untrained_{seed}")
        tokenizer.save_pretrained(folder / f"untrained_{seed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the data and untrained models of the recipe search.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the untrained models")
    options = parser.parse_args()
    make_files(options.folder, options.seeds)
