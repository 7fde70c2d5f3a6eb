"""The commands of `dapo`, a module each: ``run(options, overrides)`` returns the exit code."""
