"""Programs held against tests, each in a process of its own that is confined (``code_worker``) and killed.

The process runs inside bubblewrap where that is installed and may make namespaces: it then sees no other process, no
network, and of the files only those of ``_readable``. Without bubblewrap Landlock hides the files, and where the kernel
has none the rule is refused. Seccomp holds in either case.

The program is the last fenced block of the response, or all of it. The ground truth is its tests: Python statements, a
list of them (MBPP), or {"inputs": […], "outputs": […]} for a program that reads and prints (TACO, APPS). A verdict's
rule says what happened, and `batch/rule_<name>` counts it:

    code      it came to its end: correct where all tests passed
    timeout   past `reward.deadline`
    output    it printed more than ``MAX_OUTPUT`` bytes
    crash     the process died (memory, recursion in C), or left by itself

A program shares an interpreter with the statements that test it, and one that sets out to can make them pass, as under
any such tests; ending early does not count as passing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError
from dapo_runner.rewards.workers import WorkerError, WorkerReward, python_command
from dapo_runner.types import Verdict

MB = 10**6
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_SCRIPT = Path(__file__).with_name("code_worker.py")
_COMMAND = python_command(_SCRIPT, "-s")
# No variable of ours, which may hold keys; strings hash alike in every run.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class CodeReward(WorkerReward):
    """Runs programs side by side, each with ``memory_mb`` of memory."""

    def __init__(self, workers: int, deadline: float, memory_mb: int) -> None:
        super().__init__(workers, deadline)
        self.memory_mb = memory_mb

    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        pairs = zip(texts, answers, strict=True)
        return self.run([{"program": _program_of(text), "tests": read_tests(answer)} for text, answer in pairs])

    def run_one(self, request: dict[str, Any]) -> Verdict:
        program, tests = request["program"], request["tests"]
        if isinstance(tests, str):
            token = secrets.token_hex(16)
            written, _ = self._run_program({"program": program, "tests": tests, "token": token})
            if written not in (b"failed", token.encode()):
                raise WorkerError("crash")
            return Verdict(written == token.encode(), rule="code")
        for stdin, expected in tests:
            written, exit_code = self._run_program({"program": program, "stdin": stdin, "token": ""})
            if exit_code != 0:
                raise WorkerError("crash")
            if _lines(written.decode(errors="replace")) != _lines(expected):
                return Verdict(False, rule="code")
        return Verdict(True, rule="code")

    def _run_program(self, request: dict[str, str]) -> tuple[bytes, int]:
        """Return what it wrote to standard output, and its exit code. Raises WorkerError."""
        limits = {"memory": self.memory_mb * MB, "seconds": self.deadline, "readable": _readable()}
        worker = self.start((*_sandbox(), *_COMMAND), _ENVIRONMENT)
        try:
            worker.send(json.dumps(request | limits).encode(), end=True)
            written = worker.read(self.deadline)
        finally:
            exit_code = self.stop(worker)
        return written, exit_code


@cache
def open_code(workers: int, deadline: float, memory_mb: int) -> CodeReward:
    """Return the one code reward of the process. Raises ConfigError where programs cannot be confined."""
    reward, environment = CodeReward(workers, deadline, memory_mb), Path(f"/proc/{os.getpid()}/environ")
    digest = hashlib.sha256(environment.read_bytes()).hexdigest()
    hidden = (  # in a namespace of its own the same number is another process
        f"import hashlib\ntry: seen = hashlib.sha256(open('{environment}', 'rb').read()).hexdigest()\n"
        f"except OSError: seen = ''\nassert seen != '{digest}'"
    )
    runs, hides = reward.judge_texts(["x = 1", "x = 1"], ["assert x == 1", hidden])
    if not runs.correct:
        raise ConfigError(
            "reward.kind: 'code' requires Linux's seccomp with libseccomp (apt-get install libseccomp2) and enough "
            f"reward.memory_mb, got {memory_mb}; a program of one line failed its test"
        )
    if not hides.correct:
        raise ConfigError(
            "reward.kind: 'code' requires bubblewrap (apt-get install bubblewrap) or a kernel with Landlock, to hide "
            "your files and the environment of your processes from programs; neither works here"
        )
    return reward


@cache
def _readable() -> list[str]:
    """What a program may read: Python, its packages and the system's libraries."""
    python = Path(sys.executable).resolve().parents[1]
    system = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
    paths = dict.fromkeys((*system, str(python), sys.base_prefix, sys.prefix))
    return [path for path in paths if Path(path).exists()]


@cache
def _sandbox() -> tuple[str, ...]:
    """The command of bubblewrap, which the worker's is appended to; empty where it is not installed or fails."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return ()
    shown = [word for path in (*_readable(), str(_SCRIPT)) for word in ("--ro-bind", path, path)]
    alone = ("--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--chdir", "/")
    command = (bwrap, *alone, *shown, "--proc", "/proc", "--dev", "/dev", "--")
    tried = subprocess.run([*command, sys.executable, "-c", ""], capture_output=True, env=_ENVIRONMENT, check=False)
    return command if tried.returncode == 0 else ()


def read_tests(answer: str) -> str | list[tuple[str, str]]:
    """Return statements, or pairs of what a program reads and what it has to print."""
    try:
        tests = json.loads(answer)
    except ValueError:
        return answer
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        return [
            (_joined(given), _joined(wanted)) for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)
        ]
    return "\n".join(map(str, tests)) if isinstance(tests, list) else answer


def _program_of(text: str) -> str:
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
