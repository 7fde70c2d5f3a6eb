"""Programs held against tests, each in a process of its own that is confined (``code_worker``) and killed.

The process runs inside bubblewrap where that is installed and may make namespaces: it then sees no other process, no
network, and of the files only those of ``_readable``. Without bubblewrap Landlock keeps the files from it, and where
the kernel has none the rule is refused. Seccomp holds in either case.

The program is the last fenced block of the response, or all of it. The row's answer is its tests: Python statements,
a list of them (MBPP), or {"inputs": […], "outputs": […]} for a program that reads and prints (TACO, APPS). A verdict's
rule says what happened, and `batch/rule_<name>` counts it:

    code      it came to its end: right where all tests passed
    timeout   past `reward.code.deadline`
    output    it printed more than ``OUTPUT`` bytes
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
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dapo_runner.config import CodeConfig, ConfigError
from dapo_runner.types import Verdict

OUTPUT = 2**20  # bytes that a program may print
MB = 10**6
PATIENCE = 10  # deadlines that the start of a program may take, where others leave no room for it
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_SCRIPT = Path(__file__).with_name("code_worker.py")
# A folder of ours comes first on sys.path of a script, that of the caller of a command: neither is wanted.
_COMMAND = (
    *(sys.executable, "-s", "-c"),
    f"import sys; sys.path.pop(0); import runpy; runpy.run_path({str(_SCRIPT)!r}, run_name='__main__')",
)
# Nothing of ours, which may hold keys; strings hash alike in every run.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@cache
def code_judge(config: CodeConfig) -> CodeJudge:
    """One for every scorer of the process. Raises ConfigError where programs cannot be confined."""
    judge, environment = CodeJudge(config), Path(f"/proc/{os.getpid()}/environ")
    digest = hashlib.sha256(environment.read_bytes()).hexdigest()
    hidden = (  # in a namespace of its own the same number is another process
        f"import hashlib\ntry: seen = hashlib.sha256(open('{environment}', 'rb').read()).hexdigest()\n"
        f"except OSError: seen = ''\nassert seen != '{digest}'"
    )
    works, hides = judge(["x = 1", "x = 1"], ["assert x == 1", hidden])
    if works.correct and hides.correct:
        return judge
    if works.correct:
        raise ConfigError(
            "reward.kind: 'code' requires bubblewrap (apt-get install bubblewrap) or a kernel with Landlock, to hide "
            "your files and the environment of your processes from programs; neither works here"
        )
    raise ConfigError(
        "reward.kind: 'code' runs programs under Linux's seccomp with libseccomp (apt-get install libseccomp2) and "
        f"reward.code.memory_mb ({config.memory_mb}); a program of one line did not pass its test here"
    )


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


class CodeJudge:
    """Judges responses side by side."""

    def __init__(self, config: CodeConfig) -> None:
        self.config = config
        self._running: set[subprocess.Popen[bytes]] = set()
        self._broken = threading.Event()

    def __call__(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """A verdict for each text, in order."""
        self._broken.clear()
        with ThreadPoolExecutor(self.config.workers) as threads:
            try:
                return list(threads.map(self._judge, texts, answers))
            except BaseException:  # a second Ctrl-C: nobody waits for what is under way
                threads.shutdown(wait=False, cancel_futures=True)
                self._broken.set()
                for process in tuple(self._running):
                    _kill(process)
                raise

    def _judge(self, text: str, answer: str) -> Verdict:
        blocks = _FENCED.findall(text)
        program, tests = blocks[-1] if blocks else text, read_tests(answer)
        if isinstance(tests, str):
            token = secrets.token_hex(16)
            rule, said = self._run({"program": program, "tests": tests, "token": token})
            if rule == "code" and said not in (b"failed", token.encode()):
                rule = "crash"
            return Verdict(said == token.encode(), rule=rule)
        for given, wanted in tests:
            rule, said = self._run({"program": program, "stdin": given, "token": ""})
            if rule != "code" or _lines(said.decode(errors="replace")) != _lines(wanted):
                return Verdict(False, rule=rule)
        return Verdict(True, rule="code")

    def _run(self, request: dict[str, Any]) -> tuple[str, bytes]:
        """What became of it, and what it wrote to standard output."""
        limits = {"memory": self.config.memory_mb * MB, "seconds": self.config.deadline, "readable": _readable()}
        process = self._start()
        self._running.add(process)
        try:
            if self._broken.is_set():
                return "crash", b""
            rule, said = _talk(process, json.dumps(request | limits).encode(), self.config.deadline)
        finally:
            _kill(process)
            self._running.discard(process)
            code = process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        return "crash" if rule == "code" and code != 0 and "tests" not in request else rule, said

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises OSError where there is no room for a process, also once the programs under way have been killed."""
        until = time.monotonic() + PATIENCE * self.config.deadline
        while True:
            try:
                return subprocess.Popen(
                    (*_sandbox(), *_COMMAND),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,  # a Ctrl-C in the terminal is not for it, and `_kill` reaches all of it
                )
            except BlockingIOError:  # a program under way has started as many threads as the container may have
                if self._broken.is_set() or time.monotonic() > until:
                    raise
                time.sleep(0.02)


def read_tests(answer: str) -> str | list[tuple[str, str]]:
    """Statements, or pairs of what a program is given to read and what it has to print."""
    try:
        tests = json.loads(answer)
    except ValueError:
        return answer
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        return [(_text(given), _text(wanted)) for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)]
    return "\n".join(map(str, tests)) if isinstance(tests, list) else answer


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its whole group: what bubblewrap starts does not yet die with it in its first milliseconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _talk(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> tuple[str, bytes]:
    """Send it the request, which it reads first of all, and read what it writes until its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.close()
    except BrokenPipeError:
        return "crash", b""
    said, until = bytearray(), time.monotonic() + deadline
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        if not poll.poll(1000 * left):
            break
        part = os.read(process.stdout.fileno(), 2**16)
        said += part
        if not part:
            return "code", bytes(said)
        if len(said) > OUTPUT:
            return "output", b""
    return "timeout", b""
