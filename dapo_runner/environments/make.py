"""Find the environment that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dapo_runner.config import ConfigError, EnvironmentConfig
from dapo_runner.environments.environment import Environment
from dapo_runner.environments.tools import ToolEnvironment
from dapo_runner.plugins import import_function


def make_environment(
    config: EnvironmentConfig, tokenizer: Any = None, max_error: int = 200
) -> Callable[[], Environment]:
    """Return what makes the environment of an episode. What has no attribute `tools` is in TRL's convention.

    ``tokenizer`` may know how calls of tools are written. ``max_error``: see ``ToolEnvironment``. Raises ConfigError.
    """
    functions = [import_function("env.tools", name) for name in config.tools]
    make_state = (lambda: None) if config.kind is None else import_function("env.kind", config.kind)

    def make() -> Environment:
        state: Any = make_state()
        if not hasattr(state, "tools"):
            return ToolEnvironment(functions, state, tokenizer, max_error)
        if functions:
            raise ConfigError(f"env.tools: is not supported with env.kind={config.kind}, which answers turns itself.")
        return state

    return make


def template_arguments(config: EnvironmentConfig | None) -> dict[str, Any]:
    """Return what the chat template is given for the prompts of episodes, whose first turn `TurnTemplate` opens."""
    if config is None:
        return {}
    environment = make_environment(config)()
    with suppress(Exception):  # it never began
        environment.finish()
    return {"add_generation_prompt": False, "tools": list(environment.tools) or None}
