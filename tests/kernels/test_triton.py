"""The "triton" backend, run on the CPU by Triton's interpreter in a process of its own (``triton_suite.py``)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.elsewhere
HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)"
)


def run(*arguments: str, interpret: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: TRITON_INTERPRET is read when Triton is first imported."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "TRITON_INTERPRET": interpret, "PYTHONPATH": path},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )


# Of the suite that every CPU backend passes, what a minute and a half of interpreting holds; a half in a process each,
# because starting one takes six seconds.
HALVES = {
    "tokens": (
        *("triton_suite.py", "test_golden.py", "test_policy.py", "test_selection.py", "test_distillation.py"),
        "test_aggregation.py",
    ),
    "rows": ("test_linear.py", "test_logits.py", "test_objectives.py", "test_row_parts.py"),
}
# Sizes that are about the CPU's caches and tiles, and averages over many rows.
TOO_LARGE = (
    "more_than_one_tile",
    "many_chunks",
    "eagers_on_average",
    "small_and_real",
    "long_batch",
    "real_vocabulary",
    "larger_than_the_caches",
)
# What triton_suite.py asks of the kernels once: padded rows and rows of a part of the batch have the bits of the packed
# whole's, and dead tokens leave no trace. Of rows in parts one cut. The rest of these is the host's work.
ASKED_ONCE = (
    "(test_parts_are_the_whole and (two or one_column))",
    "micro_batches",
    "main_grad",
    "keywords_mean_the_same",
)


@needs_triton
@pytest.mark.parametrize("half", HALVES)
def test_the_suite_under_the_interpreter(half: str, pytestconfig: pytest.Config) -> None:
    modules = HALVES[half][1:2] if pytestconfig.getoption("--smoke") else HALVES[half]
    chosen = ("-k", " and ".join(f"not {name}" for name in TOO_LARGE + ASKED_ONCE), "--backends", "triton")
    # The configuration's -q and another one would leave out the line with the counts.
    plain = ("-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = run("-m", "pytest", *plain, *chosen, *(str(HERE / module) for module in modules), interpret="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = done.stdout.splitlines()[-1]
    assert " passed" in counts, done.stdout[-2000:]
    assert "skipped" not in counts, done.stdout[-2000:]


@needs_triton
def test_without_a_device_and_without_the_interpreter_it_says_why() -> None:
    code = """
import torch
if torch.cuda.is_available():
    print("RuntimeError TRITON_INTERPRET: not on this machine")
from dapo_kernels import use_backend
try:
    with use_backend("triton"):
        pass
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    done = run("-c", code, interpret="0")
    assert done.returncode == 0, done.stderr
    assert "RuntimeError" in done.stdout
    assert "TRITON_INTERPRET" in done.stdout


def test_without_triton_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_kernels import use_backend
    from dapo_kernels.backends import registry

    monkeypatch.setattr(registry, "_reasons", {})  # as found once
    monkeypatch.setitem(sys.modules, "triton", None)  # import raises ImportError
    with pytest.raises(RuntimeError, match="pip install triton"), use_backend("triton"):
        pass
