"""Every instruction set that this processor runs, not only the one it would choose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_logits.py", "test_logprobs.py", "test_edges.py")
ISAS = ("avx512bf16", "avx512", "avx2", "portable")


def run(command: list[str], isa: str) -> subprocess.CompletedProcess[str]:
    """A Python process that is told its instruction set; with "" it chooses."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if isa:
        environment["DAPO_KERNELS_ISA"] = isa
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


CALL = """
import torch
from dapo_kernels import _C, token_logprobs
token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]))
print(_C.isa())
"""


@pytest.mark.elsewhere
@pytest.mark.parametrize("isa", ISAS)
def test_same_suite_on(isa: str) -> None:
    """The row kernels' tests again, in a process that is told which instruction set to take."""
    pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    probe = run(["-c", CALL], isa)
    if probe.returncode != 0:
        assert f"DAPO_KERNELS_ISA={isa}" in probe.stderr, probe.stderr[-2000:]
        pytest.skip(f"this processor does not run {isa}")
    if run(["-c", CALL], "").stdout == probe.stdout:
        pytest.skip(f"{isa} is what this processor chooses: every other test runs on it")
    assert probe.stdout.strip() == isa
    here = Path(__file__).parent
    files = [str(here / name) for name in FILES]
    done = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpp", "-m", "not slow", "--tb=line", *files], isa
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_an_unknown_instruction_set_is_an_error_not_a_crash() -> None:
    pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    done = run(["-c", CALL], "sse9")
    assert done.returncode == 1, f"exit status {done.returncode}: {done.stderr[-500:]}"
    assert "sse9" in done.stderr
    assert all(isa in done.stderr for isa in ISAS)
