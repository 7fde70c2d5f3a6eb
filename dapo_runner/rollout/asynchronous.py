"""Steps that are sampled before they are asked for, while an earlier one trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dapo_runner.errors import RunError
from dapo_runner.rollout.group_buffer import DynamicSampler, GenerateGroups, SampledStep, SamplingStats, group_state
from dapo_runner.types import Group, Prompt

ENDS_WITHIN = 60.0  # seconds that a run which is over waits for what its threads are at


class SamplingStalledError(RunError):
    """A step waits for groups, and no round of them has ended in time."""


class AheadSampler:
    """Takes the place of a ``DynamicSampler``, which it has in a thread of its own, at most ``lead`` steps ahead of the
    one that trains: prompts are asked, and groups accepted, in the same order.

    With several rounds in flight the prompts of the steps after are asked beside the last responses of the one that is
    being filled. What they give waits for its turn: no group is accepted before all of the rounds before it.

    A group's ``step`` is the one whose policy gave its first token, so that its age is at most ``lead`` when it trains,
    unless it was left over by a step before.
    """

    def __init__(self, sampler: DynamicSampler, lead: int, last: int, within: float, in_flight: int = 1) -> None:
        """``last``: the step after which there are no more. ``within``: seconds that a round of prompts may take where
        a step waits for it. ``in_flight``: so many rounds at a time.
        """
        self.sampler = sampler
        self.lead = lead
        self.last = last
        self.within = within
        self.n_rounds = in_flight
        self.step = sampler.steps  # the one that trains, or has trained last
        self._sampled: deque[SampledStep] = deque()
        self._rounds: deque[_Round] = deque()  # asked and not accepted yet
        self._rest = sampler.state_dict()  # of the sampler, after what it has last finished
        self._error: BaseException | None = None
        self._sign = 0.0  # when a round last began or ended
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._on_round, sampler.on_round = sampler.on_round, self._after_round

    @property
    def in_flight(self) -> int:
        """Prompts that are asked and whose groups are not accepted yet."""
        with self._changed:
            return sum(len(asked.prompts) for asked in self._rounds)

    @property
    def longest_step(self) -> float:
        """Seconds after which ``next`` has returned or raised: each round of a step begins and ends in time."""
        return 2 * (self.sampler.config.max_rounds + self.n_rounds) * self.within

    def figures(self, groups: list[Group]) -> dict[str, float]:
        """Steps that are sampled and wait, prompts in flight, and of the responses in ``groups`` the share that weights
        of several updates gave.
        """
        across = [len({s.version for s in one.completion.versions}) > 1 for group in groups for one in group.samples]
        return {
            "ready_steps": len(self._sampled),
            "in_flight": self.in_flight,
            "mixed_versions": sum(across) / max(1, len(across)),
        }

    def next(self, generate_groups: GenerateGroups) -> SampledStep:
        """As ``DynamicSampler.next``. Raises what has stopped the sampling, once the steps before that are taken, and
        SamplingStalledError where none comes. ``generate_groups``, that of the first call, is called in other threads,
        by as many of them at a time as there are rounds in flight.
        """
        with self._changed:
            self.step += 1
            try:
                return self._next(generate_groups)
            except BaseException:
                self.step -= 1  # what is saved now goes on from the step before, with what was accepted since
                raise

    def put_back(self, sampled: SampledStep) -> None:
        """The step that was taken last, and is not trained."""
        with self._changed:
            self._sampled.appendleft(sampled)
            self.step -= 1

    def _next(self, generate_groups: GenerateGroups) -> SampledStep:
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample, args=[generate_groups], name="ahead", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        began = time.monotonic()
        while not self._sampled:
            if self._error is not None:
                raise self._error
            left = max(began, self._sign) + self.within - time.monotonic()
            if left <= 0:
                raise SamplingStalledError(
                    f"rollout: step {self.step} waits for its groups, {self.in_flight} prompts of it or of a later "
                    f"one are in flight, and none ended for {self.within:g} s (rollout.server.answer_within × 8)"
                )
            self._changed.wait(left)
        return self._sampled.popleft()

    def close(self) -> None:
        """End the threads, once what they are at has returned or failed; what does neither is left to the process's
        end.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(ENDS_WITHIN)
        for asked in list(self._rounds):
            asked.thread.join(ENDS_WITHIN)

    def state_dict(self) -> dict[str, Any]:
        """For a ``DynamicSampler``, which then begins with what is sampled and has not trained. Prompts in flight are
        counted, and asked again.
        """
        with self._changed:
            waiting = [group_state(group) for sampled in self._sampled for group in sampled.groups]
            generated = self._rest["generated"] + sum(sampled.generated for sampled in self._sampled)
            accepted = {"buffer": [*waiting, *self._rest["buffer"]], "generated": generated, "steps": self.step}
            return self._rest | accepted | {"in_flight": self.in_flight}

    def load_state_dict(self, state: Any) -> None:
        """Before the first step."""
        self.sampler.load_state_dict(state)
        self.step, self._rest = self.sampler.steps, self.sampler.state_dict()

    def _sample(self, generate_groups: GenerateGroups) -> None:
        def answered(missing: int) -> tuple[int, list[Group]]:
            with self._changed:
                while not (self._rounds and self._rounds[0].over):
                    self._ask(missing, generate_groups)
                    self._changed.wait()
                return len(self._rounds[0].prompts), self._rounds[0].result()

        try:
            while self.sampler.steps < self.last:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self.sampler.steps < self.step + self.lead)
                    if self._closed:
                        return
                sampled = self.sampler.fill(answered)
                with self._changed:
                    self._sampled.append(sampled)
                    self._rest = self._state()
                    self._changed.notify_all()
        except BaseException as error:  # raised again by `next`, which would wait for a thread that is gone
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _ask(self, missing: int, generate_groups: GenerateGroups) -> None:
        """Begin as many rounds as may be in flight: one for the groups that are missing, others for what steps after it
        lack that may be sampled already.
        """
        sampler, wanted = self.sampler, self.sampler.config.prompts_per_step
        while len(self._rounds) < self.n_rounds:
            n = len(self._rounds)
            further = min(self.step + self.lead, self.last) - sampler.steps if n else 0
            lacking = missing + further * wanted - sampler.expected(self.in_flight)
            if lacking <= 0:
                return
            place = sampler.cursor.place
            prompts = sampler.cursor.take(sampler.round_size(min(lacking, wanted)), sampler.steps + min(n, further))
            self._rounds.append(_Round(place, prompts, sampler.rounds_so_far + n, generate_groups, self._ended))
            self._sign = time.monotonic()

    def _ended(self) -> None:
        with self._changed:
            self._sign = time.monotonic()
            self._changed.notify_all()

    def _after_round(self, n_groups: int, stats: SamplingStats) -> None:
        with self._changed:
            self._rounds.popleft()
            self._rest = self._state() | {"generated": stats.generated}
        if self._on_round is not None:
            self._on_round(n_groups, stats)

    def _state(self) -> dict[str, Any]:
        """The sampler's, with the prompts in flight still to be asked."""
        state = self.sampler.state_dict()
        if self._rounds:
            state["cursor"] |= self._rounds[0].place
        return state


class _Round:
    """Prompts that are being answered, in a thread of its own."""

    def __init__(
        self,
        place: dict[str, int],
        prompts: list[Prompt],
        number: int,
        generate_groups: GenerateGroups,
        on_end: Callable[[], None],
    ) -> None:
        """``place``: of the first of them."""
        self.place = place
        self.prompts = prompts
        self._groups: list[Group] = []
        self._error: BaseException | None = None
        self.over = False

        def work() -> None:
            try:
                self._groups = generate_groups(prompts, number)
            except BaseException as error:  # raised again by `result`
                self._error = error
            self.over = True
            on_end()

        self.thread = threading.Thread(target=work, name="ahead", daemon=True)
        self.thread.start()

    def result(self) -> list[Group]:
        """Of a round that is over. Raises what has ended it."""
        if self._error is not None:
            raise self._error
        return self._groups
