"""One worker of the rules ``math`` and ``json``: a verdict for each request, both JSON, over the pipe whose descriptor
``math_rule`` starts it with, after the rule's name.

It is a process so that it can be killed, and it imports nothing of this package so that it starts quickly. What it
judges was written by a model: it may ask for any amount of time or memory, and gets neither.
"""

import json
import logging
import math
import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
SHOWN = 200  # characters of an extracted answer that are passed on
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def judge_math(text: str, answer: str | None = None, other: str | None = None) -> dict[str, Any]:
    """{"correct", "extracted", "rule"}; rule "none" without an answer in the text, "error" when judging failed.

    The text is held against the ground truth ``answer``, or against what another text, ``other``, answers.
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
        correct = bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))
        return {"correct": correct, "extracted": str(found[0])[:SHOWN], "rule": "math-verify"}
    except MemoryError:
        raise  # what is left of the memory is not enough for the next text either: a new worker
    except Exception:  # whatever a parser does with hostile text; it is counted
        return {"correct": False, "extracted": None, "rule": "error"}


def judge_json(text: str, schema: str) -> dict[str, Any]:
    """{"correct", "extracted", "rule"}; rule "none" without JSON in the text, "error" when validating failed.

    {"refused"} says what is wrong with the schema.
    """
    from jsonschema import SchemaError
    from referencing.exceptions import Unresolvable

    try:
        validator = json_validator(schema)
    except (ValueError, TypeError, SchemaError, Unresolvable) as error:
        return {"refused": f"expected a JSON schema, got {schema[:80]!r}: {str(error).splitlines()[0]}"}
    fenced = FENCED.findall(text)
    try:
        value = json.loads(fenced[-1] if fenced else text, parse_constant=finite, parse_float=finite)
        shown = json.dumps(value, sort_keys=True, ensure_ascii=False)[:SHOWN]
    except (ValueError, RecursionError):
        return {"correct": False, "extracted": None, "rule": "none"}
    extracted = shown.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    try:
        return {"correct": bool(validator.is_valid(value)), "extracted": extracted, "rule": "json-schema"}
    except MemoryError:
        raise
    except Exception:  # a number of 400 digits against a multipleOf, nesting against a schema that refers to itself
        return {"correct": False, "extracted": extracted, "rule": "error"}


def finite(text: str) -> float:
    """Raises ValueError for NaN and for what no float holds, as 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


@lru_cache(maxsize=1024)
def json_validator(schema: str) -> Any:
    """Return the validator of a schema.

    Raises:
        ValueError, TypeError, SchemaError: also for a regular expression that is none.
        Unresolvable: for a reference to a place that the schema does not have; nothing is fetched.
    """
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import specification_with

    content = json.loads(schema)
    kind = validator_for(content)
    kind.check_schema(content, format_checker=kind.FORMAT_CHECKER)
    specification = specification_with(kind.ID_OF(kind.META_SCHEMA))
    resource = specification.create_resource(content)
    check_references(resource, specification, REGISTRY.resolver_with_root(resource), set())
    return kind(content, registry=REGISTRY)


def check_references(resource: Any, specification: Any, resolver: Any, seen: set[int]) -> None:
    """Raise Unresolvable where a reference in the schema, or in what it refers to, leads nowhere."""
    content = resource.contents
    if id(content) in seen:
        return
    seen.add(id(content))
    resolver = resolver.in_subresource(resource)
    references = [content.get(name) for name in ("$ref", "$dynamicRef")] if isinstance(content, dict) else []
    for reference in references:
        if isinstance(reference, str):
            found = resolver.lookup(reference)
            check_references(specification.create_resource(found.contents), specification, found.resolver, seen)
    for part in resource.subresources():
        check_references(part, specification, resolver, seen)


def main() -> None:
    # Ctrl-C in a terminal, and what a job scheduler sends before it kills, reach every process, and the step under way
    # is finished nevertheless; this one ends when the pipe does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    pipe = Connection(int(sys.argv[1]))
    judges: dict[str, Callable[..., dict[str, Any]]] = {"math": judge_math, "json": judge_json}
    judge = judges[sys.argv[2]]
    judge("1", "1" if judge is judge_math else "{}")  # imports count against nobody's deadline
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            answer_one(pipe, judge)


def answer_one(pipe: Connection, judge: Callable[..., dict[str, Any]]) -> None:
    """Raises EOFError when the other end is gone."""
    request = json.loads(pipe.recv_bytes())
    # Nobody is left to kill this process when its parent was killed: the default action of the alarm does.
    signal.setitimer(signal.ITIMER_REAL, 2 * request.pop("deadline") + 1)
    verdict = judge(**request)
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send_bytes(json.dumps(verdict).encode())


if __name__ == "__main__":
    main()
