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
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from queue import LifoQueue

from dapo_runner.config import ConfigError
from dapo_runner.types import Verdict

WINDOW = 2000  # characters at the end of a response that are looked at
START_LIMIT = 120.0  # seconds for a worker to import what it needs
_SCRIPT = Path(__file__).with_name("rule_worker.py")
# Run by path from a command, not as a script: a script's folder comes first on sys.path, and ours has a numbers.py.
_COMMAND = (sys.executable, "-c", f"import runpy; runpy.run_path({str(_SCRIPT)!r}, run_name='__main__')")


@cache
def math_judge(workers: int, deadline: float) -> MathJudge:
    """One judge for every scorer of the process. Raises ConfigError without math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("reward.kind: 'math' needs the package math-verify; pip install 'dapo-kernels[math]'")
    return MathJudge(workers, deadline)


class WorkerPool:
    """Judges by a rule of ``rule_worker``, ``workers`` requests at a time, each within ``deadline`` seconds."""

    rule: str

    def __init__(self, workers: int, deadline: float) -> None:
        self.deadline = deadline
        self._workers = [_Worker(self.rule) for _ in range(workers)]
        self._free: LifoQueue[_Worker] = LifoQueue()  # the one used last goes first: no more start than are needed
        for worker in self._workers:
            self._free.put(worker)
        self._lock = threading.Lock()  # a call that is broken off kills all workers, which must all be its own
        weakref.finalize(self, _stop_all, self._workers)

    def _ask(self, requests: Sequence[dict[str, str]]) -> list[Verdict]:
        with self._lock, ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                return list(threads.map(self._judge, requests))
            except BaseException:  # a second Ctrl-C: nobody waits for what is under way
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in self._workers:
                    worker.kill()
                raise

    def _judge(self, request: dict[str, str]) -> Verdict:
        worker = self._free.get()
        try:
            return worker.judge(request, self.deadline)
        finally:
            self._free.put(worker)


class MathJudge(WorkerPool):
    """Judges the responses to one problem."""

    rule = "math"

    def __call__(self, texts: Sequence[str], answer: str) -> list[Verdict]:
        """A verdict for each text, in order. Raises RuntimeError when workers cannot be started."""
        return self._ask([{"text": text[-WINDOW:], "answer": answer} for text in texts])

    def same(self, text: str, others: Sequence[str]) -> list[bool | None]:
        """Whether each of the ``others`` gives the answer of ``text``; None where the deadline struck, or comparing
        failed. Raises RuntimeError when workers cannot be started.
        """
        verdicts = self._ask([{"text": other[-WINDOW:], "other": text[-WINDOW:]} for other in others])
        return [verdict.correct if verdict.rule == "math-verify" else None for verdict in verdicts]


class _Worker:
    """A worker process: started when there is a text for it, and anew after it was killed or died."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.process: subprocess.Popen[bytes] | None = None

    def judge(self, request: dict[str, str], deadline: float) -> Verdict:
        """Raises ConfigError where the worker refuses what the response is held against."""
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # it died while it had nothing to do, which says nothing about this text
        if self.process is None:
            self.start()
        rule = "crash"
        try:
            self.ask({**request, "deadline": deadline})
            if self.pipe.poll(deadline):
                found = json.loads(self.pipe.recv_bytes())
                if "refused" in found:
                    raise ConfigError(f"reward {self.rule}: {found['refused']}")
                return Verdict(**found)
            rule = "timeout"
        except (EOFError, OSError):
            pass
        self.stop()
        return Verdict(correct=False, extracted=None, rule=rule)

    def ask(self, request: dict[str, str | float]) -> None:
        self.pipe.send_bytes(json.dumps(request).encode())

    def start(self) -> None:
        """Returns when it is ready. Raises RuntimeError when it is not within ``START_LIMIT``."""
        self.pipe, theirs = Pipe()
        descriptor, null = theirs.fileno(), subprocess.DEVNULL
        self.process = subprocess.Popen(
            (*_COMMAND, str(descriptor), self.rule), pass_fds=[descriptor], stdin=null, stdout=null, stderr=null
        )
        theirs.close()  # so that ours ends when the process does
        try:
            if self.pipe.poll(START_LIMIT):
                self.pipe.recv_bytes()
                return
        except (EOFError, OSError):
            pass
        self.stop()
        raise RuntimeError(
            f"reward {self.rule}: a worker did not start within {START_LIMIT:.0f} s; to see why, run "
            f"{sys.executable} -c 'import {'math_verify' if self.rule == 'math' else 'jsonschema'}'"
        )

    def kill(self) -> None:
        """From another thread than the one it works for, which then finds that it has died."""
        if (process := self.process) is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.pipe.close()


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
