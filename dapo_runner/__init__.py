"""A lean trainer that runs the whole DAPO algorithm around the fused losses of `dapo_kernels`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapo_runner.config import Config, load_config
    from dapo_runner.errors import ConfigError
    from dapo_runner.loop import train

__all__ = ["Config", "ConfigError", "load_config", "train"]

_HOMES = {"Config": "config", "ConfigError": "errors", "load_config": "config", "train": "loop"}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dapo_runner' has no attribute {name!r}")
    return getattr(import_module(f"dapo_runner.{_HOMES[name]}"), name)
