"""Calls with a deadline, and several of them side by side in threads."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class DeadlineError(BaseException):
    """A call took too long. No Exception, so that the function that is called does not catch it."""


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Call ``function``. Raises DeadlineError when it takes longer.

    In the main thread an alarm signal ends Python code and calls that wait; it comes again every second. In another
    thread, where no signal comes, a function that is late is left behind.
    """
    if seconds is None:
        return function()
    if threading.current_thread() is threading.main_thread():
        return _call_with_alarm(seconds, function)
    return result_within(seconds, in_thread(function))


def result_within(seconds: float | None, future: Future[T]) -> T:
    """Return the result of a future. Raises DeadlineError when it takes longer."""
    if not wait([future], seconds).done:
        future.cancel()
        raise DeadlineError(f"no answer within {seconds:g} s (reward.plugin_deadline)")
    return future.result()


def _call_with_alarm(seconds: float, function: Callable[[], T]) -> T:
    late = DeadlineError(f"no answer within {seconds:g} s (reward.plugin_deadline)")
    struck = ended = False

    def strike(*_: object) -> None:
        nonlocal struck
        struck = True
        if not ended:
            raise late

    handler = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        result = function()
    except BaseException:
        ended = True
        if struck:  # whatever the function made of the alarm, whose traceback shows where the call was
            raise late from None
        raise
    finally:
        ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    if struck:  # the function caught the alarm
        raise late
    return result


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call ``function`` in a thread that does not keep the process alive, because nothing can end it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def map_in_threads(function: Callable[[T], U], items: Iterable[T], n_threads: int) -> list[U]:
    """Return the results in order. Starts nothing more after a failure. One thread: calls in the caller's."""
    if n_threads == 1:
        return [function(item) for item in items]
    free = threading.Semaphore(n_threads)
    futures: list[Future[U]] = []
    for item in items:
        free.acquire()
        if any(future.done() and future.exception() for future in futures):
            break
        futures.append(in_thread(partial(function, item)))
        futures[-1].add_done_callback(lambda _: free.release())
    return [future.result() for future in futures]


def run_async(coroutine: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Run a coroutine in the event loop of this process. Raises DeadlineError, RuntimeError where the loop is blocked.

    The loop lives as long as the process: connections that a function keeps belong to it.
    """
    loop = _event_loop()
    try:
        return result_within(seconds, asyncio.run_coroutine_threadsafe(_without_exit(coroutine), loop))
    except DeadlineError:
        if wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)], 1.0).done:
            raise
        _event_loop.cache_clear()
        raise RuntimeError("an async function blocks the event loop. Await what it waits for.") from None


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="rewards").start()
    return loop


async def _without_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except SystemExit as error:  # would end the event loop
        raise RuntimeError(f"SystemExit: {error}") from error
