"""What an environment is: the other side of a conversation, one instance for each episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Message(NamedTuple):
    """What an environment says. ``role``: `user`, `tool` or another that the chat template knows."""

    role: str
    content: str


@dataclass(frozen=True)
class StepResult:
    """What the policy sees next, what its turn earned and whether the episode is over.

    ``reward``: None where the environment gives none. If no turn of an episode has one, the configured reward rule
    scores the last turn of the policy; otherwise the reward of the episode is the sum of those given. An environment
    that gives rewards gives one to every episode, also to those that a limit ends: ``finish`` returns 0.0, not None.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """An episode. It is called from one thread at a time; different episodes are called from different threads.

    Numbers by name in an attribute ``counts`` are added up over the episodes of a step and logged as `env/NAME`.
    """

    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas for the chat template

    def reset(self, row: Mapping[str, Any]) -> StepResult:
        """Begin the episode of a row of the data set. Its messages follow those of the prompt."""
        ...

    def step(self, text: str) -> StepResult:
        """Answer a turn of the policy: its text without the token that ended it, other special tokens included."""
        ...

    def finish(self) -> float | None:
        """End the episode, whatever ended it: `done`, a limit or an error of its own. It is called once, last.

        Returns a reward for the whole episode, added to those of its turns; None where there is none.
        """
        ...
