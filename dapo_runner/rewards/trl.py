"""Reward functions written for TRL: `reward = from_trl(their_function)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dapo_runner.types import Completion, Prompt

# What TRL passes under these names, or leaves out of the columns.
_OWN = {"prompt", "prompts", "completion", "completions", "completion_ids"}


def from_trl(function: Callable[..., Any], *, chat: bool = False) -> Callable[..., Any]:
    """A reward of (prompts, completions, rows) from one of TRL's `(completions, **columns)`, plain or async.

    With ``chat`` prompts and completions are lists of messages, which is what TRL passes for chat data, else texts. A
    None in what it returns leaves that response to the other rewards, as in TRL.
    """

    def arguments(
        prompts: Sequence[Prompt], completions: Sequence[Completion], rows: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        names = dict.fromkeys(name for row in rows for name in row if name not in _OWN)
        columns = {name: [row.get(name) for row in rows] for name in names}
        ids = [completion.token_ids.tolist() for completion in completions]
        if not chat:
            texts = {"prompts": [p.text for p in prompts], "completions": [c.text for c in completions]}
            return {**columns, **texts, "completion_ids": ids}
        asked = [[{"role": role, "content": content} for role, content in prompt.messages] for prompt in prompts]
        said = [[{"role": "assistant", "content": completion.text}] for completion in completions]
        return {**columns, "prompts": asked, "completions": said, "completion_ids": ids}

    def reward(prompts: Sequence[Prompt], completions: Sequence[Completion], rows: Sequence[dict[str, Any]]) -> Any:
        return function(**arguments(prompts, completions, rows))

    async def async_reward(
        prompts: Sequence[Prompt], completions: Sequence[Completion], rows: Sequence[dict[str, Any]]
    ) -> Any:
        return await function(**arguments(prompts, completions, rows))

    return async_reward if inspect.iscoroutinefunction(function) else reward
