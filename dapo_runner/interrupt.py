"""Handle Ctrl-C and SIGTERM: finish and save the current step, or abandon it and save the one before if it would not
finish before the kill. A second signal stops at once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ONE_STOP = 10.0  # seconds in which a second SIGTERM is ignored: systemd sends one to torchrun and one to each rank
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what a job scheduler sends before it kills


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux only). The signal is SIGKILL, because SIGTERM would
    arrive once per thread of the parent and look like a repeated Ctrl-C.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG in prctl.h


class StepAbandonedError(BaseException):
    """The step was abandoned, to end before a kill. It is not an Exception, so that no reward function catches it."""

    def __str__(self) -> str:
        return "it would not end before the process is killed"


class StopRequest:
    """A context manager: ``requested`` becomes True at the first signal, the next one raises KeyboardInterrupt.

    Outside the main thread Python handles no signals, and ``requested`` stays False.
    """

    def __init__(self, note: Callable[[str], None] = lambda text: None, grace: float = float("inf")) -> None:
        """Expect a kill ``grace`` seconds after SIGTERM."""
        self.note = note
        self.grace = grace
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}
        self._step_ends = self._killed = float("inf")
        self._terminated = -float("inf")  # time of the last SIGTERM
        self._may_abandon = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            os.register_at_fork(after_in_child=self._enter_child)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _enter_child(self) -> None:
        """Let SIGTERM end a process that a reward has forked, for its ``terminate()``. Ctrl-C reaches it with the run,
        whose step still needs it.
        """
        if self._before:
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
            self.note = lambda text: None

    def expect_step(self, seconds: float) -> None:
        """Set the expected duration of the step that begins now."""
        self._step_ends = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        """Whether the current step would end only after the kill."""
        return self.requested and self._step_ends > self._killed

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Raise StepAbandonedError inside this context if the step would end too late. No weight has changed yet."""
        self._may_abandon = True
        try:
            self._abandon_if_late()
            yield
            self._abandon_if_late()  # a bare `except:` of a reward may have caught the first one
        finally:
            self._may_abandon = False

    def _abandon_if_late(self) -> None:
        if self._may_abandon and self.is_late:
            raise StepAbandonedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM and now < self._terminated + ONE_STOP:
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if number == signal.SIGTERM:
            self._terminated, self._killed = now, now + self.grace
        self._abandon_if_late()
        with suppress(RuntimeError, SystemExit):  # it came during a write to this output, or ended its reader
            self.note("stopping after this step, which will be saved. Press Ctrl-C again to stop at once.")
