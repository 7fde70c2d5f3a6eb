"""Run on several processes: ranks and their communication, sharded weights, sequence parallelism."""
