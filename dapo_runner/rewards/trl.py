"""Reward functions written for TRL: `reward = from_trl(their_function)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from dapo_runner.types import Completion, Prompt

# TRL passes these separately, so they are not columns.
_OWN = {"prompt", "prompts", "completion", "completions", "completion_ids"}


def from_trl(function: Callable[..., Any], *, chat: bool = False) -> Callable[..., Any]:
    """Return a reward of (prompts, completions, rows) for TRL's `(completions, **columns)`, plain or async.

    With ``chat``, prompts and completions are lists of messages, as TRL passes them for chat data; otherwise texts, of
    an episode its last. If it returns None for a response, the other rewards decide. Episodes pass ``environments``.
    """
    return partial(_call_async if inspect.iscoroutinefunction(function) else _call, function, chat)


def _call(function: Callable[..., Any], chat: bool, prompts: Any, completions: Any, rows: Any) -> Any:
    return function(**_arguments(chat, prompts, completions, rows))


async def _call_async(function: Callable[..., Any], chat: bool, prompts: Any, completions: Any, rows: Any) -> Any:
    return await function(**_arguments(chat, prompts, completions, rows))


def _arguments(chat: bool, prompts: list[Prompt], completions: list[Completion], rows: list[Any]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row if name not in _OWN)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    columns["completion_ids"] = [completion.token_ids.tolist() for completion in completions]
    if any(completion.environment is not None for completion in completions):
        columns["environments"] = [completion.environment for completion in completions]
    if not chat:
        return columns | {"prompts": [p.text for p in prompts], "completions": [c.text for c in completions]}
    columns["prompts"] = [[{"role": role, "content": text} for role, text in prompt.messages] for prompt in prompts]
    said = [completion.messages or (("assistant", completion.text),) for completion in completions]
    columns["completions"] = [[{"role": role, "content": text} for role, text in messages] for messages in said]
    return columns
