"""The build: one clear sentence without a compiler, the pure-torch package on request, the CUDA module on demand."""

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
    assert list(tmp_path.rglob("losses.py"))
    assert not list(tmp_path.rglob("_C*.so"))


def old_nvcc(folder: Path) -> str:
    """A PATH whose first nvcc is too old."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    return os.pathsep.join([str(nvcc.parent), os.environ["PATH"]])


def test_a_demanded_cuda_module_says_why_it_cannot_be_built(tmp_path: Path) -> None:
    result = build(tmp_path / "build", PATH=old_nvcc(tmp_path), CUDA_HOME="", CUDA_PATH="", DAPO_KERNELS_CUDA="1")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "DAPO_KERNELS_CUDA=1" in last
    assert "11.8, older than 12.4" in last
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("archs", ["hopper", "75", "90a;;80"])
def test_architectures_that_cannot_be(archs: str) -> None:
    """The function alone: an nvcc is not everywhere."""
    code = f"""
import os, sys, setuptools
os.environ["DAPO_KERNELS_CUDA_ARCHS"] = {archs!r}
setuptools.setup = lambda **_: None
source = open("setup.py").read()
namespace = {{"__file__": os.path.abspath("setup.py"), "__name__": "setup"}}
exec(compile(source, "setup.py", "exec"), namespace)
namespace["architectures"]((13, 0))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("dapo-kernels: "), result.stderr
    assert archs.split(";")[0] in result.stderr


@pytest.mark.slow
def test_extension_builds_quickly(tmp_path: Path) -> None:
    result = build(tmp_path, DAPO_KERNELS_CUDA="0")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.rglob("_C*.so"))) == 1
