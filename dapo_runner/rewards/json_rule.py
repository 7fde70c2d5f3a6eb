"""Answers that have to be JSON of a given form: jsonschema (the ``json`` extra) says whether they are.

It runs in processes that can be killed (``math_rule``): a pattern that backtracks holds the interpreter's lock, and no
thread could stop it. A verdict's rule says what happened:

    json-schema   compared
    none          no JSON in the response; NaN and a number that no float holds are none
    error         validating failed
    timeout       past `reward.deadline`
    crash         the process died (memory)

Nothing is fetched: a schema may refer to itself and to the published drafts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dapo_runner.config import ConfigError
from dapo_runner.rewards.math_rule import WorkerPool
from dapo_runner.types import Verdict


@cache
def json_judge(workers: int, deadline: float, schema: Path | None) -> JsonJudge:
    """One judge for every scorer of the process. Raises ConfigError without jsonschema, or a file without a schema."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ConfigError("reward.kind: 'json' needs the package jsonschema; pip install 'dapo-kernels[json]'")
    judge = JsonJudge(workers, deadline)
    if schema is not None:
        try:
            judge.schema = schema.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"reward.json_schema: expected a file: {error}") from error
        judge(["{}"], "")
    return judge


class JsonJudge(WorkerPool):
    """Right where the last fenced block of a response, or all of it, is valid JSON under ``schema``, else under the
    row's answer.
    """

    rule = "json"
    schema: str | None = None

    def __call__(self, texts: Sequence[str], answer: str) -> list[Verdict]:
        """A verdict for each text, in order. Raises ConfigError for a schema that is none."""
        return self._ask([{"text": text, "schema": self.schema or answer} for text in texts])
