"""Several processes as one run: who is there, who holds which weights and positions, who gets which work."""
