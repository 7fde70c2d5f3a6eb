"""The prompts of one call, which several servers are asked from at a time."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from dapo_runner.rollout.client import RolloutError, Server, ServerError
from dapo_runner.types import Completion


class PromptQueue:
    """Requests of one call, and what came of them: each is waiting, with one server, or answered."""

    def __init__(
        self,
        bodies: list[dict[str, Any]],
        needed: int,
        servers: Sequence[Server],
        attempts: int,
        version: int,
        n_asking: int,
    ) -> None:
        """It is over once ``needed`` of them are answered. Each may fail ``attempts`` times on each of ``servers``.
        ``version``: the update whose weights are the oldest that may answer. ``n_asking``: ranks that have a part of
        the same call each.
        """
        self.bodies = bodies
        self.needed = needed
        self.version = version
        self.servers = servers
        self.attempts = attempts
        self.n_asking = n_asking
        self.answers: dict[int, list[Completion]] = {}
        self.error: Exception | None = None
        self.failures: list[str] = []  # the last of what prompts have failed on
        self._waiting = deque(range(len(bodies)))
        self._tries = Counter[tuple[Server, int]]()
        self._closed = False
        self._changed = threading.Condition()

    @property
    def n_left(self) -> int:
        return self.needed - len(self.answers)

    @property
    def over(self) -> bool:
        return self._closed or self.error is not None or self.n_left <= 0

    def is_served_by(self, servers: Sequence[Server]) -> bool:
        """Whether a request is under way, or one of ``servers`` may be asked one that waits."""
        with self._changed:
            n_under_way = len(self.bodies) - len(self.answers) - len(self._waiting)
            return n_under_way > 0 or any(self._may_ask(server, place) for place in self._waiting for server in servers)

    def take(self, server: Server, stopped: list[Exception]) -> int | None:
        """The next request for ``server``; waits where there is none, until one comes back. None once it is over or
        there is something in ``stopped``.
        """
        with self._changed:
            while not self.over and not stopped:
                place = next((place for place in self._waiting if self._may_ask(server, place)), None)
                if place is not None:
                    self._waiting.remove(place)
                    return place
                self._changed.wait()
            return None

    def _may_ask(self, server: Server, place: int) -> bool:
        return self._tries[server, place] < self.attempts

    def answer(self, place: int, completions: list[Completion]) -> None:
        with self._changed:
            if not self.over:
                self.answers[place] = completions
            if self.over:
                self._changed.notify_all()

    def give_back(self, place: int, server: Server, error: ServerError, stopped: list[Exception]) -> None:
        """What ``server`` has failed on. Failures that follow from an earlier one, in ``stopped``, do not count."""
        with self._changed:
            if not stopped:
                self._tries[server, place] += 1
                self.failures = [str(error)]
            if not any(self._may_ask(server, place) for server in self.servers):
                self.error = RolloutError(
                    f"rollout: a prompt was asked {self.attempts} times (rollout.server.attempts) of every server, at "
                    f"last {error}"
                )
            stopped.append(error)
            self._waiting.appendleft(place)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def rest(self, seconds: float, stopped: Sequence[Exception] = ()) -> bool:
        """Whether so long nothing has come to an end here, nor anything to ``stopped``."""
        with self._changed:
            return not self._changed.wait_for(lambda: self.over or bool(stopped), seconds)
