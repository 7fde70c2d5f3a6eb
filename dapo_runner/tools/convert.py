"""`dapo convert-answers`: let a model rewrite every problem whose answer is not an integer, and check its replies.

The prompt has the four steps of DAPO's Appendix A.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import gcd, isqrt, prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dapo_runner.config import ConfigError, ConvertConfig
from dapo_runner.config.reading import may_change
from dapo_runner.data.dataset import RECIPE_TEMPLATE
from dapo_runner.data.reading import Problem, read_problems
from dapo_runner.files import append_jsonl, atomic_write, drop_incomplete_line, lock_file, read_jsonl, to_jsonl
from dapo_runner.http import HTTPError
from dapo_runner.rewards.calls import pause
from dapo_runner.rewards.judge import REFUSED, chat
from dapo_runner.rewards.rules import as_set
from dapo_runner.rewards.workers import WorkerError, open_rule, require_package
from dapo_runner.threads import map_in_threads

RETRIES, TIMEOUT = 2, 600.0  # of a failed request; seconds per request
MOST_TOKENS = 8192  # of a reply, unless options.max_tokens is set
EASY = Problem("1 + 1 = ?", "2", "")  # asked after a refusal
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
"""

WORKERS, DEADLINE = 2, 5.0  # processes that compare answers, and seconds per comparison
_HEADING = re.compile(rf"^[#*\s]*({'|'.join(HEADINGS)})\b[^\n]*$", re.MULTILINE | re.IGNORECASE)
_VALUE = re.compile(r"([A-Za-z])\s*=\s*\$?\s*(-?\d+)(?!\d|[/^]|\.\d)")
_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_ONE = r"\s*(?:\{\s*([A-Za-z])\s*\}|([A-Za-z]))"  # a letter as argument of a command
_FACTOR = re.compile(rf"\\pi|\\sqrt(?:\[([2-9])\])?{_ONE}")
_FRACTION = re.compile(rf"\\[dt]?frac\s*(?:\{{([A-Za-z\d\s+-]+)\}}|([A-Za-z])){_ONE}|\b([A-Za-z])\s*/\s*([A-Za-z])\b")


class RejectedError(ValueError):
    """Why a conversion is rejected."""


class Reply(NamedTuple):
    """A parsed reply. ``form`` with ``values`` is the original answer, ``quantity`` with them is ``integer``."""

    form: str
    question: str
    values: dict[str, int]
    quantity: str
    integer: int


def request(problem: str, answer: str) -> list[dict[str, str]]:
    """Return the conversation that the model replies to."""
    return [{"role": "user", "content": f"{REQUEST}{problem}\n\nGiven answer:\n{answer}"}]


def read_reply(text: str) -> Reply:
    """Parse the last occurrence of each section, after any thinking. Raises RejectedError."""
    parts = _HEADING.split(text.rpartition("</think>")[2])
    sections = {name.title(): content.strip() for name, content in zip(parts[1::2], parts[2::2], strict=True)}
    if missing := [heading for heading in HEADINGS if not sections.get(heading)]:
        raise RejectedError(f"no section {missing[0]}")
    form, question, calculation, final = (sections[heading] for heading in HEADINGS)
    integer = as_integer(final)
    if integer is None:
        raise RejectedError("the final answer is no integer")
    values = {letter: int(number) for letter, number in _VALUE.findall(_line(calculation, "Values"))}
    return Reply(_formula(form), question, values, _formula(_line(calculation, "Quantity")).partition("=")[0], integer)


def as_integer(text: str) -> int | None:
    """Return the integer in `$1{,}234$`, `\\boxed{19}` or `**-3**`; None for any other text."""
    bare = re.sub(r"\\boxed|\{,\}|,(?=\d{3}(?!\d))|\\[!,;]|\$|(?<=-)\s+", "", text)
    found = re.fullmatch(r"[\s{*]*(-?\d+)[\s}*.]*", bare, re.ASCII)
    return int(found[1]) if found else None


def _line(calculation: str, name: str) -> str:
    found = re.findall(rf"^\W*{name}\W*:\W*?(?=[$\w\\(-])(.+)$", calculation, re.MULTILINE | re.IGNORECASE)
    if not found:
        raise RejectedError(f"no line {name}: in the calculation")
    return str(found[-1])


def _formula(text: str) -> str:
    """Return the first formula of a text without its delimiters, or the whole text if it has none."""
    found = _MATH.search(text)
    return (next(filter(None, found.groups())) if found else text).strip().strip("*`").rstrip(".").strip()


def check(reply: Reply, problem: str, answer: str) -> dict[str, bool | None]:
    """Return for each check True, or None if it cannot be evaluated. Raises RejectedError if one fails."""
    letters = _letters(reply.quantity)
    if reply.question.split() == problem.split():
        raise RejectedError("the problem is not rewritten")
    stated, known = ({(x, int(n)) for x, n in _VALUE.findall(text)} for text in (reply.question, problem))
    given = rf"(?<![\d.]){re.escape(_formula(answer))}(?!\d|\.\d)"
    before, after = (len(re.findall(given, text)) for text in (problem, reply.question))
    repeats = after > before and re.search(r"\d", _formula(answer))
    if repeats or (stated - known) & reply.values.items():
        raise RejectedError("the rewritten problem gives the answer away")
    if not letters or not letters <= reply.values.keys() or not _letters(reply.form) & letters:
        raise RejectedError("the letters of form, values and quantity are not the same")
    if not all(re.search(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", reply.question) for letter in letters):
        raise RejectedError("the rewritten problem does not name the letters that it asks for")
    if _has_other_values(reply.form, reply.values):
        raise RejectedError("the values are not in lowest terms")
    checked = {"quantity": _is_same(reply.quantity, reply.values, str(reply.integer))}
    checked["form"] = _is_same(reply.form, reply.values, answer)
    for name, expected in (("quantity", "the integer"), ("form", "the original answer")):
        if checked[name] is False:
            raise RejectedError(f"the {name} is not {expected}")
    return checked


def _is_same(expression: str, values: Mapping[str, int], answer: str) -> bool | None:
    """Compare LaTeX, with values for its letters, by math-verify. Return None if it cannot evaluate one side."""
    rule, text = open_rule("math", WORKERS, DEADLINE), f"\\boxed{{{expression}}}"
    with suppress(WorkerError):
        verdict = rule.judge_one(text, answer.strip().strip("$"), values=dict(values))
        return verdict.correct if verdict.rule == "math-verify" else None
    return None


def _letters(latex: str) -> set[str]:
    return set(filter(None, _LETTER.findall(latex)))


def _has_other_values(form: str, values: Mapping[str, int]) -> bool:
    """Return whether other integers fit the form. Only roots of a letter and fractions over a letter are examined."""
    for groups in _FRACTION.findall(_FACTOR.sub("1", form)):
        numerator, letter = filter(None, groups)
        q, terms = values.get(letter, 1), re.findall(r"[^\s+-][^+-]*", numerator)
        if q < 0 or gcd(q, *(prod(values.get(factor, 1) for factor in _letters(term)) for term in terms)) > 1:
            return True
    roots = [(int(degree or 2), abs(values.get(a or b, 1))) for degree, a, b in _FACTOR.findall(form)]
    return any(n % root**degree == 0 for degree, n in roots for root in range(2, min(isqrt(n), 10**4) + 1))


def beside(out: Path, what: str) -> Path:
    """Return the path of a file beside ``out``: `sums.jsonl` → `sums.rejected.jsonl`."""
    return out.with_name(f"{out.stem}.{what}{out.suffix}")


def convert_answers(source: Path, out: Path, config: ConvertConfig, report: Callable[[str], None]) -> Counter[str]:
    """Write ``out`` and, beside it, the rejected problems. Return counts by reason of rejection and of "kept".

    A journal saves each result; the same call resumes from it. Raises ConfigError, and HTTPError if the model does not
    reply.
    """
    require_package("math", "dapo convert-answers")
    if out.suffix != ".jsonl":
        raise ConfigError(f"OUT: expected a .jsonl file, got {out}")
    rows = read_problems(source, config.format, columns=config.columns, subset=config.subset, split=config.split)
    plain = (replace(problem, answer=as_set(problem.answer)) for problem in islice(rows, config.limit))
    problems = {_key_of(problem): problem for problem in plain}
    journal = beside(out, "journal")
    for path in (out, beside(out, "rejected")):
        if path.exists() and not journal.exists():
            raise ConfigError(f"{path}: already exists and is not overwritten. Choose another OUT.")
    held = {name for name in ConvertConfig.model_fields if not may_change(name, ConvertConfig)}
    with _lock(journal, report):
        settled = _read_journal(journal, config.model_dump(mode="json", include=held))
        waiting = {key: problem for key, problem in problems.items() if key not in settled}
        n_others = len(settled.keys() - problems.keys())
        for rows_by_key in _settle_all(waiting, config):
            append_jsonl(journal, [{"key": key, "row": row} for key, row in rows_by_key.items()])
            settled |= rows_by_key
            report(f"{len(settled) - n_others} of {len(problems)} problems")
        reasons = {key: settled[key]["conversion"].get("rejected", "kept") for key in problems}
        for path, is_kept in ((beside(out, "rejected"), False), (out, True)):
            chosen = (settled[key] for key, reason in reasons.items() if (reason == "kept") == is_kept)
            atomic_write(path, to_jsonl(chosen))
        journal.unlink()
    return Counter(reasons.values())


def _lock(journal: Path, report: Callable[[str], None]) -> BinaryIO:
    try:
        return lock_file(journal, report)
    except BlockingIOError as error:
        raise ConfigError(f"{journal}: expected a file that no other process writes. End that one first.") from error


def _read_journal(journal: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return finished rows by key. The journal's first line has the settings of its first run. Raises ConfigError."""
    drop_incomplete_line(journal)
    lines = read_jsonl(journal)
    if not lines:
        append_jsonl(journal, [settings])
        return {}
    if changed := sorted(key for key in settings | lines[0] if lines[0].get(key) != settings.get(key)):
        raise ConfigError(f"{journal}: expected the same settings, got another {', '.join(changed)}. Change OUT.")
    return {line["key"]: line["row"] for line in lines[1:]}


def _settle_all(problems: Mapping[str, Problem], config: ConvertConfig) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield rows by key: of integer answers, then batches of the others. Raises HTTPError after the rows of a batch."""
    integers = {key: n for key, problem in problems.items() if (n := as_integer(problem.answer)) is not None}
    yield {key: _row(problems[key], problems[key].question, str(n), rule="integer") for key, n in integers.items()}
    asking = [key for key in problems if key not in integers]
    for start in range(0, len(asking), config.concurrency):
        batch = asking[start : start + config.concurrency]
        found = map_in_threads(lambda key: _ask(config, problems[key]), batch, config.concurrency)
        replies = {key: reply for key, reply in zip(batch, found, strict=True) if not isinstance(reply, HTTPError)}
        yield {key: _settle(problems[key], reply, config) for key, reply in replies.items()}
        if error := next((reply for reply in found if isinstance(reply, HTTPError)), None):
            raise error


def _settle(problem: Problem, found: str | RejectedError, config: ConvertConfig) -> dict[str, Any]:
    question = bare_question(problem)
    evidence: dict[str, Any] = {"problem": question, "answer": problem.answer, "model": config.model}
    try:
        if isinstance(found, RejectedError):
            raise found
        evidence["reply"] = found
        reply = read_reply(found)
        checked = check(reply, question, problem.answer)
    except RejectedError as error:
        return _row(problem, problem.question, problem.answer, **evidence, rejected=str(error))
    evidence |= {"form": reply.form, "values": reply.values, "quantity": reply.quantity, "agrees": checked}
    return _row(problem, reply.question, str(reply.integer), rule="rewritten", **evidence)


def bare_question(problem: Problem) -> str:
    """Return the question without the recipe's instruction around it."""
    before, _, after = RECIPE_TEMPLATE.partition("{question}")
    return problem.question.strip().removeprefix(before).removesuffix(after).strip()


def _row(source: Problem, question: str, truth: str, **evidence: Any) -> dict[str, Any]:
    """Return a row in the schema of DAPO's data, which `data.path` accepts."""
    turns = (*source.context, ("user", question))
    return {
        "data_source": source.source,
        "prompt": [{"role": role, "content": content} for role, content in turns],
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "conversion": evidence,
    }


def _key_of(problem: Problem) -> str:
    return hashlib.sha256(f"{problem.key}\0{problem.answer}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _ask(config: ConvertConfig, problem: Problem, attempt: int = 0) -> str | HTTPError | RejectedError:
    """Return the reply of an API, its error after all retries, or that it refuses this problem, but not every one."""
    messages = request(bare_question(problem), problem.answer)
    try:
        return chat(config, messages, TIMEOUT, max_tokens=MOST_TOKENS, temperature=0, seed=0)[0]
    except HTTPError as error:
        if error.status in REFUSED and problem != EASY and isinstance(_ask(config, EASY), str):
            return RejectedError(f"the server refuses the problem (HTTP {error.status})")
        if error.status in REFUSED or attempt == RETRIES:
            return error
        pause(attempt, error, TIMEOUT)
    return _ask(config, problem, attempt + 1)
