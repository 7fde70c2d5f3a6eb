"""Generate arithmetic problems: the task of the tiny recipe."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import reduce
from itertools import islice
from typing import NamedTuple

from dapo_runner.config import ArithmeticConfig, ConfigError

SEED = 0  # of the problems and their split: all runs use the same problems
_APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class ArithmeticProblem(NamedTuple):
    """`operands` joined by one `operator`, evaluated from left to right."""

    operator: str
    operands: tuple[int, ...]

    @property
    def question(self) -> str:
        return self.operator.join(map(str, self.operands))

    @property
    def answer(self) -> str:
        return str(reduce(_APPLY[self.operator], self.operands))

    @property
    def digits(self) -> int:
        """Number of digits of all operands together."""
        return sum(len(str(operand)) for operand in self.operands)

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Equal for problems that only swap the operands of + or *."""
        return self.operator, self.operands if self.operator == "-" else tuple(sorted(self.operands))


def split_problems(config: ArithmeticConfig, n_heldout: int) -> tuple[list[ArithmeticProblem], list[ArithmeticProblem]]:
    """Return training and held-out problems, all distinct. If `a+b` is held out, `b+a` does not train.

    Raises ConfigError if there are too few problems.
    """
    problems = _shuffled_problems(config, config.train_size + n_heldout)
    heldout = list(islice(problems, n_heldout))
    keys = {problem.key for problem in heldout}
    train = list(islice((problem for problem in problems if problem.key not in keys), config.train_size))
    if len(train) == config.train_size:
        return train, heldout
    raise ConfigError(
        f"data.arithmetic: expected {n_heldout} held-out and {config.train_size} training problems, got only "
        f"{len(heldout)} and {len(train)}. Lower the sizes, or allow more digits."
    )


def _shuffled_problems(config: ArithmeticConfig, n_problems: int) -> Iterator[ArithmeticProblem]:
    """Yield every problem at most once, without listing all of them: there may be very many."""
    if config.even_digits:
        yield from _even_problems(config)
        return
    low = 0 if config.min_digits == 1 else 10 ** (config.min_digits - 1)
    values = 10**config.max_digits - low
    space = len(config.operators) * values**config.operands
    # At least twice as many as needed: the split skips some.
    wanted = min(space, 4 * n_problems)
    for index in random.Random(SEED).sample(range(space), wanted):
        rest, operands = index // len(config.operators), []
        for _ in range(config.operands):
            rest, value = divmod(rest, values)
            operands.append(low + value)
        yield ArithmeticProblem(config.operators[index % len(config.operators)], tuple(operands))


def _even_problems(config: ArithmeticConfig) -> Iterator[ArithmeticProblem]:
    """Yield problems whose operands have a random number of digits. End after 10,000 repetitions in a row."""
    rng, seen, misses = random.Random(SEED), set[ArithmeticProblem](), 0
    while misses < 10_000:
        lengths = [rng.randint(config.min_digits, config.max_digits) for _ in range(config.operands)]
        operands = tuple(rng.randrange(0 if n == 1 else 10 ** (n - 1), 10**n) for n in lengths)
        problem = ArithmeticProblem(rng.choice(config.operators), operands)
        misses = misses + 1 if problem in seen else 0
        if problem not in seen:
            seen.add(problem)
            yield problem
