"""Asked before a run starts: what it will do and need, what this machine lacks, what is installed."""
