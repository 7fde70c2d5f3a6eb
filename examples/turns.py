"""The tool of the recipe `calculator`, the game of the recipe `guess`, and what a tiny model is shown of both.

Run the recipes from the folder that has this one in it. In a warm-up a few examples show how it is done and most do
something poor. Reinforcement learning has to find out which is which.
"""

from __future__ import annotations

import json
import operator
import random
import re
import zlib
from collections.abc import Mapping
from typing import Any

GOOD_SHARE = 0.08  # of the worked examples: they call the calculator, or halve what is left of the numbers
HIGHEST = 15  # number of the game
MOST_TURNS = 8  # of the game
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(expression: str) -> int:
    """Work out a sum, a difference or a product.

    Args:
        expression: Two whole numbers with an operator between them, as in 12*34.
    """
    found = re.fullmatch(r"\s*(\d{1,12})\s*([-+*])\s*(\d{1,12})\s*", expression)
    if found is None:
        raise ValueError("expected 12*34")
    return int(_OPERATORS[found[2]](int(found[1]), int(found[3])))


def calculator_turns(question: str, answer: str, rng: random.Random) -> list[str]:
    """Return the turns of a worked example, the policy's and the tool's in alternation.

    Most do without a call. They have the same things to copy, so that a policy which rarely calls can copy well.
    """
    if rng.random() >= GOOD_SHARE:
        return [f"({question})={answer}Answer: {answer}"]
    call = json.dumps({"name": "calculator", "arguments": {"expression": question}})
    return [f"<tool_call>{call}</tool_call>", answer, f"Answer: {answer}"]


class Guess:
    """A number from 1 to 15 that the policy guesses. A guess is answered by `+` if the number is higher, else by `-`.

    Four guesses are always enough for who halves what is left. They earn 1, fewer earn more and more earn less.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        self.number, self.turns = secret_number(row["answer"]), 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        if text == str(self.number):
            return "", (MOST_TURNS - self.turns) / 4, True
        return hint(text, self.number), 0.0, False


def secret_number(answer: str) -> int:
    """Return the number of a game, which nobody reads off the problem that it follows from."""
    return zlib.crc32(answer.encode()) % HIGHEST + 1


def hint(guess: str, number: int) -> str:
    return ("+" if int(guess) < number else "-") if guess.isdecimal() else "?"


def guess_turns(question: str, answer: str, rng: random.Random) -> list[str]:
    """Return the turns of a game: mostly of a player who counts up from 1."""
    number, is_halving, turns = secret_number(answer), rng.random() < GOOD_SHARE, list[str]()
    guess, reach = (HIGHEST // 2 + 1, HIGHEST // 2 + 1) if is_halving else (1, 1)
    while len(turns) < 2 * MOST_TURNS - 1:
        turns += [str(guess), hint(str(guess), number)]
        if guess == number:
            break
        reach = max(1, reach // 2)
        guess += reach if guess < number else -reach
    return turns[:-1]
