"""Environments by name, and tools that the policy calls: functions, and methods of a class in TRL's convention."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call

from dapo_runner import http
from dapo_runner.config import ConfigError, EnvironmentConfig
from dapo_runner.environments.environment import Answer, Environment, Message
from dapo_runner.environments.template import CUT, ToolCall, parse_calls
from dapo_runner.errors import describe_error
from dapo_runner.plugins import import_function

TOOL_LOOP = "tools"  # the name of the event loop of async tools
CALL = ConfigDict(strict=True, arbitrary_types_allowed=True)  # as JSON: "3" is no integer, a list may be a tuple
MOST_CHARACTERS = 4096  # of a tool's result; a longer one is an error that the policy sees


class ToolEnvironment(Environment):
    """An episode in which the policy calls tools. It ends with the first turn that calls none. A call that fails is
    answered with an error, which the policy sees.
    """

    def __init__(self, functions: list[Any], state: Any = None, tokenizer: Any = None, max_error: int = 200) -> None:
        """Take ``state``, an environment in TRL's convention, and the length of all errors of a turn together."""
        from transformers.utils import get_json_schema  # takes seconds

        names = {name for name, _ in inspect.getmembers(type(state), inspect.isfunction) if not name.startswith("_")}
        tools = [*functions, *(getattr(state, name) for name in sorted(names - {"reset", "get_reward", "close"}))]
        self.functions = {tool.__name__: tool for tool in tools}
        if len(self.functions) < len(tools):
            raise ConfigError(f"env.tools: expected tools of different names, got {[one.__name__ for one in tools]}.")
        self.tools = list(map(get_json_schema, tools))
        self.state, self.tokenizer, self.max_error = state, tokenizer, max_error
        self.counts = Counter(tool_calls=0, tool_errors=0, tool_episodes=0)

    def reset(self, row: Mapping[str, Any]) -> str | None:
        if self.state is None:
            return None
        parameters = inspect.signature(self.state.reset).parameters
        takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
        given = {name: value for name, value in row.items() if takes_all or name in parameters}
        return _await(self.state.reset(**given))

    def step(self, text: str) -> Answer:
        calls = parse_calls(text, self.tokenizer, self.tools)
        self.error_room = self.max_error
        answers = [self._answer(call) for call in calls]
        return Answer(tuple(Message("tool", answer) for answer in answers if answer is not None), None, not calls)

    def get_reward(self) -> float | None:
        return _await(self.state.get_reward()) if hasattr(self.state, "get_reward") else None

    def close(self) -> None:
        _await(getattr(self.state, "close", lambda: None)())

    def _answer(self, call: Any) -> str | None:
        """Return the result or the error, None for an error that there is no room for."""
        self.counts["tool_calls"] += 1
        self.counts["tool_episodes"] = 1
        try:
            read = ToolCall.model_validate_json(call) if isinstance(call, str) else ToolCall.model_validate(call)
            if read.name not in self.functions:
                raise ValueError(f"there is no tool {read.name}; tools are {', '.join(self.functions)}")
            checked = TypeAdapter(validate_call(config=CALL)(self.functions[read.name]), config=CALL).validate_json
            result = str(_await(checked(json.dumps(read.arguments))))
            if len(result) > MOST_CHARACTERS:
                raise ValueError(f"the result has {len(result)} characters, more than {MOST_CHARACTERS}")
            return result
        except BaseException as error:  # the policy may do better next time; it may have written `raise SystemExit`
            self.counts["tool_errors"] += 1
            text, room = str(error) or type(error).__name__, self.error_room
            if isinstance(error, ValidationError):  # of the call or its arguments
                found = ((".".join(map(str, one["loc"])) or "tool call", one["msg"]) for one in error.errors())
                text = "; ".join(map(": ".join, found))
            self.error_room = max(0, room - len(text) - 1)
            return json.dumps({"error": text[:room]}, ensure_ascii=False) if room else None


def _await(result: Any) -> Any:
    """Return the result of a coroutine. All episodes share one event loop: clients are bound to theirs."""
    return http.wait(http.start(result, TOOL_LOOP)) if inspect.iscoroutine(result) else result


def make_environment(config: EnvironmentConfig, *options: Any) -> Callable[[], Environment]:
    """Return what makes the environment of an episode. ``options`` are for ``ToolEnvironment``. Raises ConfigError."""
    functions = [import_function("env.tools", name) for name in config.tools]
    make_state = (lambda: None) if config.kind is None else import_function("env.kind", config.kind)

    def make() -> Environment:
        state: Any = make_state()
        # A class without a method `step` is in TRL's convention.
        is_game, reset = callable(getattr(state, "step", None)), getattr(state, "reset", None)
        if is_game and functions:
            raise ConfigError(f"env.tools: is not supported with env.kind={config.kind}, which answers turns itself.")
        environment = state if is_game else ToolEnvironment(functions, state, *options)
        fits = callable(reset) and (is_game or environment.tools or "row" not in inspect.signature(reset).parameters)
        if config.kind and not fits:
            raise ConfigError(f"env.kind: expected {config.kind} to have reset and step, or in TRL's convention tools.")
        return environment

    return make


def template_arguments(config: EnvironmentConfig | None) -> dict[str, Any]:
    """Return how prompts are rendered: with the JSON schemas of tools, up to where `TurnTemplate` goes on."""
    if config is None:
        return {}
    try:
        environment = make_environment(config)()
        list(map(validate_call, getattr(environment, "functions", {}).values()))  # refuses what is no plain function
    except ConfigError:
        raise
    except Exception as error:  # of a constructor, or of the docstrings and type hints of tools
        raise ConfigError(f"env: {config.kind or config.tools} raised {describe_error(error)}") from error
    with suppress(Exception):  # it was never reset
        getattr(environment, "close", lambda: None)()
    return {"until": CUT, "tools": environment.tools if isinstance(environment, ToolEnvironment) else None}
