"""Find the environment that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dapo_runner.config import ConfigError, EnvironmentConfig
from dapo_runner.environments.environment import Environment
from dapo_runner.environments.template import CUT
from dapo_runner.environments.tools import ToolEnvironment
from dapo_runner.plugins import import_function


def make_environment(
    config: EnvironmentConfig, tokenizer: Any = None, max_error: int = 200
) -> Callable[[], Environment]:
    """Return what makes the environment of an episode. A class without a method ``step`` is in TRL's convention.

    ``tokenizer`` may know how calls of tools are written. ``max_error``: see ``ToolEnvironment``. Raises ConfigError.
    """
    functions = [import_function("env.tools", name) for name in config.tools]
    make_state = (lambda: None) if config.kind is None else import_function("env.kind", config.kind)

    def make() -> Environment:
        state: Any = make_state()
        if not (state is None or callable(getattr(state, "reset", None))):
            raise ConfigError(f"env.kind: expected a class with a method reset, got {type(state).__name__}.")
        if not callable(getattr(state, "step", None)):
            environment = ToolEnvironment(functions, state, tokenizer, max_error)
            if not environment.tools and "row" in inspect.signature(state.reset).parameters:
                taken = "Without one it is in TRL's convention: its other methods are tools, and it has none."
                raise ConfigError(f"env.kind: expected {config.kind} to have a method step or tools. {taken}")
            return environment
        if functions:
            raise ConfigError(f"env.tools: is not supported with env.kind={config.kind}, which answers turns itself.")
        return state

    return make


def template_arguments(config: EnvironmentConfig | None) -> dict[str, Any]:
    """Return how prompts of episodes are rendered: with the tools, up to where `TurnTemplate` goes on."""
    return {} if config is None else {"until": CUT, "tools": read_tools(make_environment(config))}


def read_tools(make: Callable[[], Environment]) -> list[Any] | None:
    """Return the JSON schemas of an environment's tools, None if it has none. The environment is closed again."""
    environment = make()
    with suppress(Exception):  # it was never reset
        getattr(environment, "close", lambda: None)()
    return environment.tools if isinstance(environment, ToolEnvironment) else None
