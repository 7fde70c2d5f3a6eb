"""The O(tokens) mathematics of a loss: objectives, surrogates, ratios, aggregation, selection. It contains no
kernels."""

from dapo_kernels.objectives.table import FIELDS, OBJECTIVES, Objective, resolve_objective

__all__ = ["FIELDS", "OBJECTIVES", "Objective", "resolve_objective"]
