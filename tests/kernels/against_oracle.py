"""Rows of the objectives table as options of the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import Case, Solution, rows_of, solve
from entries import call, token_values
from oracle import PROMPT_MEAN, Options, batch_selection, share_down

from dapo_kernels import OBJECTIVES

LENGTH_NORM = 12.0
# Shares that pick several tokens of a small batch, and clip ranges that some sequences keep.
WIDE: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov": (0.2, 0.05, 3.0)},
    "kl_cov": {"kl_cov": (0.25, 0.7)},
    "top_entropy": {"top_entropy": 0.4},
    "spo": {"max_old_prob": 0.4},
    "gspo": {"clip_low": 0.05, "clip_high": 0.3},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.3},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.3},
    "luspo": {"clip_low": 0.05, "clip_high": 0.3},
    "vespo": {"vespo": (0.5, 0.1, 0.3, 0.2)},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.03, "dual_clip": 2.0},
    "dppo_kl": {"clip_low": 0.01, "clip_high": 0.02, "dual_clip": 2.0},
    "opsm": {"off_policy_mask": 0.05},
}


def options(name: str, wide: bool = True, **changes: Any) -> tuple[Options, dict[str, Any]]:
    """A row of the table with the changes, for the oracle; and the changes as keywords of a call."""
    row = OBJECTIVES[name]
    norm = LENGTH_NORM if changes.get("aggregate", row.aggregate).endswith("norm") else None
    changes = {**(WIDE.get(name, {}) if wide else {}), "length_norm": norm, **changes}
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(Options)}
    return Options(**{**fields, **changes}), changes


def as_logprobs(case: Case) -> Case:
    """The case of a caller of `policy_loss`, whose leaves are log-probs and entropies."""
    return dataclasses.replace(case, leaves=dict(zip(("logprobs", "entropy"), token_values(case), strict=True)))


class Problem:
    """A case with its options, solved in float64 and as eager PyTorch would; any number of calls can be checked."""

    def __init__(
        self,
        case: Case,
        o: Options,
        *,
        dtype: torch.dtype = torch.float32,
        groups: Sequence[int] | None = None,
        denominator: float | None = None,
        grad_output: float = 1.0,
        **how: Any,
    ) -> None:
        self.o = o
        _, x = rows_of(case, o, groups=groups, **how)
        selected = sorted(batch_selection(x, o))
        if o.clip_cov is not None:  # the draw is handed in
            selected = selected[: share_down(x.live, o.clip_cov[0])]
        self.selected = selected
        self.arguments: dict[str, Any] = {"denominator": denominator, "grad_output": grad_output, **how}
        given = {"selected": selected, "groups": groups, **self.arguments}
        self.truth, self.eager = solve(case, o, **given), solve(case, o, dtype=dtype, **given)
        if o.clip_cov is not None:
            self.arguments["selection"] = torch.tensor([t in selected for t in range(len(x.live))], dtype=torch.bool)
        if o.aggregate == PROMPT_MEAN:
            self.arguments["group_ids"] = torch.tensor(groups)

    def call(self, entry: str, objective: Any, case: Case, layout: str, **keywords: Any) -> tuple[Any, Any]:
        with_entropy = entry == "policy" and bool(self.o.entropy_coef or self.o.top_entropy)
        if self.o.needs_reference:
            keywords["ref_logprobs"] = case.ref_logprobs
        return call(entry, case, objective, layout=layout, with_entropy=with_entropy, **self.arguments, **keywords)


def check_metrics(out: Any, truth: Solution) -> None:
    for key, value in truth.metrics.items():
        if key != "entropy" or out.entropy is not None:
            assert float(out.metrics[key]) == pytest.approx(value, rel=3e-5, abs=1e-4), key
