"""Errors that end a command in one line instead of a traceback."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class ConfigError(ValueError):
    """A configuration that cannot run. The message has one line per problem; each line names its key.

    Example:
        >>> from dapo_runner import load_config
        >>> load_config("recipes/tiny.yaml", ["optimizer.rate=1e-4"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        dapo_runner.errors.ConfigError: optimizer.rate: ...
    """


class RunError(RuntimeError):
    """A run cannot continue. Subclasses state the reason. The same command resumes from the last checkpoint."""


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error, and the line of the user's code that raised it."""
    frames, ours = traceback.extract_tb(error.__traceback__), Path(__file__).parent
    others = [frame for frame in frames if not Path(frame.filename).is_relative_to(ours)]
    users = [frame for frame in others if not frame.filename.startswith(LIBRARIES)] or others
    line = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {error}{line}"
