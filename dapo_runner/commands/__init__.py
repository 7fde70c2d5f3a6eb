"""The commands of `dapo`, one module each: ``run(options, overrides)`` returns the exit code."""
