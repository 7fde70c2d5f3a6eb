"""Rules that compare texts: multiple choice, exact and fuzzy match.

The response's answer is what follows its last `Answer:` on that line, and all of it where there is no such line. Like
the other rules these look at the end of a response only and never evaluate it.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.rewards.rule import BOXED_WINDOW, last_answer_line, last_boxed
from dapo_runner.types import Verdict

WINDOW = 2000  # characters at the end of a response that are looked at
SHOWN = 200  # characters of an extracted answer that are kept
_EDGES = " \t\n.,;:!?\"'`*()[]{}“”‘’"
_SAID = re.compile(  # every repetition bounded: the text is a policy's
    r"(?i:answer)[ \t]{0,3}(?i:is)?[ \t]{0,3}:?[ \t]{0,3}[*$(\[]{0,3}(?:\\(?:text|boxed)\{)?([A-Z])(?![A-Za-z0-9])"
)
_ALONE = re.compile(r"[*(\[]{0,3}([A-Z])(?:[.):\]*]|$)")


def choice_rule(text: str, answer: str) -> Verdict:
    r"""The letter of the last `Answer: X` or "answer is X"; without one that of the last `\boxed{X}`; without that the
    one the response begins with (`B`, `(B)`, `B. …`).
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
    """The same text, apart from case, white space and punctuation around it."""
    found, rule = _answer_of(text)
    extracted = plain_text(found)
    return Verdict(bool(extracted) and extracted == plain_text(answer), extracted[:SHOWN] or None, rule)


class FuzzyRule:
    """Their similarity, from 0 to 1 (rapidfuzz's ratio), as a reward from `reward.incorrect` to `reward.correct`."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError without rapidfuzz."""
        if importlib.util.find_spec("rapidfuzz") is None:
            raise ConfigError("reward.kind: 'fuzzy' needs the package rapidfuzz; pip install 'dapo-kernels[fuzzy]'")
        from rapidfuzz import fuzz

        self._ratio = fuzz.ratio
        self.config = config

    def __call__(self, text: str, answer: str) -> Verdict:
        found, rule = _answer_of(text)
        extracted = plain_text(found)
        similarity = self._ratio(extracted, plain_text(answer)) / 100 if extracted else 0.0
        value = self.config.incorrect + similarity * (self.config.correct - self.config.incorrect)
        return Verdict(similarity >= self.config.fuzzy_threshold, extracted[:SHOWN] or None, rule, value)


def plain_text(text: str) -> str:
    """The form in which two texts are compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_EDGES)


def _answer_of(text: str) -> tuple[str, str]:
    tail = text[-WINDOW:]
    line = last_answer_line(tail)
    return (tail, "whole") if line is None else (line, "answer-line")


def _letter(text: str) -> str | None:
    """`B`, `(B)`, `B. Paris`."""
    found = _ALONE.match(text.strip())
    return None if found is None else found[1]
