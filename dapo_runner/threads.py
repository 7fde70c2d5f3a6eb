"""Call functions in daemon threads, which do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call ``function`` in a thread of its own. Nothing can interrupt it."""
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
    """Return the results in order. Start no call after a failure. With one thread, call in the caller's thread."""
    if n_threads == 1:
        return [function(item) for item in items]
    free, futures, running = threading.Semaphore(n_threads), list[Future[U]](), list[Future[U]]()
    for item in items:
        free.acquire()
        running = [future for future in running if not future.done() or future.exception()]
        if any(future.done() and future.exception() for future in running):
            break
        futures.append(in_thread(partial(function, item)))
        running.append(futures[-1])
        futures[-1].add_done_callback(lambda _: free.release())
    return [future.result() for future in futures]
