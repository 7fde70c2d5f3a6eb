"""Several variants of a recipe over several seeds: planned, run, compared, told on one page."""
