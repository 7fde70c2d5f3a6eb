"""Fill the next steps with groups while an earlier one trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_runner.errors import RunError
from dapo_runner.rollout.group_buffer import SampledStep, without_rows
from dapo_runner.rollout.sampler import DynamicSampler, GenerateRound
from dapo_runner.types import Group, Prompt

JOIN_TIMEOUT = 60.0  # seconds that the end of a run waits for the threads of its rounds


class SamplingStalledError(RunError):
    """A step waits for groups, and no round of them has ended in time."""


@dataclass(eq=False)
class _Round:
    """Prompts in flight. ``position`` is that of the cursor before them, ``number`` counts the rounds of the run."""

    position: dict[str, int]
    prompts: list[Prompt]
    number: int
    groups: list[Group] = field(default_factory=list)
    error: BaseException | None = None
    is_done: bool = False
    thread: threading.Thread | None = None


class AsynchronousSampler:
    """Fills steps as its ``DynamicSampler`` would, at most ``max_staleness`` steps before they train.

    Every round of prompts has a thread of its own. With several rounds in flight those of the next steps run beside the
    last responses of the step that is being filled. No round is accepted before the rounds that were submitted earlier.
    """

    def __init__(
        self, sampler: DynamicSampler, max_staleness: int, last_step: int, round_timeout: float, n_rounds: int = 1
    ) -> None:
        """``n_rounds`` are in flight at most; each may take ``round_timeout`` seconds while a step waits for it."""
        self.sampler, self.buffer = sampler, sampler.buffer
        self.max_staleness, self.last_step = max_staleness, last_step
        self.round_timeout, self.n_rounds = round_timeout, n_rounds
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
        """``across_updates``: the share of the responses in ``groups`` that several versions of the weights sampled."""
        several = [len({s.version for s in one.completion.versions}) > 1 for group in groups for one in group.samples]
        return {
            "ready_steps": len(self._ready),
            "in_flight": self.in_flight,
            "across_updates": sum(several) / max(1, len(several)),
        }

    def next(self, generate: GenerateRound) -> SampledStep:
        """See ``DynamicSampler.next``; ``generate`` is called in threads. Raises what a round has raised."""
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
        """Return the state of a sampler that has what is accepted and has not trained, and submits the rest again."""
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
                    f"rollout.server.answer_within: expected a round within {self.round_timeout:g} s, none has ended. "
                    f"Step {self.step} waits, {self.in_flight} prompts are in flight."
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
                    if (error := self._rounds[0].error) is not None:
                        raise error
                    round_ = self._rounds.popleft()
                    self.sampler.add_round(round_.prompts, round_.groups)
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
        """Return whether there is a step to fill; begin the next one where that may be sampled already."""
        if not self._is_filling and self.buffer.step < self._furthest_step:
            self._is_filling = True
            self.buffer.begin_step()
        return self._is_filling

    def _submit_rounds(self, generate: GenerateRound) -> None:
        """Submit one round for the groups that are missing, and others for the steps that may be sampled already."""
        sampler, buffer, wanted = self.sampler, self.buffer, self.buffer.config.prompts_per_step
        while (n := len(self._rounds)) < self.n_rounds:
            further = self._furthest_step - buffer.step if n else 0
            missing = buffer.missing + further * wanted - buffer.expected(self.in_flight)
            if missing <= 0:
                return
            position = sampler.cursor.place
            prompts = sampler.cursor.take(buffer.round_size(min(missing, wanted)), buffer.step + min(n, further))
            round_ = _Round(position, prompts, sampler.n_rounds + n)
            # A daemon: a round that neither returns nor fails must not keep the process from its end.
            round_.thread = threading.Thread(target=self._run_round, args=[round_, generate], daemon=True)
            self._rounds.append(round_)
            self._last_change = time.monotonic()
            round_.thread.start()

    def _run_round(self, round_: _Round, generate: GenerateRound) -> None:
        try:
            round_.groups = generate(round_.prompts, round_.number)
        except BaseException as error:  # raised again by `next`
            round_.error = error
        with self._changed:
            round_.is_done = True
            self._last_change = time.monotonic()
            self._advance(generate)
