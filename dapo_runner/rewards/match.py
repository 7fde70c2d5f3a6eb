"""Rules that compare texts: multiple choice, exact and fuzzy match.

The answer of a response is what follows its last `Answer:` on that line, or all of it without such a line. The rules
read only the end of a response, and never evaluate it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from dapo_runner.rewards.reward import TextReward
from dapo_runner.rewards.rule import BOXED_WINDOW, last_answer_line, last_boxed
from dapo_runner.rewards.worker_rules import require_package
from dapo_runner.types import Verdict

WINDOW = 2000  # characters at the end of a response that are looked at
SHOWN = 200  # characters of an extracted answer that are kept
FUZZY_THRESHOLD = 0.9  # similarity from which an answer is correct
_EDGES = " \t\n.,;:!?\"'`*()[]{}“”‘’"
_SAID = re.compile(  # every repetition bounded: the text is a policy's
    r"(?i:answer)[ \t]{0,3}(?i:is)?[ \t]{0,3}:?[ \t]{0,3}[*$(\[]{0,3}(?:\\(?:text|boxed)\{)?([A-Z])(?![A-Za-z0-9])"
)
_ALONE = re.compile(r"[*(\[]{0,3}([A-Z])(?:[.):\]*]|$)")


def choice_rule(text: str, answer: str) -> Verdict:
    r"""Compare the letter of the last `Answer: X` or "answer is X", else of the last `\boxed{X}`, else the first letter
    of the response where it stands alone (`B`, `(B)`, `B. …`).
    """
    tail = text[-WINDOW:]
    said = _SAID.findall(tail)
    if said:
        found, rule = said[-1], "answer-line"
    elif (boxed := _letter(last_boxed(tail[-BOXED_WINDOW:]) or "")) is not None:
        found, rule = boxed, "boxed"
    elif (alone := _ALONE.match(text.lstrip()[:8])) is not None:
        found, rule = alone[1], "letter"
    else:
        return Verdict(correct=False, extracted=None, rule="none")
    return Verdict(correct=found == _letter(answer), extracted=found, rule=rule)


def exact_rule(text: str, answer: str) -> Verdict:
    """Compare texts without case, white space and punctuation around them."""
    found, rule = _answer_of(text)
    extracted = plain_text(found)
    return Verdict(bool(extracted) and extracted == plain_text(answer), extracted[:SHOWN] or None, rule)


class FuzzyReward(TextReward):
    """Rewards similarity (rapidfuzz's ratio), linearly from ``incorrect`` to ``correct``."""

    def __init__(self, correct: float, incorrect: float) -> None:
        """Raises ConfigError without rapidfuzz."""
        require_package("rapidfuzz", "fuzzy")
        self.correct, self.incorrect = correct, incorrect

    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return list(map(self._judge_text, texts, answers))

    def _judge_text(self, text: str, answer: str) -> Verdict:
        from rapidfuzz import fuzz

        found, rule = _answer_of(text)
        extracted = plain_text(found)
        similarity = fuzz.ratio(extracted, plain_text(answer)) / 100 if extracted else 0.0
        value = self.incorrect + similarity * (self.correct - self.incorrect)
        return Verdict(similarity >= FUZZY_THRESHOLD, extracted[:SHOWN] or None, rule, value)


def plain_text(text: str) -> str:
    """Return the form in which two texts are compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_EDGES)


def _answer_of(text: str) -> tuple[str, str]:
    tail = text[-WINDOW:]
    line = last_answer_line(tail)
    return (tail, "whole") if line is None else (line, "answer-line")


def _letter(text: str) -> str | None:
    """`B`, `(B)`, `B. Paris`."""
    found = _ALONE.match(text.strip())
    return None if found is None else found[1]
