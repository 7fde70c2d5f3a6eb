"""The build: one clear sentence without a compiler, and the pure-torch package on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_without_a_compiler_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    result = build(tmp_path, CXX="/nowhere/g++")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "no C++ compiler was found" in last
    assert "DAPO_KERNELS_CPP=0" in last
    assert "Traceback" not in result.stderr


def test_pure_torch_package_needs_no_compiler(tmp_path: Path) -> None:
    result = build(tmp_path, CXX="/nowhere/g++", DAPO_KERNELS_CPP="0")
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.rglob("loss.py"))
    assert not list(tmp_path.rglob("_C*.so"))


@pytest.mark.slow
def test_extension_builds_quickly(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.rglob("_C*.so"))) == 1
