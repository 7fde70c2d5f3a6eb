"""Rules for answers that are plain numbers: the GSM8K format and the lenient integer rule.

Both look at the last 300 characters only and compare digit strings, so no response can be slow or overflow.
"""

from __future__ import annotations

import re

from dapo_runner.rewards.rule import ANSWER_WINDOW
from dapo_runner.types import Verdict

_NUMBER = r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?"
_HASH_LINE = re.compile(rf"####\s*({_NUMBER})")
_ANSWER_LINE = re.compile(rf"(?i)Answer\s*:[^\n0-9-]*({_NUMBER})")
# A digit on the left would start the match inside a longer number; a digit before the minus makes it a
# subtraction.
_INTEGER = re.compile(r"(?<![0-9.,])(?:(?<![0-9)])-)?[0-9]+(?:,[0-9]{3})*(?![0-9]|[.,][0-9])")


def gsm8k_rule(text: str, answer: str) -> Verdict:
    """The last `#### n`; where there is none, the number of the last `Answer: …` line. Numbers compare by
    value.
    """
    tail = text[-ANSWER_WINDOW:]
    for pattern, rule in ((_HASH_LINE, "hash-line"), (_ANSWER_LINE, "answer-line")):
        found = pattern.findall(tail)
        if found:
            return _compare(found[-1], answer, rule)
    return Verdict(correct=False, extracted=None, rule="none")


def integer_rule(text: str, answer: str) -> Verdict:
    """The last integer of the response, wherever it stands. For base models that know no answer format."""
    found = _INTEGER.findall(text[-ANSWER_WINDOW:])
    if not found:
        return Verdict(correct=False, extracted=None, rule="none")
    return _compare(found[-1], answer, "last-integer")


def canonical_number(text: str) -> str:
    """`1,234.50`, `$1234.5` and `01234.5` all become `1234.5`; text that is no number comes back stripped."""
    compact = text.strip().replace(",", "").replace("$", "")
    sign, digits = ("-", compact[1:]) if compact.startswith("-") else ("", compact)
    whole, _, fraction = digits.partition(".")
    if not (whole + fraction).isdecimal():
        return compact
    fraction = fraction.rstrip("0")
    value = (whole.lstrip("0") or "0") + ("." + fraction if fraction else "")
    return value if value == "0" else sign + value


def _compare(found: str, answer: str, rule: str) -> Verdict:
    extracted = canonical_number(found)
    return Verdict(correct=extracted == canonical_number(answer), extracted=extracted, rule=rule)
