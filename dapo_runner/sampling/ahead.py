"""Steps that are sampled before they are asked for, while an earlier one trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from dapo_runner.sampling.sampler import DynamicSampler, GenerateGroups, SampledStep, SamplingStats, group_state
from dapo_runner.types import Group, Prompt

ENDS_WITHIN = 60.0  # seconds that a run which is over waits for what its thread is at


class SamplingStalledError(RuntimeError):
    """A step waits for groups, and no round of them has ended in time."""


class AheadSampler:
    """Takes the place of a ``DynamicSampler``, which it has in a thread of its own, at most ``lead`` steps ahead of the
    one that trains: prompts are asked, and groups accepted, in the same order.

    A group's ``step`` is the one whose policy gave its first token, so that its age is at most ``lead`` when it trains,
    unless it was left over by a step before.
    """

    def __init__(self, sampler: DynamicSampler, lead: int, last: int, within: float) -> None:
        """``last``: the step after which there are no more. ``within``: seconds that a round of prompts may take where
        a step waits for it.
        """
        self.sampler = sampler
        self.lead = lead
        self.last = last
        self.within = within
        self.step = sampler.steps  # the one that trains, or has trained last
        self.in_flight = 0  # prompts of the round under way
        self._sampled: deque[SampledStep] = deque()
        self._rest = sampler.state_dict()  # of the sampler, after what it has last finished
        self._error: BaseException | None = None
        self._sign = 0.0  # when a round last began or ended
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._on_round, sampler.on_round = sampler.on_round, self._after_round

    def figures(self) -> dict[str, float]:
        """Steps that are sampled and wait, and prompts that are being answered."""
        return {"steps": len(self._sampled), "in_flight": self.in_flight}

    def next(self, generate_groups: GenerateGroups) -> SampledStep:
        """As ``DynamicSampler.next``. Raises what has stopped the sampling, once the steps before that are taken, and
        SamplingStalledError where none comes. ``generate_groups``, that of the first call, is called in the thread.
        """
        with self._changed:
            self.step += 1
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
                        f"one are in flight, and no round has ended for {self.within:g} s (rollout.server.round_within)"
                    )
                self._changed.wait(left)
            return self._sampled.popleft()

    def close(self) -> None:
        """End the thread, once what it is at has returned or failed; what does neither is left to the process's end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(ENDS_WITHIN)

    def state_dict(self) -> dict[str, Any]:
        """For a ``DynamicSampler``, which then begins with what is sampled and has not trained. Prompts in flight are
        counted, and asked again.
        """
        with self._changed:
            waiting = [group_state(group) for sampled in self._sampled for group in sampled.groups]
            accepted = {"buffer": [*waiting, *self._rest["buffer"]], "steps": self.step}
            return self._rest | accepted | {"in_flight": self.in_flight}

    def load_state_dict(self, state: Any) -> None:
        """Before the first step."""
        self.sampler.load_state_dict(state)
        self.step, self._rest = self.sampler.steps, self.sampler.state_dict()

    def _sample(self, generate_groups: GenerateGroups) -> None:
        def generate(prompts: list[Prompt], round_number: int) -> list[Group]:
            self.in_flight, self._sign = len(prompts), time.monotonic()
            return generate_groups(prompts, round_number)

        try:
            while self.sampler.steps < self.last:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self.sampler.steps < self.step + self.lead)
                    if self._closed:
                        return
                sampled = self.sampler.next(generate)
                with self._changed:
                    self._sampled.append(sampled)
                    self._rest = self.sampler.state_dict()
                    self._changed.notify_all()
        except BaseException as error:  # raised again by `next`, which would wait for a thread that is gone
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _after_round(self, n_groups: int, stats: SamplingStats) -> None:
        with self._changed:
            self._rest = self.sampler.state_dict()
            self.in_flight, self._sign = 0, time.monotonic()
        if self._on_round is not None:
            self._on_round(n_groups, stats)
