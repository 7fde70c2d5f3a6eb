"""Several processes as one run: the ranks, sharded weights and positions, and how work is divided."""
