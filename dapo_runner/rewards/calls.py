"""Calls that may fail, of the user's functions and of a judge's API: side by side, retried, and counted."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.rewards.deadline import DeadlineError, map_in_threads
from dapo_runner.rewards.reward import RewardError, reward_error
from dapo_runner.types import Completion, Prompt

ASYNC_CALLS = 64  # calls at a time where they wait for something else and reward.calls.concurrency is not set
PAUSE = 0.5  # seconds before the first retry; doubled before each further one

T = TypeVar("T")
C = TypeVar("C", bound="Call")


@dataclass(frozen=True)
class Call:
    """Responses to the prompt with that index in the batch."""

    index: int
    prompt: Prompt
    completions: Sequence[Completion]

    def split(self) -> list[Call]:
        """Return a call for each completion."""
        return [replace(self, completions=[completion]) for completion in self.completions]

    def pair(self) -> tuple[Prompt, Completion]:
        """Return the prompt and the first completion."""
        return self.prompt, self.completions[0]

    def arguments(self) -> tuple[list[Prompt], list[Completion], list[dict[str, Any]]]:
        """Return prompts, completions and rows, an entry for each completion."""
        n = len(self.completions)
        return [self.prompt] * n, list(self.completions), [dict(self.prompt.row) for _ in range(n)]


class Calls:
    """Makes the calls of one reward. ``concurrency``: calls at a time; 1 makes them in the caller's thread."""

    def __init__(self, name: str, config: RewardConfig, concurrency: int) -> None:
        self.name, self.config, self.concurrency = name, config.calls, concurrency
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, function: Callable[[C], T], calls: Sequence[C]) -> list[T | RewardError]:
        """Return the result of each call, or its error after all retries.

        Raises:
            RewardError: Calls of more prompts failed than `reward.calls.max_failed` allows.
            ConfigError: A call raised it. It is not tried again.
        """
        allowed = math.ceil(self.config.max_failed * len({call.index for call in calls}))
        failed: set[int] = set()

        def run_one(call: C) -> T | RewardError:
            found = self._run_with_retries(function, call)
            if isinstance(found, RewardError):
                failed.add(call.index)
                if len(failed) > allowed:
                    raise found
            return found

        self._counts["calls"] += len(calls)
        return map_in_threads(run_one, calls, self.concurrency)

    def take_counts(self) -> dict[str, int]:
        """Return the number of calls, retries and failures since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in ("calls", "retried", "failed")}

    def _run_with_retries(self, function: Callable[[C], T], call: C) -> T | RewardError:
        for attempt in range(self.config.retries + 1):
            if attempt:
                self._count("retried")
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                return function(call)
            except ConfigError:
                raise
            except (Exception, SystemExit, DeadlineError) as error:
                failure = error
        self._count("failed")
        return reward_error(self.name, failure, *call.pair())

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1
