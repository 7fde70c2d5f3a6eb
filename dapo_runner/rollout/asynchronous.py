"""Sample the groups of the next steps while an earlier step trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapo_runner.config import Config
from dapo_runner.errors import RunError
from dapo_runner.rollout.group_buffer import SampledStep, without_rows
from dapo_runner.rollout.sampler import DynamicSampler, GenerateRound
from dapo_runner.threads import in_thread
from dapo_runner.types import Group, Prompt

JOIN_TIMEOUT = 60.0  # seconds to wait for rounds at the end of a run


class SamplingStalledError(RunError):
    """A step waits for groups, and no round finished in time."""


@dataclass(eq=False)
class _Round:
    """A round of prompts in flight. ``position``: epoch and position of the cursor before it took them."""

    position: dict[str, int]
    prompts: list[Prompt]
    groups: Future[list[Group]]


class AsynchronousSampler:
    """Fill steps like a ``DynamicSampler``, at most ``max_staleness`` steps before they train.

    Each round of prompts has its own thread. With several rounds in flight, rounds of later steps run beside the last
    responses of the current step. A round is accepted only after all earlier rounds.
    """

    def __init__(self, sampler: DynamicSampler, config: Config) -> None:
        """Take a sampler whose state is loaded."""
        rollout = config.rollout
        self.sampler, self.buffer = sampler, sampler.buffer
        self.max_staleness, self.last_step = rollout.max_staleness, config.run.steps
        self.n_rounds = rollout.max_staleness + 1 if rollout.partial else 1  # most in flight
        self.round_timeout = 8 * rollout.request_timeout  # seconds for each while a step waits for it
        self.step = self.buffer.step  # the step that trains now, or trained last
        self._ready: deque[SampledStep] = deque()
        self._rounds: deque[_Round] = deque()  # submitted, not accepted yet
        self._is_filling = False
        self._error: BaseException | None = None
        self._last_change = 0.0  # time when a round last started or finished
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        """Number of submitted prompts whose groups are not accepted yet."""
        with self._changed:
            return sum(len(round_.prompts) for round_ in self._rounds)

    @property
    def step_timeout(self) -> float:
        """Maximum seconds until ``next`` returns or raises: the sum of the time limits of a step's rounds."""
        return 2 * (self.buffer.config.max_rounds + self.n_rounds) * self.round_timeout

    def metrics(self, groups: list[Group]) -> dict[str, float]:
        """Return metrics. ``across_updates``: share of responses in ``groups`` from several versions of the weights."""
        several = [len({s.version for s in one.completion.versions}) > 1 for group in groups for one in group.samples]
        return {
            "ready_steps": len(self._ready),
            "in_flight": self.in_flight,
            "across_updates": sum(several) / max(1, len(several)),
        }

    def next(self, generate: GenerateRound) -> SampledStep:
        """See ``DynamicSampler.next``. ``generate`` is called in threads. Raises the error of a failed round."""
        with self._changed:
            self.step += 1
            try:
                return self._wait_for_step(generate)
            except BaseException:
                self.step -= 1  # a checkpoint must resume with this step, and with the groups accepted meanwhile
                raise

    def return_step(self, sampled: SampledStep) -> None:
        """Undo the last ``next``: its step has not trained."""
        with self._changed:
            self._ready.appendleft(sampled)
            self.step -= 1

    def close(self) -> None:
        """Start no more rounds. Wait for those in flight, at most JOIN_TIMEOUT seconds."""
        with self._changed:
            self._is_closed = True
            rounds = [round_.groups for round_ in self._rounds]
        wait(rounds, JOIN_TIMEOUT)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a sampler that has the accepted groups not yet trained on, and resubmits the others."""
        with self._changed:
            state = self.sampler.state_dict()
            if self._rounds:
                state["cursor"] |= self._rounds[0].position
            return state | {
                "steps": self.step,
                "buffer": without_rows([group for step in self._ready for group in step.groups]) + state["buffer"],
                "generated": state["generated"] + sum(step.generated for step in self._ready),
                "in_flight": self.in_flight,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Call this before the first step."""
        self.sampler.load_state_dict(state)
        self.step = self.buffer.step

    def _wait_for_step(self, generate: GenerateRound) -> SampledStep:
        start = time.monotonic()
        self._advance(generate)
        while not self._ready:
            if self._error is not None:
                raise self._error
            left = max(start, self._last_change) + self.round_timeout - time.monotonic()
            if left <= 0:
                raise SamplingStalledError(
                    f"rollout.server.response_timeout: expected a round within {self.round_timeout:g} s, got none. "
                    f"Step {self.step} waits, {self.in_flight} prompts are in flight. Check the servers, or raise it."
                )
            self._changed.wait(left)
        return self._ready.popleft()

    def _advance(self, generate: GenerateRound) -> None:
        """Accept finished rounds in order, and submit new ones. The caller holds the lock."""
        try:
            while not self._is_closed and self._error is None and self._begin_step():
                if self.buffer.is_done:
                    self._is_filling = False
                    self._ready.append(self.buffer.take_step())
                elif self._rounds and self._rounds[0].groups.done():
                    groups = self._rounds[0].groups.result()
                    self._rounds.popleft()
                    self.sampler.add_round(groups)
                else:
                    self._submit_rounds(generate)
                    break
        except BaseException as error:  # raised again by `next`
            self._error = error
        self._changed.notify_all()

    @property
    def _furthest_step(self) -> int:
        return min(self.step + self.max_staleness, self.last_step)

    def _begin_step(self) -> bool:
        """Return whether there is a step to fill. Begin the next step if it may be sampled already."""
        if not self._is_filling and self.buffer.step < self._furthest_step:
            self._is_filling = True
            self.buffer.begin_step()
        return self._is_filling

    def _submit_rounds(self, generate: GenerateRound) -> None:
        """Submit one round for the missing groups, and more for later steps that may be sampled already."""
        sampler, buffer, wanted = self.sampler, self.buffer, self.buffer.config.prompts_per_step
        submitted = list[_Round]()
        while (n := len(self._rounds)) < self.n_rounds:
            further = self._furthest_step - buffer.step if n else 0
            missing = buffer.missing + further * wanted - buffer.expected(self.in_flight)
            if missing <= 0:
                break
            position = sampler.cursor.epoch_and_position
            prompts = sampler.cursor.take(buffer.round_size(min(missing, wanted)), buffer.step + min(n, further))
            submitted.append(_Round(position, prompts, Future()))
            self._rounds.append(submitted[-1])  # before its thread: a checkpoint must not lose the prompts
            submitted[-1].groups = in_thread(partial(generate, prompts, sampler.n_rounds + n))
            self._last_change = time.monotonic()
        for round_ in submitted:  # only now: for a round that has ended already this calls `_end_round` here
            round_.groups.add_done_callback(lambda _: self._end_round(generate))

    def _end_round(self, generate: GenerateRound) -> None:
        with self._changed:
            self._last_change = time.monotonic()
            self._advance(generate)
