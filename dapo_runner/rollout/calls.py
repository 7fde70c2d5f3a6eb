"""Calls that others answer while this thread goes on: each in a thread of its own, with a deadline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

from dapo_runner.rewards.reward import in_thread


class LateError(Exception):
    """A call did not return in time. Its thread is left behind."""


class Calls:
    """At most ``concurrency`` calls at a time, with ``timeout`` seconds for each from its own start."""

    def __init__(self, concurrency: int, timeout: float) -> None:
        self.concurrency, self.timeout = concurrency, timeout
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[Future[Any], tuple[int, float]] = {}  # key and deadline
        self._woken: Future[None] = Future()

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._running

    def add(self, key: int, function: Callable[[], Any]) -> None:
        self._waiting.append((key, function))
        self._start()

    def wake(self) -> None:
        """Let ``take`` return, from another thread."""
        with suppress(InvalidStateError):  # it was woken already
            self._woken.set_result(None)

    def take(self, *, block: bool) -> list[tuple[int, Any]]:
        """Return keys and results of the calls that have ended since: what they returned or raised, or a LateError.

        With ``block`` return once there is one, or ``wake`` was called.
        """
        until = min((deadline for _, deadline in self._running.values()), default=None)
        timeout = None if until is None else max(0.0, until - time.monotonic())
        wait([self._woken, *self._running], timeout if block else 0, FIRST_COMPLETED)
        if self._woken.done():
            self._woken = Future()
        found: list[tuple[int, Any]] = []
        for future, (key, deadline) in list(self._running.items()):
            if future.done():
                found.append((key, future.exception() or future.result()))
            elif deadline <= time.monotonic():
                found.append((key, LateError(f"no answer within {self.timeout:g} s (env.timeout_seconds)")))
            else:
                continue
            del self._running[future]
        self._start()
        return found

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.concurrency:
            key, function = self._waiting.popleft()
            self._running[in_thread(function)] = key, time.monotonic() + self.timeout
