"""Ctrl-C: the step under way is finished and saved. A second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what a job scheduler sends before it kills


class StopRequest:
    """Within it, ``requested`` turns True at the first signal; the next one raises KeyboardInterrupt.

    Outside the main thread, where Python takes no signals, it stays False.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.report("stopping after this step, which will be saved; once more stops at once")
