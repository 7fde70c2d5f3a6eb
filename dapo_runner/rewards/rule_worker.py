"""A process of the rules `math` and `json`: a verdict for each request, a line of JSON each.

``workers`` starts it with the rule's name, and kills it. It imports nothing of this package, to start quickly. It
judges what a model wrote, which may ask for any amount of time or memory, and gets neither.
"""

import json
import logging
import math
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
MATH_WINDOW = 2000  # characters at the end of a response that `math` reads
SHOWN = 200  # characters of an extracted answer that are passed on
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class RefusedError(Exception):
    """The ground truth is no JSON schema."""


def verdict(rule: str, extracted: str | None = None, correct: bool = False) -> dict[str, Any]:
    return {"correct": correct, "extracted": extracted, "rule": rule}


def judge_math(text: str, answer: str | None = None, other: str | None = None, values: Any = None) -> dict[str, Any]:
    """Compare a text with the ground truth ``answer``, or with what another text, ``other``, answers. ``values`` has
    numbers for letters of the text.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str, *formats: Any) -> Any:
        return parse(text, list(formats), parsing_timeout=None, raise_on_error=True)

    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    gold = read(rf"\boxed{{{answer}}}", latex) if other is None else read(other[-MATH_WINDOW:], latex, plain)
    if not gold:
        raise ValueError("no mathematics in the ground truth")
    found = read(text[-MATH_WINDOW:], latex, plain)
    if not found:
        return verdict("none")
    if values:
        found = [found[0].subs({x: values[x.name] for x in found[0].free_symbols if x.name in values})]
    correct = bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))
    return verdict("math-verify", str(found[0])[:SHOWN], correct)


def judge_json(text: str, answer: str) -> dict[str, Any]:
    """Validate the last fenced block of a text, or all of it, as JSON under the schema ``answer``."""
    from referencing.exceptions import Unresolvable

    validator = json_validator(answer)
    try:
        value = json.loads((FENCED.findall(text) or [text])[-1], parse_constant=finite, parse_float=finite)
        shown = json.dumps(value, sort_keys=True, ensure_ascii=False)[:SHOWN]
    except (ValueError, RecursionError):
        return verdict("none")
    try:
        correct = bool(validator.is_valid(value))
    except Unresolvable as error:
        raise RefusedError(f"{answer[:80]!r}: {error}") from error
    # A lone surrogate cannot be printed.
    return verdict("json-schema", shown.encode("utf-8", "backslashreplace").decode(), correct)


def finite(text: str) -> float:
    """Raises ValueError for NaN and for what no float holds, as 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


@lru_cache(maxsize=1024)
def json_validator(schema: str) -> Any:
    """Return the validator of a schema, which fetches nothing. Raises RefusedError."""
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    try:
        content = json.loads(schema)
        kind = validator_for(content)
        kind.check_schema(content, format_checker=kind.FORMAT_CHECKER)
    except Exception as error:
        raise RefusedError(f"{schema[:80]!r}: {str(error).splitlines()[0]}") from error
    return kind(content, registry=REGISTRY)


def answer_request(judge: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return judge(**request)
    except RefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        raise  # what is left of the memory is not enough for the next text either: a new worker
    except Exception:  # whatever a parser does with hostile text; it is counted
        return verdict("error")


def main() -> None:
    sys.path.pop(0)  # the folder of this file
    # Signals that ask a run to stop reach every process, and the step under way is finished nevertheless.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    judge = {"math": judge_math, "json": judge_json}[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    answer_request(judge, {"text": "1", "answer": "{}"})  # imports count against nobody's deadline
    print("ready", file=answers, flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Nobody is left to kill this process when its parent was killed: the default action of the alarm does.
        signal.setitimer(signal.ITIMER_REAL, 2 * request.pop("deadline") + 1)
        found = answer_request(judge, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
