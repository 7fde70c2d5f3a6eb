"""User-defined functions, named as `module:function` in a recipe."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo_runner.errors import ConfigError, describe_error, did_you_mean


def import_function(key: str, use: str, *arguments: str) -> Callable[..., Any]:
    """Return the function or class ``use``, to be called with ``arguments``. Raises ConfigError that names ``key``."""
    module_name, _, function_name = use.partition(":")
    if not re.match(r"\w", module_name):  # a relative import has no package here
        raise ConfigError(f"{key}: expected module:name, got {use!r}")
    if str(Path.cwd()) not in sys.path:  # a console script does not search the working directory
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}: expected module:name, importable from here, got {use!r} ({error})") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: expected {module_name} to import, got {describe_error(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = did_you_mean(function_name, vars(module)) if function is None else f", a {type(function).__name__}"
        raise ConfigError(f"{key}: expected a function or class of {module}, got {function_name!r}{hint}")
    try:
        if arguments:
            inspect.signature(function).bind(*arguments)
    except ValueError:  # a function in C, whose signature is not known
        pass
    except TypeError as error:
        raise ConfigError(f"{key}: expected a function of ({', '.join(arguments)}), got {use} ({error})") from error
    return function
