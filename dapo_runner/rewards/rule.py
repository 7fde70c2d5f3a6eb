r"""The recipe's answer rule: find the last `Answer: …` line, normalise both sides, compare strings.

The rule is the one the DAPO recipe scores with (arXiv 2503.14476, released script), which took its
normalisation from Minerva (arXiv 2206.14858, Appendix D.1). Model output is only ever searched and compared,
never evaluated. Only the last ``ANSWER_WINDOW`` characters are looked at, so the cost does not grow with what
a policy chooses to write.
"""

from __future__ import annotations

import re
from functools import lru_cache

from dapo_runner.types import Verdict

ANSWER_WINDOW = 300  # characters; the longest answer of MATH-500 has 159
BOXED_WINDOW = 100

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Replaced in this order, which matters: articles go while their space still marks them.
_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_UNIT_WORDS = (
    r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_UNITS = _UNIT_WORDS.split()
_DECORATION = [
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", r"\!", "{,}", '"', r"\dots"),
]
_WRAPPERS = (
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
)
_SHORTHAND = (
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def answer_rule(text: str, answer: str) -> Verdict:
    """Compare the last answer line of the last ``ANSWER_WINDOW`` characters with the ground truth."""
    line = last_answer_line(text[-ANSWER_WINDOW:])
    if line is None:
        return Verdict(correct=False, extracted=None, rule="none")
    extracted = normalise(line)
    return Verdict(correct=extracted == _normalised_truth(answer), extracted=extracted, rule="answer-line")


def last_answer_line(text: str) -> str | None:
    """Return what follows the last `Answer:` on its line."""
    lines = _ANSWER_LINE.findall(text)
    return lines[-1] if lines else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, braces balanced; None without one that is closed."""
    command = r"\boxed{"
    start = text.rfind(command)
    if start < 0:
        return None
    start += len(command)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def normalise(answer: str) -> str:
    r"""Return the form in which two answers are compared as strings.

    Keeps what follows the last `=`; drops articles, units, spaces and LaTeX decoration; takes `$…$`,
    `\text{}`, `\textbf{}`, `\overline{}` and `\boxed{}` off; writes `\frac ab` and `\sqrt a` in full; drops
    thousands commas.
    """
    text = answer.rpartition("=")[2]
    for before, after in _REPLACEMENTS:
        text = text.replace(before, after)
    for expression in _UNITS + _DECORATION:
        text = text.replace(expression, "")
    if text.count("$") >= 2:
        text = f"${text.split('$')[1]}$"
    for pattern, replacement in _WRAPPERS + _SHORTHAND:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


@lru_cache(maxsize=65536)
def _normalised_truth(answer: str) -> str:
    return normalise(answer)
