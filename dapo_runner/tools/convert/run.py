"""`dapo convert-answers`: let a model rewrite every problem whose answer is not an integer, and check its replies."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError, ConvertConfig
from dapo_runner.config.reading import may_change
from dapo_runner.data.dataset import RECIPE_TEMPLATE
from dapo_runner.data.reading import Problem, read_problems
from dapo_runner.files import append_jsonl, atomic_write, drop_incomplete_line, read_jsonl, to_jsonl
from dapo_runner.http import HTTPError
from dapo_runner.rewards.calls import pause
from dapo_runner.rewards.judge import REFUSED, chat
from dapo_runner.rewards.workers import require_package
from dapo_runner.threads import map_in_threads
from dapo_runner.tools.convert.rules import RejectedError, as_integer, check, read_reply, request

RETRIES, TIMEOUT = 2, 600.0  # of a failed request; seconds per request
MOST_TOKENS = 8192  # of a reply, unless options.max_tokens is set
EASY = Problem("1 + 1 = ?", "2", "")  # asked after a refusal


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
    problems = {_key_of(problem): problem for problem in islice(rows, config.limit)}
    journal = beside(out, "journal")
    for path in (out, beside(out, "rejected")):
        if path.exists() and not journal.exists():
            raise ConfigError(f"{path}: already exists and is not overwritten. Choose another OUT.")
    held = {name for name in ConvertConfig.model_fields if not may_change(name, ConvertConfig)}
    settled = _read_journal(journal, config.model_dump(mode="json", include=held))
    waiting = {key: problem for key, problem in problems.items() if key not in settled}
    for rows_by_key in _settle_all(waiting, config):
        append_jsonl(journal, [{"key": key, "row": row} for key, row in rows_by_key.items()])
        settled |= rows_by_key
        report(f"{sum(key in settled for key in problems)} of {len(problems)} problems")
    reasons = {key: settled[key]["conversion"].get("rejected", "kept") for key in problems}
    for path, is_kept in ((beside(out, "rejected"), False), (out, True)):
        chosen = (settled[key] for key, reason in reasons.items() if (reason == "kept") == is_kept)
        atomic_write(path, to_jsonl(chosen))
    journal.unlink()
    return Counter(reasons.values())


def _read_journal(journal: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return finished rows by key. The journal's first line has the settings of its first run. Raises ConfigError."""
    try:
        journal.touch()
        drop_incomplete_line(journal)
    except OSError as error:
        raise ConfigError(f"{journal}: expected a file that can be written to: {error}") from error
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
