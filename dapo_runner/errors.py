"""What ends a command in one line instead of a traceback. Imports nothing: commands without the extras raise it too."""


class ConfigError(ValueError):
    """A configuration that cannot run. The message has one line per problem, each naming its key."""
