"""The Triton loss with other launch parameters than the built-in ones: contestants of the suite ``gpu-tuning``.

``configs.TUNINGS`` lists them. Launch parameters are replaced in the launcher's module for the time of a call. Eviction
hints are not options of the kernels: their source is copied with the hints added, and the copy is loaded.
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

from benchmarks.configs import TUNINGS, Tuning
from benchmarks.contestants import Contestant, Run, on_backend, ours_from_logits
from benchmarks.problem import Problem
from benchmarks.truth import Result

_PACKAGE = "dapo_kernels.backends.triton"


def source_with_hints(source: str) -> str:
    """Return the source of sweeps.py where the first read of a row is ``evict_last``, and what follows ``evict_first``.

    Raises:
        ValueError: the source has no such load or store any more.
    """
    load, store = 'other=float("-inf"))', "to(Out.dtype.element_ty), mask=offs_v < end)"
    statistics, mark, gradient = source.partition("def _write_gradient(")
    if not (load in statistics and load in gradient and store in gradient):
        raise ValueError(
            "benchmarks.tuning: sweeps.py has no loads and stores of the known form. Update this function."
        )
    statistics = statistics.replace(load, f'{load[:-1]}, eviction_policy="evict_last")')
    for access in (load, store):
        gradient = gradient.replace(access, f'{access[:-1]}, eviction_policy="evict_first")')
    return statistics + mark + gradient


@functools.cache
def kernels_with_hints() -> ModuleType:
    """Return a copy of the module of the kernels whose sweeps have eviction hints."""
    folder = Path(tempfile.mkdtemp(prefix="dapo-eviction-hints-"))
    package = Path(importlib.import_module(_PACKAGE).__path__[0])
    text = source_with_hints((package / "sweeps.py").read_text())
    kernels = (package / "kernels.py").read_text().replace(f"{_PACKAGE}.sweeps", "sweeps_with_hints")
    loaded = []
    for name, source in (("sweeps_with_hints", text), ("kernels_with_hints", kernels)):
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loaded.append(module)
    return loaded[-1]


def _replaced(tuning: Tuning) -> dict[str, Any]:
    """Return the names in the launcher's module to replace, with their values."""
    launcher = importlib.import_module(_PACKAGE)
    rows_per_sm = max(1, round(64 * tuning.filled) // tuning.warps)
    values: dict[str, Any] = {"LAUNCHES": (launcher.Launch(None, tuning.warps, rows_per_sm),), "LOADS": tuning.loads}
    values |= {} if tuning.limited else {"programs_for": lambda n_rows, logits: n_rows}
    return values | ({"kernels": kernels_with_hints()} if tuning.hints else {})


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
