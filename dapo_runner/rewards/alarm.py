"""A deadline for a call. In the main thread by an alarm signal: it ends Python code and calls that wait, not C code
that never looks at signals. In another, where no signal comes, the call has a thread of its own.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


class LateError(Exception):
    """The deadline struck; its traceback ends where the call was."""


class _Alarm(BaseException):
    """Not an Exception, which the function may catch."""


def call_within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """What ``call`` returns. Raises LateError when it takes longer, whatever it makes of being interrupted: one that
    forgives the first alarm, or waits for a thread on its way out, meets another every second.
    """
    if seconds is None:
        return call()
    if threading.current_thread() is not threading.main_thread():
        answer = in_thread(call)
        if not wait([answer], seconds).done:
            raise LateError
        return answer.result()
    armed, struck = True, False

    def strike(*_: object) -> None:
        nonlocal struck
        struck = True
        if armed:
            raise _Alarm

    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)  # first: the caller's alarm must not meet our handler
    handler_before = signal.signal(signal.SIGALRM, strike)
    trace = None
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        return_value = call()
    except BaseException as error:
        armed = False
        if not struck:
            raise
        trace = error.__traceback__
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before or signal.SIG_DFL)
        if left:  # the caller's own alarm, which has waited meanwhile
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)
    if struck:
        raise LateError().with_traceback(trace)
    return return_value


def in_thread(answer: Callable[[], Any]) -> Future[Any]:
    """In a thread that does not keep the process alive: one that hangs cannot be ended."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(answer())
        except SystemExit as error:
            future.set_exception(RuntimeError(f"SystemExit: {error}"))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
