"""Answers compared as mathematics, by math-verify (the ``math`` extra) in processes that can be killed.

math-verify's own deadline works through signals: outside a main thread it fails and scores 0 without a word, and
inside C code it does not strike. Here a worker that has not answered in time is killed and replaced. A verdict's
rule says what happened, and `batch/rule_<name>` counts it:

    math-verify   compared
    none          the text holds no answer
    error         the parser or the comparison failed
    timeout       the deadline struck
    crash         the worker died (memory, recursion in C)

Only the first can be correct. Which answers run into a deadline depends on the machine, so a run with timeouts is the
one part of a resumed run that need not repeat bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError
from dapo_runner.types import Verdict

WINDOW = 2000  # characters at the end of a response that are looked at
START_LIMIT = 120.0  # seconds for a worker to import what it needs
_SCRIPT = Path(__file__).with_name("math_worker.py")
# Run by path from a command, not as a script: a script's folder comes first on sys.path, and ours has a numbers.py.
_COMMAND = (sys.executable, "-c", f"import runpy; runpy.run_path({str(_SCRIPT)!r}, run_name='__main__')")


@cache
def math_judge(workers: int, deadline: float) -> MathJudge:
    """One judge for every scorer of the process. Raises ConfigError without math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("reward.kind: 'math' needs the package math-verify; pip install 'dapo-kernels[math]'")
    return MathJudge(workers, deadline)


class MathJudge:
    """Judges the responses to one problem, ``workers`` at a time, each within ``deadline`` seconds."""

    def __init__(self, workers: int, deadline: float) -> None:
        self.deadline = deadline
        self._workers = [_Worker() for _ in range(workers)]
        self._lock = threading.Lock()  # two callers would read each other's verdicts
        weakref.finalize(self, _stop_all, self._workers)

    def __call__(self, texts: Sequence[str], answer: str) -> list[Verdict]:
        """A verdict for each text, in order. Raises RuntimeError when workers cannot be started."""
        with self._lock:
            try:
                return self._judge([text[-WINDOW:] for text in texts], answer)
            except BaseException:
                _stop_all(self._workers)  # their verdicts would be taken for those on the next texts
                raise

    def _judge(self, texts: Sequence[str], answer: str) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        waiting, jobs = deque(range(len(texts))), dict[_Worker, _Job]()
        with selectors.DefaultSelector() as selector:
            while len(verdicts) < len(texts):
                for worker in self._workers:
                    if worker not in jobs:
                        worker.bury()
                    starting = sum(job.index is None for job in jobs.values())
                    if worker in jobs or len(waiting) <= (0 if worker.ready else starting):
                        continue
                    if worker.ready:
                        index = waiting.popleft()
                        worker.ask({"text": texts[index], "answer": answer, "deadline": self.deadline})
                        jobs[worker] = _Job(index, time.monotonic() + self.deadline)
                    else:
                        worker.start()
                        jobs[worker] = _Job(None, time.monotonic() + START_LIMIT)
                    selector.register(worker.output, selectors.EVENT_READ, worker)
                first = min(job.until for job in jobs.values())
                answered = {key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))}
                now = time.monotonic()
                for worker in [worker for worker, job in jobs.items() if worker in answered or job.until <= now]:
                    selector.unregister(worker.output)
                    job = jobs.pop(worker)
                    if job.index is None:
                        worker.finish_start(job.until)
                    else:
                        verdicts[job.index] = worker.verdict() if worker in answered else worker.kill("timeout")
        return [verdicts[index] for index in range(len(texts))]


@dataclass(frozen=True, slots=True)
class _Job:
    index: int | None  # of a text; None: the worker is starting
    until: float  # time.monotonic()


class _Worker:
    """A worker process, replaced whenever it was killed or died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False

    @property
    def output(self) -> Any:
        assert self.process is not None
        return self.process.stdout

    def bury(self) -> None:
        """Forget the process if it died while it had nothing to do, which says nothing about the text it gets next."""
        if self.process is not None and self.process.poll() is not None:
            _stop_all([self])

    def start(self) -> None:
        """Begin to start, if that has not been done; ``finish_start`` when its output is ready."""
        if self.process is None:
            self.process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )

    def finish_start(self, until: float) -> None:
        if self._read_line(until) is None:
            _stop_all([self])
            raise RuntimeError(
                f"reward math: a worker did not start within {START_LIMIT:.0f} s; to see why, run "
                f"{sys.executable} -c 'import math_verify'"
            )
        self.ready = True

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:
                line = line[self.process.stdin.write(line) :]
        except BrokenPipeError:
            return  # it has died; its verdict will say so

    def verdict(self) -> Verdict:
        """To be called when its output is ready."""
        line = self._read_line(time.monotonic() + START_LIMIT)
        return self.kill("crash") if line is None else Verdict(**json.loads(line))

    def kill(self, rule: str) -> Verdict:
        """End the process; the verdict on what it was at."""
        _stop_all([self])
        return Verdict(correct=False, extracted=None, rule=rule)

    def _read_line(self, until: float) -> bytes | None:
        """A whole line of its output; None when it has ended or ``until`` has passed."""
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
                part = os.read(self.output.fileno(), 65536)
                if not part:
                    return None
                line += part
        return line


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.process is not None:
            worker.process.kill()
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                assert pipe is not None
                pipe.close()
            worker.process, worker.ready = None, False
