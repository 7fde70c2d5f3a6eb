"""Errors that end a command in one line instead of a traceback. This module imports nothing."""


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
