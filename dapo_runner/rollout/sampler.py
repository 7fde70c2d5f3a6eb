"""Fill steps with groups, one round of prompts after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dapo_runner.data.dataset import PromptCursor
from dapo_runner.rollout.group_buffer import GroupBuffer, SampledStep, SamplingStats
from dapo_runner.types import Group, Prompt

GenerateRound = Callable[[list[Prompt], int], list[Group]]
"""Return the scored groups of a round of prompts, in their order. The second argument numbers the rounds."""


class DynamicSampler:
    """Take prompts from a cursor and fill a buffer with their groups."""

    def __init__(
        self,
        cursor: PromptCursor,
        buffer: GroupBuffer,
        on_round: Callable[[int, SamplingStats], None] = lambda n_groups, stats: None,
    ) -> None:
        """Call ``on_round`` after every round with the number of accepted groups."""
        self.cursor, self.buffer = cursor, buffer
        self.on_round = on_round
        self.n_rounds = 0  # rounds of the run so far
        self.in_flight = 0  # prompts in flight when the loaded state was saved; they are submitted again

    def next(self, generate: GenerateRound) -> SampledStep:
        """Return the groups of one step. Raises SamplingExhaustedError."""
        self.buffer.begin_step()
        while not self.buffer.is_done:
            prompts = self.cursor.take(self.buffer.round_size(self.buffer.missing), self.buffer.step)
            self.add_round(generate(prompts, self.n_rounds))
        return self.buffer.take_step()

    def add_round(self, groups: list[Group]) -> None:
        self.n_rounds += 1
        self.cursor.observe(groups)
        self.buffer.add(groups)
        self.on_round(len(self.buffer.groups), self.buffer.stats)

    def drop_groups(self) -> int:
        """Drop the left-over groups and return their number."""
        n_groups = len(self.buffer.groups) + len(self.buffer.waiting)
        self.buffer.groups, self.buffer.waiting = [], []
        return n_groups

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor.state_dict(), "rounds_so_far": self.n_rounds} | self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor.load_state_dict(state["cursor"])
        self.n_rounds, self.in_flight = state["rounds_so_far"], state.get("in_flight", 0)
        self.buffer.load_state_dict(state, {prompt.id: prompt for prompt in self.cursor.prompts})
