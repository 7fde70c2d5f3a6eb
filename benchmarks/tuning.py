"""The Triton loss with other launch parameters than the built-in ones: contestants of the suite ``gpu-tuning``.

They are replaced in the launcher's module for the time of a call.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.contestants import Contestant, Run, ours, within
from benchmarks.problem import Problem
from dapo_kernels import use_backend


class Tuning(NamedTuple):
    """Launch parameters: how many warps share a row, 16-byte accesses of a thread on their way at once."""

    warps: int
    loads: int

    @property
    def name(self) -> str:
        return f"triton: {self.warps} warps, {self.loads} loads"


TUNINGS = tuple(Tuning(warps, loads) for warps in (4, 8, 16, 32) for loads in (1, 2))


def _make(problem: Problem, tuning: Tuning) -> Run:
    launcher = importlib.import_module("dapo_kernels.backends.triton")
    launches = (launcher.Launch(None, tuning.warps, 64 // tuning.warps),)
    values: dict[str, Any] = {"LAUNCHES": launches, "LOADS": tuning.loads, "NARROW_WARPS": tuning.warps}
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
