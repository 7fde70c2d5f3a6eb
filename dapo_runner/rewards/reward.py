"""What every reward implements, and calls that may fail or hang: with deadlines, retries, in threads."""

from __future__ import annotations

import asyncio
import math
import reprlib
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.errors import RunError
from dapo_runner.types import Completion, Prompt, Verdict

T = TypeVar("T")
U = TypeVar("U")
ASYNC_CALLS = 64  # calls at a time where they wait for something else and reward.calls.concurrency is not set
PAUSE = 0.5  # seconds before the first retry; doubled before each further one
_SHORT = reprlib.Repr()
_SHORT.maxstring = 400  # characters of a prompt or a response that an error shows, from both ends


class RewardError(RunError):
    """A reward failed. The message has the cause, the line of the user's code, the prompt and the response."""


def first_error(found: Iterable[object]) -> RewardError | None:
    return next((error for error in found if isinstance(error, RewardError)), None)


Verdicts = list[list[Verdict | None] | RewardError]
"""For each prompt, a verdict on each response (None where the reward does not apply), or why there are none."""


class Reward(ABC):
    """Judges completions."""

    @abstractmethod
    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        """Judge the completions of each prompt. Raises RewardError where more calls fail than are allowed."""

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        return {}


class TextReward(Reward):
    """Judges each response by its text and the ground truth. ``judge_texts`` takes a list of either."""

    def __init__(self, judge_texts: Callable[[Sequence[str], Sequence[str]], list[Verdict]]) -> None:
        self.judge_texts = judge_texts

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        texts = [completion.text for samples in completions for completion in samples]
        answers = [prompt.answer for prompt, samples in zip(prompts, completions, strict=True) for _ in samples]
        verdicts = iter(self.judge_texts(texts, answers))
        return [[next(verdicts) for _ in samples] for samples in completions]


@dataclass(frozen=True)
class Call:
    """A call about responses to the prompt with that index in the batch; ``completion`` is the first of them."""

    index: int
    prompt: Prompt
    completion: Completion
    function: Callable[[], Any]


class CallingReward(Reward):
    """Judges by calls that may fail. ``concurrency``: calls at a time; 1 makes them in the caller's thread."""

    def __init__(self, name: str, config: RewardConfig, concurrency: int) -> None:
        self.name, self.config, self.concurrency = name, config, config.calls.concurrency or concurrency
        self.counts = Counter({"calls": 0, "retried": 0, "failed": 0})

    def run_calls(self, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call, or its error after all retries.

        Raises RewardError where calls of more prompts fail than allowed, and a ConfigError of a call at once.
        """
        allowed = math.ceil(self.config.calls.max_failed * len({call.index for call in calls}))
        failed: set[int] = set()

        def run(call: Call) -> tuple[Any | RewardError, int]:
            found, retries = self._run_with_retries(call)
            if isinstance(found, RewardError):
                failed.add(call.index)
                if len(failed) > allowed:
                    raise found
            return found, retries

        found = map_in_threads(run, calls, self.concurrency)
        results = [result for result, _ in found]
        n_failed = sum(isinstance(result, RewardError) for result in results)
        self.counts.update(calls=len(calls), retried=sum(retries for _, retries in found), failed=n_failed)
        return results

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter(dict.fromkeys(self.counts, 0))
        return dict(counts)

    def _run_with_retries(self, call: Call) -> tuple[Any | RewardError, int]:
        for attempt in range(self.config.calls.retries + 1):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                return call.function(), attempt
            except ConfigError:
                raise
            except (Exception, SystemExit, DeadlineError) as error:
                failure = error
        return reward_error(self.name, failure, call.prompt, call.completion), attempt


def reward_error(name: str, error: BaseException, prompt: Prompt, completion: Completion) -> RewardError:
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    line = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    where = f"prompt {prompt.id}: {_SHORT.repr(prompt.text)}, response: {_SHORT.repr(completion.text)}"
    found = RewardError(f"reward {name}: {type(error).__name__}: {error}{line}; {where}")
    found.__cause__ = error
    return found


class DeadlineError(BaseException):
    """A call took too long. No Exception, so that the function that is called does not catch it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s (reward.plugin_deadline)")


def call_within(seconds: float | None, function: Callable[[], Any], is_async: bool = False) -> Any:
    """Call ``function``. Raises DeadlineError when it takes longer.

    In the main thread an alarm signal ends Python code and calls that wait. In another thread, where no signal comes,
    a function that is late is left behind. Coroutines run in one event loop, which lives as long as the process:
    connections that a function keeps belong to it.
    """
    if is_async:
        future = asyncio.run_coroutine_threadsafe(function(), _event_loop())
    elif seconds is None:
        return function()
    elif threading.current_thread() is threading.main_thread():
        return _call_with_alarm(seconds, function)
    else:
        future = in_thread(function)
    if not wait([future], seconds).done:
        future.cancel()
        if is_async and not wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _event_loop())], 1.0).done:
            _event_loop.cache_clear()  # a function blocks it: other calls get a loop of their own
        raise DeadlineError(seconds or 0.0)
    return future.result()


def _call_with_alarm(seconds: float, function: Callable[[], T]) -> T:
    def strike(*_: object) -> None:
        raise DeadlineError(seconds)

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, strike)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again every second, for code that catches it
            result = function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # the alarm may strike in the line before
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    if time.monotonic() - start > seconds:
        raise DeadlineError(seconds)
    return result


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit):  # of a function
                loop.run_forever()

    threading.Thread(target=run, daemon=True, name="rewards").start()
    return loop


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
