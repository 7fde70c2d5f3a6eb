"""Rules that a text can hang, `math` and `json`, in processes that are killed past the deadline (``rule_worker``).

A verdict's rule says what happened, and `batch/rule_<name>` counts it:

    math-verify, json-schema   compared
    none                       the text holds no answer, or no JSON
    error                      parsing or comparing failed
    timeout                    past `reward.deadline`
    crash                      the process died, e.g. out of memory

Only the first can be correct. Timeouts depend on the machine: a resumed run with some need not repeat bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError
from dapo_runner.rewards.workers import Worker, WorkerError, WorkerReward, python_command
from dapo_runner.types import Verdict

WINDOW = 2000  # characters at the end of a response that `math` reads
START_SECONDS = 120.0  # for a worker to import what it needs
_COMMAND = python_command(Path(__file__).with_name("rule_worker.py"))


class RuleReward(WorkerReward):
    """Judges by a rule of ``rule_worker``. A worker judges many texts; one that is late or dies is replaced."""

    rule: str

    def __init__(self, workers: int, deadline: float) -> None:
        super().__init__(workers, deadline)
        self._idle: list[Worker] = []  # the one used last goes first: no more start than are needed

    def run_one(self, request: dict[str, Any]) -> Verdict:
        """Return a worker's verdict. Raises WorkerError, and ConfigError where it refuses the ground truth."""
        worker = self._take_worker()
        try:
            worker.send(json.dumps({**request, "deadline": self.deadline}).encode() + b"\n")
            answer = worker.read(self.deadline, line=True)
            if not answer:
                raise WorkerError("crash")
        except BaseException:
            self.stop(worker)
            raise
        self._idle.append(worker)
        found = json.loads(answer)
        if "refused" in found:
            raise ConfigError(f"reward {self.rule}: {found['refused']}")
        return Verdict(**found)

    def _take_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            self.stop(worker)  # it died while idle, which says nothing about this text
        worker = self.start((*_COMMAND, self.rule))
        with suppress(WorkerError):
            if worker.read(START_SECONDS, line=True):
                return worker
        self.stop(worker)
        raise RuntimeError(
            f"reward {self.rule}: a worker did not start within {START_SECONDS:.0f} s. To see why, run "
            f"`{sys.executable} -c 'import math_verify, jsonschema'`."
        )


class MathReward(RuleReward):
    """Compares answers as mathematics (math-verify)."""

    rule = "math"

    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        pairs = zip(texts, answers, strict=True)
        return self.run([{"text": text[-WINDOW:], "answer": answer} for text, answer in pairs])

    def compare(self, text: str, others: Sequence[str]) -> list[bool | None]:
        """Return which of the others give the answer of ``text``; None where that could not be found out."""
        verdicts = self.run([{"text": other[-WINDOW:], "other": text[-WINDOW:]} for other in others])
        return [verdict.correct if verdict.rule == "math-verify" else None for verdict in verdicts]


class JsonReward(RuleReward):
    """Correct where the last fenced block of a response, or all of it, is JSON under a schema.

    The schema is `reward.json_schema`, else the ground truth of each prompt. Nothing is fetched for it.
    """

    rule = "json"

    def __init__(self, workers: int, deadline: float, schema: Path | None = None) -> None:
        """Read and check the schema. Raises ConfigError."""
        super().__init__(workers, deadline)
        self._schema: str | None = None
        if schema is not None:
            try:
                self._schema = schema.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"reward.json_schema: expected a file, got {error}") from error
            self.judge_texts(["{}"], [""])

    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        pairs = zip(texts, answers, strict=True)
        return self.run([{"text": text, "schema": self._schema or answer} for text, answer in pairs])


@cache
def open_math(workers: int, deadline: float) -> MathReward:
    """Return the one math reward of the process. Raises ConfigError without math-verify."""
    require_package("math_verify", "math")
    return MathReward(workers, deadline)


@cache
def open_json(workers: int, deadline: float, schema: Path | None) -> JsonReward:
    """Return the one JSON reward of the process. Raises ConfigError without jsonschema."""
    require_package("jsonschema", "json")
    return JsonReward(workers, deadline, schema)


def require_package(package: str, kind: str) -> None:
    """Raise ConfigError where the package that a rule needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"reward.kind: {kind!r} requires {package}. Run `pip install 'dapo-kernels[{kind}]'`.")
