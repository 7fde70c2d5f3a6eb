"""The Triton loss with other launch parameters than the built-in ones: contestants of the suite ``gpu-tuning``.

They are replaced in the launcher's module for the time of a call.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from benchmarks.contestants import Contestant, Run, ours, within
from benchmarks.problem import Problem
from dapo_kernels import use_backend
from dapo_kernels.records import RowsLoss, RowsSlopes

_PACKAGE = "dapo_kernels.backends.triton"


class Tuning(NamedTuple):
    """Launch parameters.

    Attributes:
        warps: how many share a row.
        loads: 16-byte accesses of a thread on their way at once.
        apart: a kernel for the statistics and one for the gradient, as without ``inplace_backward``.
    """

    warps: int
    loads: int = 2
    apart: bool = False

    @property
    def name(self) -> str:
        return f"triton: {self.warps} warps, {self.loads} loads{', two kernels' * self.apart}"


TUNINGS = (
    *(Tuning(warps, loads) for warps in (4, 8, 16, 32) for loads in (1, 2, 4)),
    *(Tuning(warps, apart=True) for warps in (8, 32)),
)


def loss_in_two_kernels(logits: Tensor, *call: Any) -> RowsLoss:
    """Compute the loss in place as ``inplace_backward=False`` does: the statistics first, then the gradient."""
    launcher = importlib.import_module(_PACKAGE)
    out: RowsSlopes = launcher.row_slopes(logits, *call)
    launcher.row_grad(logits, logits, call[0], out.stats, out.slopes)
    return RowsLoss(out.loss, out.logprobs, out.entropy, out.clip_hit, out.ref_kl, out.slopes.idle)


def _make(problem: Problem, tuning: Tuning) -> Run:
    launcher = importlib.import_module(_PACKAGE)
    launches = (launcher.Launch(None, tuning.warps, 64 // tuning.warps),)
    values: dict[str, Any] = {"LAUNCHES": launches, "LOADS": tuning.loads, "NARROW_WARPS": tuning.warps}
    values |= {"row_loss_": loss_in_two_kernels} if tuning.apart else {}
    return within(problem, ours, lambda: use_backend("triton"), lambda: mock.patch.multiple(launcher, **values))


TUNED = tuple(
    Contestant(
        tuning.name,
        "in place",
        "launch",
        functools.partial(_make, tuning=tuning),
        level="logits",
        device="cuda",
        takes=lambda config, loads=tuning.loads: config.vocab % 8 == 0 or loads == 2,  # odd rows: no 16-byte accesses
        backend="triton",
        destroys_logits=True,
    )
    for tuning in TUNINGS
)
