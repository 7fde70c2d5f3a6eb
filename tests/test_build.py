"""The build: one clear sentence without a compiler, the pure-torch package on request, the CUDA module on demand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
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
    assert not list(tmp_path.rglob("_C*.so"))
    (losses,) = tmp_path.rglob("dapo_kernels/losses.py")
    assert (losses.parent / "py.typed").exists()
    runner = losses.parent.parent / "dapo_runner"
    assert (runner / "py.typed").exists()

    def recipes(folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.yaml")}

    assert recipes(runner / "recipes") == recipes(ROOT / "recipes")
    assert {path.suffix for path in (runner / "tools" / "page").glob("page.*")} == {".html", ".css", ".js"}


def test_the_source_distribution_is_the_repository(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not in a git repository")
    command = ["egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run([sys.executable, "setup.py", "-q", *command], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        page = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert page is not None
        text = page.read().decode()
    assert set(listed.stdout.split()) - names <= {".ci/run", ".gitignore"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    # What an index shows leads to places that are there.
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert "[DAPO](https://arxiv.org/abs/2503.14476)" in text
    assert "(docs/objectives.md)" in text
    assert "![" not in text


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
