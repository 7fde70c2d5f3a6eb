"""Fill the next steps with groups while an earlier one trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_runner.errors import RunError
from dapo_runner.rollout.group_buffer import SampledStep, group_state
from dapo_runner.rollout.sampler import DynamicSampler, GenerateRound
from dapo_runner.types import Group, Prompt

JOIN_TIMEOUT = 60.0  # seconds that the end of a run waits for the threads of its rounds


class SamplingStalledError(RunError):
    """A step waits for groups, and no round of them has ended in time."""


@dataclass(eq=False)
class _Round:
    """Prompts in flight. ``position`` is that of the cursor before them."""

    position: dict[str, int]
    prompts: list[Prompt]
    groups: list[Group] = field(default_factory=list)
    error: BaseException | None = None
    is_done: bool = False
    thread: threading.Thread | None = None


class AsynchronousSampler:
    """Fills steps as its ``DynamicSampler`` would, at most ``max_staleness`` steps before they train.

    Every round of prompts has a thread of its own. With several rounds in flight those of the next steps run beside the
    last responses of the step that is being filled. A round that ends early waits: no group is accepted before all of
    the rounds before it.

    A group's ``step`` is the one whose policy sampled its first token, so that its age is at most ``max_staleness``
    when it trains, unless it was left over by a step before.
    """

    def __init__(
        self, sampler: DynamicSampler, max_staleness: int, last_step: int, round_timeout: float, n_rounds: int = 1
    ) -> None:
        """Sample steps up to ``last_step``, with ``n_rounds`` rounds in flight at most.

        ``round_timeout``: seconds that a round may take while a step waits for it.
        """
        self.sampler, self.buffer = sampler, sampler.buffer
        self.max_staleness = max_staleness
        self.last_step = last_step
        self.round_timeout = round_timeout
        self.n_rounds = n_rounds
        self.step = self.buffer.step  # that trains, or has trained last
        self._ready: deque[SampledStep] = deque()
        self._rounds: deque[_Round] = deque()  # submitted and not accepted yet
        self._is_filling = False
        self._error: BaseException | None = None
        self._last_change = 0.0  # when a round last began or ended
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        """Prompts that are submitted and whose groups are not accepted yet."""
        with self._changed:
            return sum(len(round_.prompts) for round_ in self._rounds)

    @property
    def step_timeout(self) -> float:
        """Seconds after which ``next`` has returned or raised: each round of a step begins and ends in time."""
        return 2 * (self.buffer.config.max_rounds + self.n_rounds) * self.round_timeout

    def metrics(self, groups: list[Group]) -> dict[str, float]:
        """Return how many steps are ready, how many prompts in flight, and which share of the responses in ``groups``
        was sampled by several versions of the weights.
        """
        several = [len({s.version for s in one.completion.versions}) > 1 for group in groups for one in group.samples]
        return {
            "ready_steps": len(self._ready),
            "in_flight": self.in_flight,
            "across_updates": sum(several) / max(1, len(several)),
        }

    def next(self, generate: GenerateRound) -> SampledStep:
        """Return the groups of one step; see ``DynamicSampler.next``.

        ``generate`` is called in other threads, one for each round in flight. Raises what has stopped the sampling,
        once the steps before that are taken, and SamplingStalledError.
        """
        with self._changed:
            self.step += 1
            try:
                return self._wait_for_step(generate)
            except BaseException:
                self.step -= 1  # a checkpoint now resumes with this step, and with what was accepted since
                raise

    def put_back(self, sampled: SampledStep) -> None:
        """Undo the last ``next``: its step has not trained."""
        with self._changed:
            self._ready.appendleft(sampled)
            self.step -= 1

    def close(self) -> None:
        """Start no more rounds and wait for those in flight, each at most JOIN_TIMEOUT seconds."""
        with self._changed:
            self._is_closed = True
            threads = [round_.thread for round_ in self._rounds if round_.thread is not None]
        for thread in threads:
            thread.join(JOIN_TIMEOUT)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a sampler that begins with what is accepted and has not trained. Prompts in flight are
        counted; they will be submitted again.
        """
        with self._changed:
            state = self.sampler.state_dict()
            ready = [group_state(group) for step in self._ready for group in step.groups]
            if self._rounds:
                state["cursor"] |= self._rounds[0].position
            return state | {
                "steps": self.step,
                "buffer": ready + state["buffer"],
                "generated": state["generated"] + sum(step.generated for step in self._ready),
                "in_flight": self.in_flight,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call before the first step."""
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
                    f"rollout.server.answer_within: expected a round of prompts within {self.round_timeout:g} s, none "
                    f"has ended. Step {self.step} waits, {self.in_flight} prompts are in flight."
                )
            self._changed.wait(left)
        return self._ready.popleft()

    def _advance(self, generate: GenerateRound) -> None:
        """Accept the rounds that are done, in their order, and submit others. The lock is held."""
        try:
            while not self._is_closed and self._error is None and self._begin_step():
                if self.buffer.is_done:
                    self._is_filling = False
                    self._ready.append(self.buffer.take_step())
                elif self._rounds and self._rounds[0].is_done:
                    self._accept_round()
                else:
                    self._submit_rounds(generate)
                    break
        except BaseException as error:  # raised again by `next`
            self._error = error
        self._changed.notify_all()

    def _begin_step(self) -> bool:
        """Return whether there is a step to fill; begin the next one where that may be sampled already."""
        if not self._is_filling and self.buffer.step < self._furthest_step:
            self._is_filling = True
            self.buffer.begin_step()
        return self._is_filling

    @property
    def _furthest_step(self) -> int:
        return min(self.step + self.max_staleness, self.last_step)

    def _accept_round(self) -> None:
        error = self._rounds[0].error
        if error is not None:
            raise error
        round_ = self._rounds.popleft()
        self.sampler.add_round(round_.prompts, round_.groups)

    def _submit_rounds(self, generate: GenerateRound) -> None:
        """Submit as many rounds as may be in flight: one for the groups that are missing, others for what the steps
        after it lack that may be sampled already.
        """
        sampler, buffer, wanted = self.sampler, self.buffer, self.buffer.config.prompts_per_step
        while len(self._rounds) < self.n_rounds:
            n = len(self._rounds)
            further = self._furthest_step - buffer.step if n else 0
            missing = buffer.missing + further * wanted - buffer.expected(self.in_flight)
            if missing <= 0:
                return
            position = sampler.cursor.place
            prompts = sampler.cursor.take(buffer.round_size(min(missing, wanted)), buffer.step + min(n, further))
            self._start_round(_Round(position, prompts), sampler.n_rounds + n, generate)

    def _start_round(self, round_: _Round, number: int, generate: GenerateRound) -> None:
        self._rounds.append(round_)
        self._last_change = time.monotonic()
        # A daemon: a round that neither returns nor fails must not keep the process from its end.
        round_.thread = threading.Thread(
            target=self._run_round, args=[round_, number, generate], name="rollout round", daemon=True
        )
        round_.thread.start()

    def _run_round(self, round_: _Round, number: int, generate: GenerateRound) -> None:
        try:
            round_.groups = generate(round_.prompts, number)
        except BaseException as error:  # raised again by `next`
            round_.error = error
        with self._changed:
            round_.is_done = True
            self._last_change = time.monotonic()
            self._advance(generate)
