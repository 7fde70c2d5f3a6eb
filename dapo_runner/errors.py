"""Errors that end a command in one line instead of a traceback."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OURS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("dapo_kernels", "dapo_runner"))


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


def hide_users(text: str) -> str:
    """Return a text with `***` in place of users and passwords in addresses."""
    return re.sub(r"(?<!\S)\S*@", lambda x: re.sub(r"\b(\w+://).*@|(?<![^/@])(?=[^/@]*:)[^/]*@", r"\1***@", x[0]), text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most like ``name``, for the end of a message; "" if none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def is_ours(error: BaseException) -> bool:
    """Return whether this package's own code raised an error, itself or by pathlib."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return Path([name for name in names if "pathlib" not in name][-1]).is_relative_to(Path(__file__).parent)


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error, and the line of the user's code that raised it."""
    others = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OURS)]
    users = [frame for frame in others if not frame.filename.startswith(LIBRARIES)] or others
    line = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {error}{line}"
