"""What a reply has to stand up to, whatever the model says of it.

form      with the values in it is the original answer     by sympy, where it can evaluate both
quantity  with the values in it is the integer             the same
values    in lowest terms, square-free under a root: otherwise the form has several, and the integer is not the only one
question  another than the original, which names every letter of the quantity
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import gcd, isqrt

from dapo_runner.tools.convert.reply import Reply

Same = Callable[[str, str], bool | None]
"""Whether a LaTeX expression is the answer; None where that cannot be evaluated."""

_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_ROOT = re.compile(r"\\sqrt\s*\{?\s*([A-Za-z])\s*\}?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{?\s*([A-Za-z])\s*\}?\s*\{?\s*([A-Za-z])\s*\}?|\b([A-Za-z])\s*/\s*([A-Za-z])\b")
_FACTOR_BEFORE = re.compile(r"(?:[\d)}]|\\pi|(?<![A-Za-z\\])[A-Za-z]+)$")
_FACTOR_AFTER = re.compile(r"\d|\(|\\left|\\[dt]?frac|\\sqrt|\\pi")


class RejectedError(Exception):
    """Why a conversion is not kept."""


def check(reply: Reply, problem: str, answer: str, same: Same) -> dict[str, bool | None]:
    """What was evaluated: True, or None where that cannot be done. Raises RejectedError."""
    if reply.question.split() == problem.split():
        raise RejectedError("the problem is not rewritten")
    letters = letters_of(reply.quantity)
    if not letters or not letters <= reply.values.keys() or not letters_of(reply.form) & letters:
        raise RejectedError("the letters of form, values and quantity are not the same")
    if not all(re.search(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", reply.question) for letter in letters):
        raise RejectedError("the rewritten problem does not name the letters that it asks for")
    if several(reply.form, reply.values):
        raise RejectedError("the values are not in lowest terms")
    asked = {
        "quantity": same(substituted(reply.quantity, reply.values), str(reply.integer)),
        "form": same(substituted(reply.form, reply.values), answer),
    }
    if asked["quantity"] is False:
        raise RejectedError("the quantity is not the integer")
    if asked["form"] is False:
        raise RejectedError("the form is not the original answer")
    return asked


def letters_of(latex: str) -> set[str]:
    """Of a formula, less those of commands."""
    return set(filter(None, _LETTER.findall(latex)))


def substituted(latex: str, values: Mapping[str, int]) -> str:
    """With the values in the place of their letters. Products are written out: the parser takes `2(3)` for 2 + 3."""

    def put(found: re.Match[str]) -> str:
        if found[1] not in values:
            return found[0]
        before, after = found.string[: found.start()].rstrip(), found.string[found.end() :].lstrip()
        times_before = "\\cdot " if _FACTOR_BEFORE.search(before) else ""
        times_after = "\\cdot " if _FACTOR_AFTER.match(after) else ""
        return f"{times_before}({values[found[1]]}){times_after}"

    return _LETTER.sub(put, _in_braces(latex))


def _in_braces(latex: str) -> str:
    """The arguments of `\\frac pq`, `\\sqrt n` and `k^m`."""
    latex = re.sub(r"\\[dt]?frac\s*(\{[^{}]*\}|\w)\s*(\{[^{}]*\}|\w)", _frac, latex)
    return re.sub(r"(\\sqrt|\^)\s*([A-Za-z])(?![A-Za-z])", r"\1{\2}", latex)


def _frac(found: re.Match[str]) -> str:
    above, below = (part.strip("{}") for part in found.groups())
    return f"\\frac{{{above}}}{{{below}}}"


def several(form: str, values: Mapping[str, int]) -> bool:
    """Whether other integers would fit the form as well, as far as roots and fractions of single letters tell."""
    roots = (values.get(letter, 1) for letter in _ROOT.findall(form))
    fractions = ((p or a, q or b) for p, q, a, b in _FRACTION.findall(form))
    reducible = (gcd(values[p], values[q]) > 1 for p, q in fractions if p in values and q in values)
    return any(map(_has_square, roots)) or any(reducible)


def _has_square(number: int) -> bool:
    return any(number % (root * root) == 0 for root in range(2, min(isqrt(abs(number)), 10**4) + 1))
