"""What a model is asked in the four steps of DAPO's Appendix A, and what is read from its reply."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADINGS = ("Answer Format", "Transformed Problem", "Answer Calculation", "Final Answer")
REQUEST = r"""Rewrite a mathematics problem so that its answer becomes one integer. The given answer is right: do not
solve the problem anew, do not change what it states, and do not let the new text give the answer away.

Think first, then write these four sections under exactly these headings.

## Answer Format
The form of the given answer in LaTeX, each of its numbers replaced by a letter that the problem does not use:
$11-2\sqrt{6}$ has the form $k-m\sqrt{n}$, $\frac{3}{4}$ the form $\frac{p}{q}$. Signs, roots, fractions and constants
such as $\pi$ stay.

## Transformed Problem
The whole problem, and after it: which form the original answer is in, what the letters are (integers; in lowest terms;
square-free under a root: whatever makes them the only ones), and which sum of them is asked for.

## Answer Calculation
The new problem solved from the given answer: match the form, then work out what is asked for. Two lines of it read
Values: k=11, m=2, n=6
Quantity: k+m+n

## Final Answer
The integer, and nothing else. Where no form with integers fits (a proof, a word, a set of unknown size): none.

Problem:
{problem}

Given answer:
{answer}"""

_HEADING = re.compile(rf"^[#*\s]*({'|'.join(HEADINGS)})\b[^\n]*$", re.MULTILINE | re.IGNORECASE)
_VALUE = re.compile(r"([A-Za-z])\s*=\s*\$?\s*(-?\d+)(?![\d./^])")


@dataclass(frozen=True, slots=True)
class Reply:
    """``form`` in the letters of ``values`` is the original answer; ``quantity`` in them is the ``integer``."""

    form: str
    question: str
    values: dict[str, int]
    quantity: str
    integer: int


def request(problem: str, answer: str) -> list[dict[str, str]]:
    """The conversation that a reply is the next message of."""
    before, _, rest = REQUEST.partition("{problem}")
    between, _, after = rest.partition("{answer}")
    return [{"role": "user", "content": f"{before}{problem}{between}{answer}{after}"}]


def read_reply(text: str) -> Reply:
    """The sections as they were written last, behind what a model thought aloud. Raises ValueError with a reason."""
    parts = _HEADING.split(text.rpartition("</think>")[2])
    sections = {name.title(): content.strip() for name, content in zip(parts[1::2], parts[2::2], strict=True)}
    if missing := [heading for heading in HEADINGS if not sections.get(heading)]:
        raise ValueError(f"no section {missing[0]}")
    form, question, calculation, final = (sections[heading] for heading in HEADINGS)
    integer = as_integer(final)
    if integer is None:
        raise ValueError("the final answer is no integer")
    values = {letter: int(number) for letter, number in _VALUE.findall(_line(calculation, "Values"))}
    return Reply(_formula(form), question, values, _formula(_line(calculation, "Quantity")), integer)


def as_integer(text: str) -> int | None:
    """What `$1{,}234$`, `\\boxed{19}` or `**-3**` says; None for anything but one integer."""
    bare = re.sub(r"\\boxed|\{,\}|,(?=\d{3}(?!\d))|\\[!,;]|[${}*\s]", "", text.strip()).rstrip(".")
    return int(bare) if re.fullmatch(r"-?\d+", bare, re.ASCII) else None


def _line(calculation: str, name: str) -> str:
    found = re.findall(rf"^\W*{name}\W*:\W*?(?=[$\w\\(-])(.+)$", calculation, re.MULTILINE | re.IGNORECASE)
    if not found:
        raise ValueError(f"no line {name}: in the calculation")
    return str(found[-1])


def _formula(text: str) -> str:
    """LaTeX without what is around it; the first formula where a text holds several."""
    found = re.search(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", text, re.DOTALL)
    return (next(filter(None, found.groups())) if found else text).strip().strip("*`").rstrip(".").strip()
