"""Tools that the policy calls: plain functions, and environments in TRL's convention (`environment_factory`).

TRL's convention is a class with ``reset(**row)``, which may return the text of a user message, and public methods that
are the tools; ``get_reward()`` is optional. Docstrings and type hints become the schemas that the policy reads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Json, ValidationError, validate_call

from dapo_runner.environments.environment import Answer, Environment, Message
from dapo_runner.errors import ConfigError

STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)  # "3" is no integer
MOST_CHARACTERS = 4096  # of a tool's result; a longer one is an error that the policy sees
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(BaseModel):
    """A call as a model writes it."""

    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]] = {}  # as text in OpenAI's form


def parse_calls(text: str, tokenizer: Any = None, tools: Sequence[Any] = ()) -> list[ToolCall | Exception]:
    """Return the calls of a turn in order, an error for each that cannot be read.

    They are read by the tokenizer's own response template. Without one each is a `<tool_call>{"name": …, "arguments":
    {…}}</tool_call>`, which is the form of Hermes and Qwen.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return [_read_call(ToolCall.model_validate_json, found) for found in _HERMES.findall(text)]
    try:
        calls = tokenizer.parse_response(text, prefix="", tools=list(tools)).get("tool_calls") or []
        return [_read_call(ToolCall.model_validate, call.get("function")) for call in calls]
    except Exception as error:  # whatever a parser does with the text of a model
        return [error]


def _read_call(read: Callable[[Any], ToolCall], call: Any) -> ToolCall | Exception:
    try:
        return read(call)
    except ValueError as error:
        return error


class ToolEnvironment(Environment):
    """An episode in which the policy calls tools. It ends with the first turn that calls none.

    A call that fails is answered with an error, which the policy sees. ``counts`` has calls, failed calls, and 1 for an
    episode that called a tool.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], state: Any = None, tokenizer: Any = None, max_error: int = 200
    ) -> None:
        """Take ``state``, an environment in TRL's convention, and ``max_error`` characters for the errors of a turn.
        Raises ConfigError for a tool without a schema.
        """
        names = {name for name, _ in inspect.getmembers(type(state), inspect.isfunction) if not name.startswith("_")}
        tools = [*functions, *(getattr(state, name) for name in sorted(names - {"reset", "get_reward"}))]
        self.functions = {tool.__name__: tool for tool in tools}
        if len(self.functions) < len(tools):
            raise ConfigError(f"env.tools: expected tools of different names, got {[one.__name__ for one in tools]}.")
        self.tools = [_schema_of(tool) for tool in tools]
        self.state, self.tokenizer, self.max_error = state, tokenizer, max_error
        self.counts = Counter(tool_calls=0, tool_errors=0, tool_episodes=0)

    def reset(self, row: Mapping[str, Any]) -> str | None:
        return None if self.state is None else self._await(self.state.reset(**_arguments(self.state.reset, row)))

    def step(self, text: str) -> Answer:
        calls = parse_calls(text, self.tokenizer, self.tools)
        self.error_room = self.max_error
        answers = [self._answer(call) for call in calls]
        return Answer(tuple(Message("tool", answer) for answer in answers if answer is not None), None, not calls)

    def get_reward(self) -> float | None:
        return self._await(self.state.get_reward()) if hasattr(self.state, "get_reward") else None

    def close(self) -> None:
        if "loop" in vars(self):
            self.loop.close()

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the episode, which connections may be bound to."""
        return asyncio.new_event_loop()

    def _await(self, result: Any) -> Any:
        return self.loop.run_until_complete(result) if inspect.iscoroutine(result) else result

    def _answer(self, call: ToolCall | Exception) -> str | None:
        """Return the result or the error, None for an error that there is no room for."""
        self.counts["tool_calls"] += 1
        self.counts["tool_episodes"] = 1
        try:
            if isinstance(call, Exception):
                raise call
            if call.name not in self.functions:
                raise ValueError(f"there is no tool {call.name}; tools are {', '.join(self.functions)}")
            result = str(self._await(validate_call(config=STRICT)(self.functions[call.name])(**call.arguments)))
            if len(result) > MOST_CHARACTERS:
                raise ValueError(f"the result has {len(result)} characters, more than {MOST_CHARACTERS}")
            return result
        except (Exception, SystemExit) as error:  # the policy may do better next time
            self.counts["tool_errors"] += 1
            text, room = str(error), self.error_room
            if isinstance(error, ValidationError):  # of the call or its arguments
                text = "; ".join(
                    f"{'.'.join(map(str, one['loc'])) or 'tool call'}: {one['msg']}" for one in error.errors()
                )
            self.error_room = max(0, room - len(text) - 1)
            return json.dumps({"error": text[:room]}, ensure_ascii=False) if room else None


def _arguments(function: Callable[..., Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of a row that a function takes, all where it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    return row if takes_all else {name: value for name, value in row.items() if name in parameters}


def _schema_of(tool: Callable[..., Any]) -> Mapping[str, Any]:
    from transformers.utils import get_json_schema  # takes seconds

    try:
        return get_json_schema(tool)
    except Exception as error:  # of docstrings and type hints
        raise ConfigError(
            f"env: expected a docstring and type hints of the tool {tool.__name__}, from which its schema is made "
            f"({error}). Describe every argument in an Args section. A game has a method step instead of tools."
        ) from error
