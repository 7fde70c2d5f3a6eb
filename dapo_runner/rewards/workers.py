"""Processes that can be killed: rules and programs that may hang, or take all memory, run in them with a deadline."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_runner.rewards.deadline import map_in_threads
from dapo_runner.rewards.reward import TextReward
from dapo_runner.types import Verdict

MAX_OUTPUT = 2**20  # bytes that a process may write
START_PATIENCE = 100.0  # seconds until there is room for another process


class WorkerError(Exception):
    """A process failed; ``rule`` is how the verdict names it: timeout, output or crash."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule


class Worker:
    """A process in a session of its own, so that no Ctrl-C of the terminal reaches it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None) -> None:
        """Start it. Raises BlockingIOError where the container has no room for another process."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )

    def send(self, request: bytes, *, end: bool = False) -> None:
        """Write to its standard input, and close it at the ``end``. Raises WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            if end:
                self.process.stdin.close()
        except OSError:
            raise WorkerError("crash") from None

    def read(self, seconds: float, *, line: bool = False) -> bytes:
        """Return what it writes until it closes its standard output, or until the end of a line. Raises WorkerError."""
        assert self.process.stdout is not None
        end, written, poll = time.monotonic() + seconds, bytearray(), select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while (left := end - time.monotonic()) > 0 and poll.poll(1000 * left):
            part = os.read(self.process.stdout.fileno(), 2**16)
            written += part
            if len(written) > MAX_OUTPUT:
                raise WorkerError("output")
            if not part or (line and part.endswith(b"\n")):
                return bytes(written)
        raise WorkerError("timeout")

    def kill(self) -> int:
        """Kill it with its whole group, which bubblewrap's child needs while it starts. Returns the exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def close(self) -> int:
        """Kill it and close its pipes. Returns the exit code."""
        code = self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        return code


def python_command(script: Path, *options: str) -> tuple[str, ...]:
    """Return a command that runs a file with no folder of the caller's on sys.path, where numbers.py would be ours."""
    start = f"import sys; sys.path.pop(0); import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    return (sys.executable, *options, "-c", start)


class WorkerReward(TextReward):
    """Judges in processes, ``workers`` texts at a time, each within ``deadline`` seconds."""

    def __init__(self, workers: int, deadline: float) -> None:
        self.workers, self.deadline = workers, deadline
        self.running: set[Worker] = set()
        self._one_call = threading.Lock()  # a call that is interrupted kills all workers, which must all be its own
        self._interrupted = threading.Event()
        weakref.finalize(self, _kill_all, self.running)

    @abstractmethod
    def run_one(self, request: dict[str, Any]) -> Verdict:
        """Return the verdict on one request. Raises WorkerError."""

    def run(self, requests: Sequence[dict[str, Any]]) -> list[Verdict]:
        """Return the verdict on each request."""
        with self._one_call:
            self._interrupted.clear()
            try:
                return map_in_threads(self._run_one, requests, self.workers)
            except BaseException:  # a second Ctrl-C does not wait for what runs
                self._interrupted.set()
                _kill_all(self.running)
                raise

    def start(self, command: Sequence[str], environment: dict[str, str] | None = None) -> Worker:
        """Start a process; waits while running programs have taken all that the container may have."""
        end = time.monotonic() + START_PATIENCE
        while not self._interrupted.is_set():
            try:
                worker = Worker(command, environment)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
            else:
                self.running.add(worker)
                return worker
        raise WorkerError("crash")

    def stop(self, worker: Worker) -> int:
        """Kill a process. Returns its exit code."""
        self.running.discard(worker)
        return worker.close()

    def _run_one(self, request: dict[str, Any]) -> Verdict:
        try:
            return self.run_one(request)
        except WorkerError as error:
            return Verdict(False, rule=error.rule)


def _kill_all(workers: set[Worker]) -> None:
    for worker in tuple(workers):
        worker.kill()
