"""Rules that may hang or use too much memory, in processes that can be killed: `math`, `json`, `reasoning_gym`
(``rule_worker``), `code`.

Each program of `code` runs in a separate process (``code_worker``): inside bubblewrap if it is installed and can create
namespaces; otherwise Landlock hides the machine's files. seccomp applies in both cases.

The rule of a verdict, counted in `batch/rule_<name>`, states what happened. For a compared answer: `math-verify`,
`json-schema`, `code`, or where `reasoning_gym` found it. Else: `none` (no answer), `error` (of parsing), `timeout`,
`output` (too much) or `crash`.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from math import isclose
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError
from dapo_runner.rewards.rule_worker import FENCED
from dapo_runner.threads import map_in_threads
from dapo_runner.types import Verdict

MAX_OUTPUT = 2**20  # bytes that a process may write, beside the expected output
ROOM_SECONDS = 100.0  # how long to wait until the container can start another process
START_SECONDS = 120.0  # for a rule's process to import its packages
PACKAGES = {"math": "math_verify", "json": "jsonschema", "reasoning_gym": "reasoning_gym"}
_RULES, _PROGRAM = (Path(__file__).with_name(name) for name in ("rule_worker.py", "code_worker.py"))
CODE_COMMAND = (sys.executable, "-s", str(_PROGRAM))
# It has none of this process's variables, which may hold keys. Hashes of strings are the same in every run.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_PYTHON = ("", "py", "py3", "python", "python3", "ipython3")  # languages of a block


class WorkerError(Exception):
    """A process failed. The message is the rule for the verdict: timeout, output or crash."""


class Worker:
    """A process in its own session, so that Ctrl-C in the terminal does not reach it. It ends with this process."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Start the process. If the container cannot start another one now, wait."""
        end, pipe = time.monotonic() + ROOM_SECONDS, subprocess.PIPE
        streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL}
        while True:
            try:
                self.process = subprocess.Popen(command, **streams, env=environment, cwd="/", start_new_session=True)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        self.kill = weakref.finalize(self, _kill, self.process)

    def send(self, request: dict[str, Any], *, end: bool = False) -> None:
        """Write a line to its standard input, and close it with ``end``. Raises WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            if end:
                self.process.stdin.close()
        except OSError:
            raise WorkerError("crash") from None

    def read(self, seconds: float, *, line: bool = False, limit: int = MAX_OUTPUT) -> bytes:
        """Return its output up to the end of the stream, or up to the end of a line. Raises WorkerError."""
        assert self.process.stdout is not None
        end, written, poll = time.monotonic() + seconds, bytearray(), select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while (left := end - time.monotonic()) > 0 and poll.poll(1000 * left):
            part = os.read(self.process.stdout.fileno(), 2**16)
            written += part
            if len(written) > limit:
                raise WorkerError("output")
            if not part or (line and part.endswith(b"\n")):
                return bytes(written)
        raise WorkerError("timeout")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its whole group: a starting bubblewrap has a child that must end too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(BrokenPipeError), process:  # closes its pipes and waits for it
        pass


class WorkerRule(ABC):
    """Judge in processes, ``workers`` texts at the same time. A process has ``timeout`` seconds for its answer."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.timeout = workers, timeout

    @abstractmethod
    def judge_one(self, text: str, answer: str) -> Verdict:
        """Return the verdict on a text. Raises WorkerError."""

    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        def judge(pair: tuple[str, str]) -> Verdict:
            try:
                return self.judge_one(*pair)
            except WorkerError as error:
                return Verdict(False, rule=str(error))

        return map_in_threads(judge, zip(texts, answers, strict=True), self.workers)


class TextRule(WorkerRule):
    """Judge with a rule of ``rule_worker``. A worker judges many texts; one that times out or dies is replaced."""

    def __init__(self, rule: str, workers: int, timeout: float) -> None:
        """Raise ConfigError without the rule's package."""
        super().__init__(workers, timeout)
        require_package(rule)
        self.rule = rule
        self._idle: list[Worker] = []  # the last one is used first, so that no more are started than needed

    def judge_one(self, text: str, answer: str, **more: Any) -> Verdict:
        """Return a worker's verdict. Raises WorkerError, and ConfigError for an invalid ground truth."""
        worker = self._take_worker()
        try:
            worker.send({"text": text, "answer": answer, **more, "timeout": self.timeout})
            if not (written := worker.read(self.timeout, line=True)):
                raise WorkerError("crash")
        except BaseException:
            worker.kill()
            raise
        self._idle.append(worker)
        found = json.loads(written)
        if "refused" in found:
            raise ConfigError(f"reward json: expected JSON schemas as reference answers, got {found['refused']}")
        return Verdict(**found)

    def _take_worker(self) -> Worker:
        while self._idle:
            if (worker := self._idle.pop()).process.poll() is None:  # death while idle costs no text its verdict
                return worker
        worker = Worker((sys.executable, str(_RULES), self.rule), {**os.environ, "PYTHONHASHSEED": "0"})
        with suppress(WorkerError):
            if worker.read(START_SECONDS, line=True):
                return worker
        package = PACKAGES[self.rule]
        raise RuntimeError(f"reward {self.rule}: no worker started. Try `{sys.executable} -c 'import {package}'`.")


class CodeRule(WorkerRule):
    """Run programs with ``memory_mb`` of memory, once for each input, against tests, which are the ground truth.

    A program shares an interpreter with its tests, so a malicious one can make them pass. Exiting early does not count
    as passing.
    """

    def __init__(self, workers: int, timeout: float, memory_mb: int) -> None:
        super().__init__(workers, timeout)
        self.memory_mb = memory_mb

    def judge_one(self, text: str, answer: str) -> Verdict:
        blocks = {bool(language): code for language, code in FENCED.findall(text) if language.lower() in _PYTHON}
        program, tests = blocks.get(True, blocks.get(False, text.partition("\n```")[0])), read_tests(answer)
        if program.lstrip("\n").startswith((" ", "\t")):  # in a list; elsewhere dedent would change texts in it
            program = textwrap.dedent(program)
        if isinstance(tests, str):
            token = secrets.token_hex(16)
            written, _ = self._run(program=program, tests=tests, token=token)
            if written not in ("failed", token):
                raise WorkerError("crash")
            return Verdict(written == token, rule="code")
        for given, expected in tests:
            written, exit_code = self._run(len(expected), program=program, stdin=given, token="")
            if exit_code != 0:
                raise WorkerError("crash")
            if not is_same_output(written, expected):
                return Verdict(False, rule="code")
        return Verdict(True, rule="code")

    def _run(self, expected: int = 0, /, **request: str) -> tuple[str, int]:
        """Return a program's standard output and exit code. Raises WorkerError."""
        limits = {"memory": self.memory_mb * 10**6, "seconds": self.timeout, "readable": _readable()}
        worker = Worker((*_sandbox(), *CODE_COMMAND), _ENVIRONMENT)
        try:
            worker.send(request | limits, end=True)
            written = worker.read(self.timeout, limit=MAX_OUTPUT + 4 * expected)  # at most 4 bytes a character
        finally:
            worker.kill()
        return written.decode(errors="replace"), worker.process.returncode


def is_same_output(written: str, expected: str) -> bool:
    """Compare the words of each line; as numbers if the expected word is a number with a decimal point."""
    counts = [[len(line.split()) for line in text.strip().splitlines()] for text in (written, expected)]
    pairs = [pair for pair in zip(written.split(), expected.split(), strict=False) if pair[0] != pair[1]]
    with suppress(ValueError):  # no number
        close = ("." in other and isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-6) for one, other in pairs)
        return counts[0] == counts[1] and all(close)
    return False


@cache
def open_code(workers: int, timeout: float, memory_mb: int) -> CodeRule:
    """Return the `code` rule of this process. Raises ConfigError if programs cannot be confined."""
    rule, environment = CodeRule(workers, timeout, memory_mb), Path(f"/proc/{os.getpid()}/environ")
    digest = hashlib.sha256(environment.read_bytes()).hexdigest()
    test = (  # in another namespace this process id means another process
        f"import hashlib\ntry: seen = hashlib.sha256(open('{environment}', 'rb').read()).hexdigest()\n"
        f"except OSError: seen = ''\nassert seen != '{digest}'"
    )
    (verdict,) = rule.judge_texts(["x = 1"], [test])
    if not verdict.correct:
        raise ConfigError(
            "reward.kind: 'code' requires Linux's seccomp with libseccomp (apt-get install libseccomp2), bubblewrap "
            "(apt-get install bubblewrap) or a kernel with Landlock, to hide your files and processes from programs, "
            f"and enough reward.memory_mb, got {memory_mb}. A program of one line failed ({verdict.rule})."
        )
    return rule


@cache
def _readable() -> list[str]:
    """Return the paths that a program may read: Python, its packages and the system's libraries."""
    python = str(Path(sys.executable).resolve().parents[1])
    system = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
    return [path for path in dict.fromkeys((*system, python, sys.base_prefix, sys.prefix)) if Path(path).exists()]


@cache
def _sandbox() -> tuple[str, ...]:
    """Return the command of bubblewrap; empty if it is not installed or fails."""
    if (bwrap := shutil.which("bwrap")) is None:
        return ()
    shown = [word for path in (*_readable(), str(_PROGRAM)) for word in ("--ro-bind", path, path)]
    alone = ("--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--chdir", "/")
    command = (bwrap, *alone, *shown, "--proc", "/proc", "--dev", "/dev", "--")
    tried = subprocess.run([*command, sys.executable, "-c", ""], capture_output=True, env=_ENVIRONMENT, check=False)
    return command if tried.returncode == 0 else ()


@lru_cache(maxsize=256)
def read_tests(answer: str) -> str | list[tuple[str, str]]:
    """Return statements, also from a list as in MBPP, or pairs of input and output (TACO, APPS). Raises ConfigError."""

    def join(value: Any) -> str:
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

    def join_each(values: Any) -> list[str]:
        return [values] if isinstance(values, str) else [join(value) for value in values or ()]

    tests: Any = None
    with suppress(ValueError, RecursionError):
        tests = json.loads(answer)
    found: str | list[tuple[str, str]] = join(tests) if isinstance(tests, list) else answer
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        given, printed = (join_each(tests[name]) for name in ("inputs", "outputs"))
        fits = len(given) == len(printed) and not tests.get("fn_name")
        found = list(zip(given, printed, strict=True)) if fits else []
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # a null byte, thousands of brackets
        if found if isinstance(found, list) else _tests_something(found):
            return found
    wanted = "Python statements, or inputs and as many outputs of a program, without fn_name"
    advice = "Add statements outside functions, classes and `if __name__`, like `check(f)`, or set data.columns.answer."
    raise ConfigError(f"reward code: expected tests ({wanted}), got {answer[:80]!r}. {advice}")


def _tests_something(code: str) -> bool:
    """Return whether code asserts, calls or raises something outside functions, classes and `if __name__` blocks."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(code).body if not isinstance(node, definitions)]
    run = [node for node in nodes if not ast.unparse(node).startswith("if __name__ ==")]
    return any(isinstance(part, ast.Assert | ast.Call | ast.Raise) for node in run for part in ast.walk(node))


open_rule = cache(TextRule)  # of this process


def require_package(kind: str, user: str | None = None) -> None:
    """Raise ConfigError if a package that a rule needs is not installed. ``user``: what uses it, if not a reward."""
    if importlib.util.find_spec(package := PACKAGES[kind]) is None:
        user = user or f"reward.kind: {kind!r}"
        raise ConfigError(f"{user} requires {package}. Run `pip install 'dapo-kernels[{kind}]'`.")
    try:
        ctypes.CDLL("libseccomp.so.2" if kind == "reasoning_gym" else None)
    except OSError as error:
        raise ConfigError("reward.kind: 'reasoning_gym' requires libseccomp (apt-get install libseccomp2)") from error
