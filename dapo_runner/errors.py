"""Errors that end a command in one line instead of a traceback. This module imports nothing."""


class ConfigError(ValueError):
    """A configuration that cannot run. The message has one line per problem, each naming its key."""


class RunError(RuntimeError):
    """A run that cannot go on. Subclasses say why; the same command resumes from the last checkpoint."""
