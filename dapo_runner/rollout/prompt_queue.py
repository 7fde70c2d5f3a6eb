"""The prompts of one call, which several servers are asked from at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dapo_runner.rollout.client import RolloutError, Server, ServerError
from dapo_runner.rollout.pool import Signal
from dapo_runner.types import Completion

ATTEMPTS = 5  # times that a prompt is asked of each server before the run ends


class PromptQueue:
    """Requests of one call, and what came of them: each is waiting, with one server, or answered.

    Attributes:
        n_needed: So many answers complete it.
        oldest: The update whose weights are the oldest that may answer.
        error: What ends the call otherwise.
        reason: What a prompt has failed on last.
    """

    def __init__(self, bodies: list[dict[str, Any]], n_needed: int, oldest: int, servers: Sequence[Server]) -> None:
        self.bodies = bodies
        self.n_needed = n_needed
        self.oldest = oldest
        self.servers = servers
        self.answers: dict[int, list[Completion]] = {}
        self.error: Exception | None = None
        self.reason = ""
        self.changed = Signal()
        self._waiting = list(range(len(bodies)))
        self._n_failures = Counter[tuple[Server, int]]()

    @property
    def n_left(self) -> int:
        return self.n_needed - len(self.answers)

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.n_left <= 0

    def is_served_by(self, servers: Sequence[Server]) -> bool:
        """Whether a request is under way, or one of ``servers`` may be asked one that waits."""
        n_under_way = len(self.bodies) - len(self.answers) - len(self._waiting)
        return n_under_way > 0 or any(self._next(server) is not None for server in servers)

    async def take(self, server: Server) -> int:
        """Return the next request for ``server``; wait for one where there is none."""
        await self.changed.wait_until(lambda: self._next(server) is not None)
        index = self._next(server)
        assert index is not None
        self._waiting.remove(index)
        return index

    def _next(self, server: Server) -> int | None:
        return next((index for index in self._waiting if self._n_failures[server, index] < ATTEMPTS), None)

    def answer(self, index: int, completions: list[Completion]) -> None:
        if not self.is_over:
            self.answers[index] = completions
        self.changed.set()

    def give_back(self, index: int) -> None:
        """Put back a request that was not answered."""
        self._waiting.insert(0, index)
        self.changed.set()

    def count_failure(self, index: int, server: Server, error: ServerError) -> None:
        self._n_failures[server, index] += 1
        self.reason = str(error)
        if all(self._n_failures[each, index] >= ATTEMPTS for each in self.servers):
            self.fail(RolloutError(f"rollout: a prompt was asked {ATTEMPTS} times of every server, at last {error}"))

    def fail(self, error: Exception) -> None:
        self.error = error
        self.changed.set()
