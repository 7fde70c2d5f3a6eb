"""Rules for answers that are plain numbers: the GSM8K format and the lenient integer rule.

Both look at the last 300 characters only and compare digit strings, so no response can be slow or overflow.
"""

from __future__ import annotations

import re

from dapo_runner.rewards.rule import ANSWER_WINDOW
from dapo_runner.types import Verdict

_MINUS = "-−﹣－"  # hyphen-minus, minus sign, their small and full-width forms
_DASH = "‐‑–"  # hyphens and the en dash: a sign where the number follows at once, else punctuation
_CURRENCY = r"(?:\\?\$)?"
_SIGN = rf"(?:[{_MINUS}][ \t]*|[{_DASH}](?=\\?\$?[0-9]))"
_DIGITS = r"[0-9](?:[0-9.,]*[0-9])?"
# A number as far as it was written, which may be no number at all (1,2,3,4) or another one than its beginning (1/2).
_WRITTEN = (
    rf"{_CURRENCY}{_SIGN}?(?:\\?\$[ \t]*)?{_DIGITS}(?:[eE][{_MINUS}+]?[0-9]+)?"
    rf"(?:(?:[ \t]+[0-9]+)?[ \t]*/[ \t]*{_DIGITS})?"
)
_HASH_LINE = re.compile(rf"####\s*({_WRITTEN})")
_ANSWER_LINE = re.compile(rf"(?i)Answer\s*:[^\n0-9]*?({_WRITTEN})")
# A digit or a comma on the left would start the match inside a longer number, a slash inside a fraction.
_INTEGER = re.compile(r"(?<![0-9.,])(?<![0-9]/)(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?![0-9]|[.,/][0-9])")
_SIGN_BEFORE = re.compile(rf"[{_MINUS}]([ \t]*)(?:\\?\$[ \t]*)?\Z|[{_DASH}]{_CURRENCY}\Z")
_OPERAND_BEFORE = re.compile(r"[0-9][)\]}%$]*([ \t]*)\Z")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def gsm8k_rule(text: str, answer: str) -> Verdict:
    """The last `#### n`; where there is none, the number of the last `Answer: …` line. Numbers compare by
    value, whatever is no plain number (`1/2`, `1e3`, `1,2,3`) by how it is written.
    """
    tail = text[-ANSWER_WINDOW:]
    for pattern, rule in ((_HASH_LINE, "hash-line"), (_ANSWER_LINE, "answer-line")):
        found = pattern.findall(tail)
        if found:
            return _compare(found[-1], answer, rule)
    return Verdict(correct=False, extracted=None, rule="none")


def integer_rule(text: str, answer: str) -> Verdict:
    """The last integer of the response, wherever it stands. For base models that know no answer format."""
    tail = text[-ANSWER_WINDOW:]
    found = list(_INTEGER.finditer(tail))
    if not found:
        return Verdict(correct=False, extracted=None, rule="none")
    sign = "-" if _is_negative(tail[: found[-1].start()]) else ""
    return _compare(sign + found[-1].group(), answer, "last-integer")


def _is_negative(before: str) -> bool:
    """Whether ``before`` ends in the sign of the number that follows it, and not in a subtraction: `10-3` and `10 - 3`
    hold a 3, `10 -3` a −3.
    """
    sign = _SIGN_BEFORE.search(before)
    if sign is None:
        return False
    operand = _OPERAND_BEFORE.search(before[: sign.start()])
    return operand is None or (operand.group(1) != "" and not sign.group(1))


def canonical_number(text: str) -> str:
    """`1,234.50`, `$1234.5` and `01234.5` all become `1234.5`, `− 5` becomes `-5`; text that is no number comes back
    stripped. Commas are left out where they set off thousands, and nowhere else.
    """
    compact = re.sub(rf"[{_MINUS}{_DASH}]", "-", re.sub(r"\\?\$", "", text)).strip()
    compact = re.sub(r"\s*/\s*", "/", re.sub(r"^-\s+", "-", compact))
    if _THOUSANDS.fullmatch(compact):
        compact = compact.replace(",", "")
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
