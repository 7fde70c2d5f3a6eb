"""Calls that others answer while this thread goes on: each in a thread of its own, with a deadline."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from dapo_runner.rewards.reward import in_thread


class LateError(Exception):
    """A call did not return in time. Its thread is left behind: ``call`` is what it may still return."""

    def __init__(self, message: str, call: Future[Any]) -> None:
        super().__init__(message)
        self.call = call


class _Running(NamedTuple):
    key: int
    deadline: float


class Calls:
    """At most ``concurrency`` calls at a time."""

    def __init__(self, concurrency: int, timeout: float) -> None:
        """``timeout``: seconds for each call, from its own start."""
        self.concurrency, self.timeout = concurrency, timeout
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[Future[Any], _Running] = {}
        self._ended: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._running

    def add(self, key: int, function: Callable[[], Any]) -> None:
        self._waiting.append((key, function))
        self._start()

    def wake(self) -> None:
        """Let ``take`` return, from another thread."""
        self._ended.put(None)

    def take(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return keys and results of the calls that have ended since: what they returned or raised, or a LateError.

        With ``wait`` return once there is one, or ``wake`` was called.
        """
        found: list[tuple[int, Any]] = []
        until = min((call.deadline for call in self._running.values()), default=None)
        timeout = None if until is None else max(0.0, until - time.monotonic())
        try:
            ended = self._ended.get(wait, timeout)
            while True:
                if ended in self._running:  # else it is late, or none
                    key = self._running.pop(ended).key
                    error = ended.exception()
                    found.append((key, ended.result() if error is None else error))
                ended = self._ended.get(block=False)
        except queue.Empty:
            pass
        now = time.monotonic()
        for future in [future for future, call in self._running.items() if call.deadline <= now]:
            late = LateError(f"no answer within {self.timeout:g} s (env.timeout_seconds)", future)
            found.append((self._running.pop(future).key, late))
        self._start()
        return found

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.concurrency:
            key, function = self._waiting.popleft()
            future = in_thread(function)
            self._running[future] = _Running(key, time.monotonic() + self.timeout)
            future.add_done_callback(self._ended.put)
