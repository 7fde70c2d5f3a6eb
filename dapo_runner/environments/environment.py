"""What an environment is: the other side of a conversation, one instance for each episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import AfterValidator, BeforeValidator, FiniteFloat, Strict, StrictBool

_as_plain = BeforeValidator(lambda value: value.item() if hasattr(value, "item") else value)  # of NumPy or torch
Number = Annotated[StrictBool | Annotated[FiniteFloat, Strict()], _as_plain, AfterValidator(float)]  # no text


class Message(NamedTuple):
    """A message of the conversation."""

    role: Literal["user", "tool"]
    content: str


class Answer(NamedTuple):
    """The next user message or messages, the reward of the turn, and whether the episode is over."""

    observation: str | tuple[Message, ...] | None
    reward: Number | None
    is_done: Annotated[bool, Strict(), _as_plain]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message("user", self.observation),) if isinstance(self.observation, str) else self.observation or ()


class Environment(Protocol):
    """An episode. It is called from one thread at a time; different episodes are called from different threads.

    Three members are optional. ``get_reward()`` is called once at the end and returns a reward for the whole episode,
    or None. ``close()`` is called last, also after a failure. ``counts`` has numbers by name, which are added up over
    the episodes of a step and logged as `env/NAME`.
    """

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin the episode of a row of the data set. The text is appended to the last user message of the prompt."""

    def step(self, text: str) -> Answer | tuple[str | tuple[Message, ...] | None, float | None, bool]:
        """Answer a turn of the policy: its text without the token that ended it, other special tokens included.

        If the episodes of a prompt have no reward, `reward.kind` scores their last turns. If some have, the others
        have the reward 0.
        """
