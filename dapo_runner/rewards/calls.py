"""Reward functions of a batch: calls of some prompts each, side by side, with a deadline, tried again where they fail.

A plain function is called in the main thread, one call after another, where it may use signals and random generators;
with `reward.calls.concurrency` above 1 in threads, which then must not matter to it. An `async` one runs in an event
loop that all calls of the process share. What is late is cancelled, but for a thread, which nothing can end: it is left
behind.

A call that still fails after its retries ends the run, or, within `reward.calls.max_failed`, costs its prompts their
place in the step.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.rewards.alarm import LateError, call_within, in_thread
from dapo_runner.rewards.plugin import RewardError, Verdicts, explain, is_async, read_verdict
from dapo_runner.types import Completion, Prompt, Verdict

ASYNC_CALLS = 64  # at a time, where the configuration does not say
PAUSE = 0.5  # seconds before the first retry; doubled before each other one


@dataclass(frozen=True, slots=True)
class Call:
    """Some prompts and their responses."""

    prompts: Sequence[Prompt]
    completions: Sequence[Sequence[Completion]]

    @property
    def pairs(self) -> list[tuple[Prompt, Completion]]:
        groups = zip(self.prompts, self.completions, strict=True)
        return [(prompt, completion) for prompt, samples in groups for completion in samples]


class BatchCalls:
    """A function of a batch as a reward, which raises RewardError. ``counts`` holds calls, retried and failed.

    ``deadline``: seconds for a call; None for a function that sees to its own.
    """

    def __init__(
        self, use: str, function: Callable[..., Any], config: RewardConfig, max_failed: float, deadline: float | None
    ) -> None:
        self.deadline = deadline
        self.use, self.function, self.config, self.max_failed = use, function, config, max_failed
        self.is_async = is_async(function)
        self.concurrency = config.calls.concurrency or (ASYNC_CALLS if self.is_async else 1)
        self.counts: Counter[str] = Counter()
        self.allowed = 0  # failures of the batch at hand
        self.lost: list[RewardError] = []  # those there were

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        size = self.config.calls.prompts
        starts = range(0, len(prompts), size)
        calls = [Call(prompts[start : start + size], completions[start : start + size]) for start in starts]
        self.counts["calls"] += len(calls)
        self.allowed, self.lost = math.ceil(self.max_failed * len(calls)), []
        if self.is_async or self.concurrency > 1:
            judged = _LOOP.run(self._all(calls), self.config.plugin_deadline)
            if judged is None:
                error = RuntimeError("it blocks the event loop: an async function has to await what it waits for")
                raise self._error(calls[0], error)
        else:
            judged = [self._judge_here(call) for call in calls]
        return [verdicts for call, each in zip(calls, judged, strict=True) for verdicts in self._by_prompt(call, each)]

    def _judge_here(self, call: Call) -> list[Verdict | None] | None:
        for attempt in range(self.config.calls.retries + 1):
            if attempt:
                self.counts["retried"] += 1
                time.sleep(_pause(attempt))
            try:
                answer = partial(self.function, *_arguments(call))
                return self._read(call, call_within(self.deadline, answer))
            except (Exception, SystemExit) as error:
                failure = error
        self._give_up(call, failure)
        return None

    async def _judge(self, call: Call, gate: asyncio.Semaphore) -> list[Verdict | None] | None:
        for attempt in range(self.config.calls.retries + 1):
            if attempt:
                self.counts["retried"] += 1
                await asyncio.sleep(_pause(attempt))
            try:
                async with gate:
                    return self._read(call, await self._answer(call))
            except ConfigError:  # a judge whose key, URL or model is wrong: asking again is of no use
                raise
            except Exception as error:
                failure = error
        self._give_up(call, failure)
        return None

    async def _all(self, calls: Sequence[Call]) -> list[list[Verdict | None] | None]:
        gate = asyncio.Semaphore(self.concurrency)
        tasks = [asyncio.ensure_future(self._judge(call, gate)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, call: Call) -> Any:
        """Raises LateError, and what the function raises."""
        answer = partial(self.function, *_arguments(call))
        future = asyncio.ensure_future(_awaited(answer)) if self.is_async else asyncio.wrap_future(in_thread(answer))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks a late one
        try:
            await asyncio.wait({future}, timeout=self.deadline)
            if not future.done():
                raise LateError
            return future.result()
        finally:
            future.cancel()

    def _read(self, call: Call, returned: Any) -> list[Verdict | None]:
        """Raises TypeError and ValueError."""
        expected = len(call.pairs)
        if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
            raise TypeError(f"expected a list of {expected} rewards, got {type(returned).__name__}")
        if len(returned) != expected:
            raise ValueError(f"expected {expected} rewards, one for each completion, got {len(returned)}")
        verdicts: list[Verdict | None] = []
        for place, item in enumerate(returned, start=1):
            try:
                verdicts.append(None if item is None else read_verdict(item, self.config))
            except (TypeError, ValueError) as error:
                raise type(error)(f"reward {place} of {expected}: {error}") from error
        return verdicts

    def _give_up(self, call: Call, error: BaseException) -> None:
        """Raises RewardError where there are more of them than are allowed."""
        self.counts["failed"] += 1
        self.lost.append(self._error(call, error))
        if len(self.lost) > self.allowed:
            raise self.lost[-1] from error

    def _error(self, call: Call, error: BaseException) -> RewardError:
        prompt, completion = call.pairs[0]
        return RewardError(explain(self.use, error, self.config, prompt, completion), prompt, completion)

    def _by_prompt(self, call: Call, verdicts: list[Verdict | None] | None) -> Verdicts:
        if verdicts is None:
            return [None] * len(call.prompts)
        rest = iter(verdicts)
        return [[next(rest) for _ in samples] for samples in call.completions]


def _pause(attempt: int) -> float:
    return PAUSE * 2 ** (attempt - 1)


def _arguments(call: Call) -> tuple[list[Prompt], list[Completion], list[dict[str, Any]]]:
    pairs = call.pairs
    return [prompt for prompt, _ in pairs], [completion for _, completion in pairs], [dict(p.row) for p, _ in pairs]


async def _awaited(answer: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        return await answer()
    except SystemExit as error:  # would end the event loop
        raise RuntimeError(f"SystemExit: {error}") from error


class EventLoop:
    """One for the life of the process, in a thread of its own: connections that a function keeps belong to it, and a
    caller that has a running loop (a notebook) is not in its way.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Any], patience: float | None) -> Any:
        """What ``work`` returns; None where something has blocked the loop for longer than ``patience``."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="rewards").start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([future], timeout=patience).done:
                if not wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)], timeout=patience).done:
                    self._loop = None  # left behind with what blocks it
                    return None
            return future.result()
        finally:
            future.cancel()


_LOOP = EventLoop()
