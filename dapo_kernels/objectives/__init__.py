"""The O(tokens) mathematics of a loss: the table of objectives, surrogates, ratios, aggregation, selection. Knows no
kernel."""

from dapo_kernels.objectives.table import FIELDS, OBJECTIVES, Objective, resolve_objective

__all__ = ["FIELDS", "OBJECTIVES", "Objective", "resolve_objective"]
