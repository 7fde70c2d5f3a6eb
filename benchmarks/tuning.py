"""The Triton loss with other launch parameters than the built-in ones: contestants of the suite ``gpu-tuning``.

``configs.TUNINGS`` lists them. Launch parameters are replaced in the launcher's module for the time of a call. Eviction
hints are not options of the kernels: their source is copied without the hints, and the copy is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.configs import TUNINGS, Tuning
from benchmarks.contestants import Contestant, Run, on_backend, ours_from_logits
from benchmarks.problem import Problem
from benchmarks.truth import Result
from dapo_kernels.records import RowsLoss, RowsSlopes

_PACKAGE, _HINT = "dapo_kernels.backends.triton", ', eviction_policy="evict_first"'


@functools.cache
def kernels_without_hints() -> ModuleType:
    """Return a copy of the module of the kernels whose sweeps have no eviction hints."""
    folder = Path(tempfile.mkdtemp(prefix="dapo-no-eviction-hints-"))
    package = Path(importlib.import_module(_PACKAGE).__path__[0])
    sweeps = (package / "sweeps.py").read_text()
    if _HINT not in sweeps:
        raise ValueError("benchmarks.tuning: sweeps.py has no eviction hints of the known form. Update this function.")
    kernels = (package / "kernels.py").read_text().replace(f"{_PACKAGE}.sweeps", "sweeps_without_hints")
    for name, source in (("sweeps_without_hints", sweeps.replace(_HINT, "")), ("kernels_without_hints", kernels)):
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def loss_in_two_kernels(logits: Tensor, *call: Any) -> RowsLoss:
    """Compute the loss in place as ``inplace_backward=False`` does: the statistics first, then the gradient."""
    launcher = importlib.import_module(_PACKAGE)
    out: RowsSlopes = launcher.row_slopes(logits, *call)
    launcher.row_grad(logits, logits, call[0], out.stats, out.slopes)
    return RowsLoss(out.loss, out.logprobs, out.entropy, out.clip_hit, out.ref_kl, out.slopes.idle)


def _replaced(tuning: Tuning) -> dict[str, Any]:
    """Return the names in the launcher's module to replace, with their values."""
    launcher = importlib.import_module(_PACKAGE)
    rows_per_sm = max(1, round(64 * tuning.filled) // tuning.warps)
    values: dict[str, Any] = {"LAUNCHES": (launcher.Launch(None, tuning.warps, rows_per_sm),), "LOADS": tuning.loads}
    values |= {} if tuning.limited else {"programs_for": lambda n_rows, *of: n_rows}
    values |= {"row_loss_": loss_in_two_kernels} if tuning.apart else {}
    return values | ({} if tuning.hints else {"kernels": kernels_without_hints()})


def _make(problem: Problem, tuning: Tuning) -> Run:
    call = on_backend("triton", ours_from_logits)(problem)
    launcher, values = importlib.import_module(_PACKAGE), _replaced(tuning)

    def run() -> Result:
        with ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(launcher, name, value))
            return call()

    return run


TUNED = tuple(
    Contestant(
        tuning.name,
        "in place",
        "ours",
        functools.partial(_make, tuning=tuning),
        level="logits",
        device="cuda",
        backend="triton",
    )
    for tuning in TUNINGS
)
