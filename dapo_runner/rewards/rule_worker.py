"""A worker of the rules ``math`` and ``json``: a verdict for each request, a line of JSON each.

``worker_rules`` starts it with the rule's name, and kills it. It imports nothing of this package so that it starts
quickly. It judges what a model wrote, which may ask for any amount of time or memory, and gets neither.
"""

import json
import logging
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
SHOWN = 200  # characters of an extracted answer that are passed on
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def judge_math(text: str, answer: str | None = None, other: str | None = None, values: Any = None) -> dict[str, Any]:
    """Compare a text with the ground truth ``answer``, or with what another text, ``other``, answers. ``values`` has
    numbers for letters of the text.

    Returns "correct", "extracted" and "rule": "none" without an answer in the text, "error" where comparing failed.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str, *formats: Any) -> Any:
        return parse(text, list(formats), parsing_timeout=None, raise_on_error=True)

    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    try:
        gold = read(rf"\boxed{{{answer}}}", latex) if other is None else read(other, latex, plain)
        if not gold:
            raise ValueError("no mathematics in the ground truth")
        found = read(text, latex, plain)
        if not found:
            return {"correct": False, "extracted": None, "rule": "none"}
        if values:
            found = [found[0].subs({x: values[x.name] for x in found[0].free_symbols if x.name in values})]
        correct = bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))
        return {"correct": correct, "extracted": str(found[0])[:SHOWN], "rule": "math-verify"}
    except MemoryError:
        raise  # what is left of the memory is not enough for the next text either: a new worker
    except Exception:  # whatever a parser does with hostile text; it is counted
        return {"correct": False, "extracted": None, "rule": "error"}


def judge_json(text: str, schema: str) -> dict[str, Any]:
    """Validate the last fenced block of a text, or all of it, as JSON under a schema.

    Returns "correct", "extracted" and "rule": "none" without JSON, "error" where validating failed. Returns "refused",
    the reason, for a schema that is invalid or refers to what it does not hold.
    """
    from jsonschema import SchemaError
    from referencing.exceptions import Unresolvable

    try:
        validator = json_validator(schema)
    except (ValueError, TypeError, SchemaError) as error:
        return refuse(schema, error)
    fenced = FENCED.findall(text)
    try:
        value = json.loads(fenced[-1] if fenced else text, parse_constant=finite, parse_float=finite)
        shown = json.dumps(value, sort_keys=True, ensure_ascii=False)[:SHOWN]
    except (ValueError, RecursionError):
        return {"correct": False, "extracted": None, "rule": "none"}
    extracted = shown.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    try:
        return {"correct": bool(validator.is_valid(value)), "extracted": extracted, "rule": "json-schema"}
    except Unresolvable as error:
        return refuse(schema, error)
    except MemoryError:
        raise
    except Exception:  # a number of 400 digits against a multipleOf, nesting against a schema that refers to itself
        return {"correct": False, "extracted": extracted, "rule": "error"}


def refuse(schema: str, error: Exception) -> dict[str, Any]:
    return {"refused": f"expected a JSON schema, got {schema[:80]!r}: {str(error).splitlines()[0]}"}


def finite(text: str) -> float:
    """Raises ValueError for NaN and for what no float holds, as 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


@lru_cache(maxsize=1024)
def json_validator(schema: str) -> Any:
    """Return the validator of a schema, which fetches nothing. Raises ValueError, TypeError, SchemaError."""
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    content = json.loads(schema)
    kind = validator_for(content)
    kind.check_schema(content, format_checker=kind.FORMAT_CHECKER)
    return kind(content, registry=REGISTRY)


def main() -> None:
    # Signals that ask a run to stop reach every process, and the step under way is finished nevertheless.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    judges: dict[str, Callable[..., dict[str, Any]]] = {"math": judge_math, "json": judge_json}
    judge = judges[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    judge("1", "1" if judge is judge_math else "{}")  # imports count against nobody's deadline
    print("ready", file=answers, flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Nobody is left to kill this process when its parent was killed: the default action of the alarm does.
        signal.setitimer(signal.ITIMER_REAL, 2 * request.pop("deadline") + 1)
        verdict = judge(**request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main()
