"""Calls of rewards, which may fail or hang: with deadlines and retries, in threads."""

from __future__ import annotations

import reprlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from dapo_runner import http
from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.errors import RunError, describe_error
from dapo_runner.threads import in_thread, map_in_threads
from dapo_runner.types import Completion, Prompt, Verdict

ASYNC_CALLS = 64  # default of reward.calls.concurrency for calls that mostly wait
PAUSE = 0.5  # seconds before the first retry
_SHORT = reprlib.Repr()
_SHORT.maxstring = 400  # characters of a prompt or a response in an error message


class RewardError(RunError):
    """A reward failed. The message has the cause, the line in the user's code, the prompt and the response."""


def first_error(found: Iterable[object]) -> RewardError | None:
    return next((error for error in found if isinstance(error, RewardError)), None)


Verdicts = list[list[Verdict | None] | RewardError]
"""For each prompt a verdict on each response (None if the reward does not apply), or the error that prevented it."""


@dataclass(frozen=True)
class Call:
    """A call for ``n`` responses to prompt ``index`` of the batch. ``completion`` is the first of them."""

    index: int
    prompt: Prompt
    completion: Completion
    function: Callable[[], Any]
    n: int = 1


class CallingReward:
    """Judge with calls that may fail. ``concurrency``: calls at the same time; 1 calls in the caller's thread."""

    def __init__(self, name: str, config: RewardConfig, concurrency: int) -> None:
        self.name, self.config, self.concurrency = name, config, config.calls.concurrency or concurrency
        self.counts = Counter({"calls": 0, "retried": 0, "failed": 0})

    def run_calls(self, calls: Sequence[Call], allowed: int) -> list[Any]:
        """Return the result of each call, or its error after all retries.

        Raises RewardError if calls for more than ``allowed`` prompts fail, and a call's ConfigError immediately.
        """
        failed: set[int] = set()
        key = f"reward.calls.max_failed={self.config.calls.max_failed:g}: " if allowed else ""

        def run(call: Call) -> tuple[Any | RewardError, int]:
            found, retries = self._run_with_retries(call)
            if isinstance(found, RewardError):
                failed.add(call.index)
                if len(failed) > allowed:
                    raise RewardError(f"{key}{found}") from found.__cause__
            return found, retries

        found = map_in_threads(run, calls, self.concurrency)
        n_failed = sum(isinstance(result, RewardError) for result, _ in found)
        self.counts.update(calls=len(calls), retried=sum(retries for _, retries in found), failed=n_failed)
        return [result for result, _ in found]

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter(dict.fromkeys(self.counts, 0))
        return dict(counts)

    def _run_with_retries(self, call: Call, attempt: int = 0) -> tuple[Any | RewardError, int]:
        try:
            return call.function(), attempt
        except ConfigError:
            raise
        except (Exception, SystemExit, CallTimeoutError) as error:
            if attempt == self.config.calls.retries:
                return reward_error(self.name, error, call.prompt, call.completion, call.n), attempt
            pause(attempt, error, self.config.call_timeout)
        return self._run_with_retries(call, attempt + 1)


def pause(attempt: int, error: BaseException, longest: float) -> None:
    """Wait before a retry: for PAUSE × 2^attempt seconds, or for those that the server asks for, up to ``longest``."""
    asked = error.retry_after if isinstance(error, http.HTTPError) else 0.0
    time.sleep(max(PAUSE * 2**attempt, min(asked, longest)))


def reward_error(name: str, error: BaseException, prompt: Prompt, completion: Completion, n: int = 1) -> RewardError:
    response = f"{'response' if n == 1 else f'the first of {n} responses'}: {_SHORT.repr(completion.text)}"
    where = f"prompt {prompt.id}: {_SHORT.repr(prompt.text)}, {response}"
    found = RewardError(f"reward {name}: {describe_error(error)}; {where}")
    found.__cause__ = error
    return found


class CallTimeoutError(BaseException):
    """A call took too long. It is not an Exception, so that the called function does not catch it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s (reward.timeout)")


def call_with_timeout(seconds: float, function: Callable[[], Any], is_async: bool = False) -> Any:
    """Call ``function``. Raises CallTimeoutError if it takes longer.

    In the main thread an alarm signal interrupts Python code and blocking calls. Other threads get no signals: there a
    late function is left running. Coroutines run in one event loop, which lives as long as the process, because
    connections that a function keeps open belong to it.
    """
    if is_async:
        future = http.start(function(), "rewards")
    elif threading.current_thread() is threading.main_thread():
        return _call_with_alarm(seconds, function)
    else:
        future = in_thread(function)
    if not wait([future], seconds).done:
        future.cancel()
        if is_async:
            http.replace_if_blocked("rewards")
        raise CallTimeoutError(seconds)
    return future.result()


def _call_with_alarm(seconds: float, function: Callable[[], Any]) -> Any:
    def strike(*_: object) -> None:
        raise CallTimeoutError(seconds)

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, strike)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # repeated every second, if the code catches it
            result = function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # the alarm may go off in the line before
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    if time.monotonic() - start > seconds:
        raise CallTimeoutError(seconds)
    return result
