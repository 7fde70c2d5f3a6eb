r"""Rules that compare strings, and the length penalty.

They read only the end of a response and do not evaluate it, so their time is bounded. The ``rule`` of a verdict states
where the answer was found; it is `none` without an answer.
"""

from __future__ import annotations

import json
import re
import unicodedata

from dapo_runner.rewards.rule_worker import ANSWER_LINE, ASCII, SHOWN, plain_numbers
from dapo_runner.types import Verdict

ANSWER_WINDOW = 300  # characters; the longest answer of MATH-500 has 159
TEXT_WINDOW = 2000  # characters that the rules for texts and letters read
BOXED_WINDOW = 100
NO_ANSWER = Verdict(correct=False, extracted=None, rule="none")

# The order matters: articles are removed while a space still follows them.
_REPLACEMENTS = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_UNIT_WORDS = (
    r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_DECORATION = [
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", r"\!", "{,}", '"', r"\dots"),
]
_REWRITES = (
    *((re.compile(rf"\\{command}\{{(.*?)\}}"), r"\1") for command in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def forms_of(truth: str, most: int = 1) -> list[str]:
    """Return a ground truth and, if it is a JSON list of at most ``most`` texts, each of these."""
    try:
        texts = json.loads(truth) if truth.startswith('["') else []
    except ValueError:
        texts = []
    # An escape of LaTeX in a list that is not JSON, such as `\frac`, would become a control character.
    is_list = len(texts) <= most and all(isinstance(text, str) and min(text, default=" ") >= " " for text in texts)
    return [truth, *texts] if is_list else [truth]


def as_set(truth: str) -> str:
    """Return a ground truth, or the texts of a JSON list behind each other, which math-verify reads as a set."""
    return ", ".join(map(canonical_number, forms_of(truth, len(truth))[1:])) or truth


def answer_rule(text: str, answer: str) -> Verdict:
    """Compare the last `Answer: …` line after ``normalise``, as the DAPO recipe does (arXiv 2503.14476, its script)."""
    if not (lines := ANSWER_LINE.findall(text[-ANSWER_WINDOW:])):
        return NO_ANSWER
    extracted = normalise(lines[-1])
    return Verdict(bool(extracted) and extracted == normalise(answer), extracted or None, "answer-line")


def normalise(answer: str) -> str:
    r"""Return the form in which two answers are compared, after Minerva (arXiv 2206.14858, Appendix D.1).

    Keep what follows the last `=`. Drop articles, units, spaces and LaTeX decoration. Remove `$…$`, `\text{}`,
    `\textbf{}`, `\overline{}` and `\boxed{}`. Write `\frac ab` and `\sqrt a` in full. Drop thousands commas.
    """
    text = answer.rpartition("=")[2]
    for before, after in _REPLACEMENTS:
        text = text.replace(before, after)
    for expression in _UNIT_WORDS.split() + _DECORATION:
        text = text.replace(expression, "")
    if text.count("$") >= 2:
        text = f"${text.split('$')[1]}$"
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


# Numbers

_DASH = "‐‑–"  # hyphens and the en dash: a sign directly before a number, else punctuation
_SIGN = rf"(?:-[ \t]*|[{_DASH}](?=\\?\$?\.?[0-9]))"
_DIGITS = r"(?:(?<![\w.])\.)?[0-9](?:[0-9.,]*[0-9])?"
# A number as written. It may be no number at all (1,2,3,4), or another one than its beginning (1/2).
_WRITTEN = (
    rf"(?:\\?\$)?{_SIGN}?(?:\\?\$[ \t]*)?{_DIGITS}(?:[eE][-+]?[0-9]+)?"
    rf"(?:(?:[ \t]+[0-9]+)?[ \t]*/[ \t]*{_DIGITS})?"
)
_TERM, _OPERATOR = r"[ \t$(]*+[ \t0-9.,$%)]*+", rf"(?:[-+*/×÷·x{_DASH}]|\\(?:times|cdot|div))"
# The left side of an equation such as 3 + 4 = 7, if the right side is one number.
_SUM = rf"(?:(?=[ \t$(]*[0-9]){_TERM}(?:{_OPERATOR}{_TERM})+=\s*(?={_WRITTEN}[^\n0-9=]*(?:\n|\Z)))?"
_NUMBER_LINES = {
    "hash-line": re.compile(rf"####[*\s]*+{_SUM}({_WRITTEN})"),
    "answer-line": re.compile(rf"(?i)Answer\*{{0,2}}\s*:[*\s]*+{_SUM}[^\n0-9]*?({_WRITTEN})"),
}
# A digit or comma on the left would start the match inside a longer number, a slash inside a fraction.
_INTEGER = re.compile(r"(?<![0-9.,])(?<![0-9]/)(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?![0-9]|[.,/][0-9])")
_SIGN_BEFORE = re.compile(rf"-([ \t]*)(?:\\?\$[ \t]*)?\Z|[{_DASH}](?:\\?\$)?\Z")
_OPERAND_BEFORE = re.compile(r"[0-9][)\]}%$]*([ \t]*)\Z")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def gsm8k_rule(text: str, answer: str) -> Verdict:
    """Compare the last `#### n`, else the number of the last `Answer: …` line, with the ground truth.

    Of `3 + 4 = 7`, that is 7. Numbers are compared by value, other texts (`1/2`, `1e3`) as written.
    """
    for rule, pattern in _NUMBER_LINES.items():
        if found := pattern.findall(plain_numbers(text[-ANSWER_WINDOW:])):
            return _compare_numbers(found[-1], answer, rule)
    return NO_ANSWER


def integer_rule(text: str, answer: str) -> Verdict:
    """Compare the last integer of the response, wherever it is. For base models without an answer format."""
    tail = plain_numbers(text[-ANSWER_WINDOW:])
    if not (found := list(_INTEGER.finditer(tail))):
        return NO_ANSWER
    return _compare_numbers("-" * _ends_in_sign(tail[: found[-1].start()]) + found[-1][0], answer, "last-integer")


def _ends_in_sign(before: str) -> bool:
    """Return whether a number after ``before`` has a sign: `10 -3` contains −3, `10-3` and `10 - 3` contain 3."""
    if (sign := _SIGN_BEFORE.search(before)) is None:
        return False
    operand = _OPERAND_BEFORE.search(before[: sign.start()])
    return operand is None or (operand.group(1) != "" and not sign.group(1))


def canonical_number(text: str) -> str:
    """Return `1234.5` for `1,234.50`, `$1234.5` and `01234.5`, `-5` for `− 5`. Strip other texts."""
    compact = re.sub(rf"[{_DASH}]", "-", re.sub(r"\\?\$", "", plain_numbers(text))).strip()
    compact = re.sub(r"\s*/\s*", "/", re.sub(r"^-\s+", "-", compact))
    if _THOUSANDS.fullmatch(compact):
        compact = compact.replace(",", "")
    whole, _, fraction = compact.removeprefix("-").partition(".")
    if not (whole + fraction).isdecimal():
        return compact
    value = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".removesuffix(".")
    return f"-{value}" if compact.startswith("-") and value != "0" else value


def _compare_numbers(found: str, answer: str, rule: str) -> Verdict:
    extracted = canonical_number(found)
    return Verdict(extracted == canonical_number(answer), extracted, rule)


# Letters and texts

_MARKED_LINE = re.compile(r"(?i)Answer\*{0,2}\s*:\s*([^\n]+)")
_EDGES = " \t\n.,;:!?\"'`*()[]{}“”‘’„«»‹›。、「」『』《》〈〉【】،؛؟।¿¡\u200e\u200f"
# All repetitions are bounded, because a policy writes the text. After a line break, `A train …` begins a sentence.
_SAID = re.compile(
    r"(?i:answer)\*{0,2}[ \t]{0,3}(?:(?i:is)|(?i:is[ \t]{0,3})?:(?:[\s*]{0,3}\n(?!\W{0,9}[A-Z] \w)\s{0,3})?)"
    r"[ \t*$(\[\"'`\\]{0,6}(?:(?i:option|choice)[ \t]{1,3}[*$(\[\"'`\\]{0,3})?"
    r"(?:\\(?:text\w{0,2}|mathrm|boxed)\{[ \t*(\[]{0,3}){0,2}([A-Z])(?![A-Za-z0-9À-ɏ\u0300-\u036fḀ-ỿ])"
)
_BOXED = re.compile(r"\\boxed\{[ \t]{0,3}(?:\\text\w{0,2}\{)?[*(\[]{0,3}([A-Z])(?:[.):\]*][^{}]{0,90})?\}")
_ALONE = re.compile(r"\A[*(\[]{0,3}([A-Z])(?:[.):\]*。、]|$)")


def choice_rule(text: str, answer: str) -> Verdict:
    r"""Compare the letter of the last `Answer: X` or "answer is X", else of the last `\boxed{X}`, else a first letter
    of the response that is alone (`B`, `(B)`, `B. …`).
    """
    text, answer = text.translate(ASCII), answer.translate(ASCII)
    said, boxed = _SAID.findall(text[-TEXT_WINDOW:]), _BOXED.findall(text[-BOXED_WINDOW:])
    alone, truth = (_ALONE.findall(each.strip()) for each in (text[:TEXT_WINDOW], answer))
    for rule, found in (("answer-line", said), ("boxed", boxed), ("letter", alone)):
        if found:
            return Verdict(found[-1:] == truth, found[-1], rule)
    return NO_ANSWER


def exact_rule(text: str, answer: str) -> Verdict:
    """Compare the last `Answer: …` line, else the whole response, without case, white space and outer punctuation."""
    tail = unicodedata.normalize("NFKC", text[-TEXT_WINDOW:])
    lines = _MARKED_LINE.findall(tail)
    extracted, rule = (_plain(lines[-1]), "answer-line") if lines else (_plain(tail), "whole")
    answers = map(_plain, forms_of(answer, len(answer)))  # each text of a list is one
    return Verdict(bool(extracted) and extracted in answers, extracted[:SHOWN] or None, rule)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_EDGES)


def length_penalty(length: int, max_length: int, cache_length: int) -> float:
    """Return the soft overlong penalty of ``length`` tokens, in [−1, 0] (arXiv 2503.14476, Eq. 13).

    It falls linearly from 0 at max_length − cache_length to −1 at max_length.
    """
    return min(0.0, max(-1.0, (max_length - cache_length - length) / cache_length))
