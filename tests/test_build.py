"""The build: one line of error without a compiler, the pure-torch package on request, the source distribution."""

from __future__ import annotations

import os
import re
import runpy
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CXX": "/nowhere/g++", "DAPO_KERNELS_CUDA": "0"}, ["CXX", "DAPO_KERNELS_CPP=0"]),
        ({"DAPO_KERNELS_CUDA": "1", "CUDA_HOME": "", "CUDA_PATH": ""}, ["DAPO_KERNELS_CUDA=1", "11.8", "12.4"]),
    ],
    ids=["no compiler", "an old nvcc"],
)
def test_what_cannot_be_built_is_named_in_one_line(
    environment: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    result = build(tmp_path / "build", PATH=path, **environment)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr.strip().splitlines()[-1] for word in words)


@pytest.mark.parametrize("demanded", [False, True])
def test_an_nvcc_that_fails_leaves_the_cpu_module(demanded: bool, tmp_path: Path) -> None:
    """The compilers are stubs."""
    stubs = {
        "nvcc": f"""case "$1" in
            --version) echo release 12.8;;
            --dryrun) echo '#$ TOP={tmp_path}' >&2;;
            *) echo "unsupported GNU version: $*" >&2; exit 1;;
        esac""",
        "g++": 'until [ "$1" = -o ]; do shift; done; touch "$2" "$2.d"',
        "ccache": 'exec "$@"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    environment = {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]), "CXX": "ccache g++"}
    environment |= {"CUDA_HOME": str(tmp_path / "none"), "CUDA_PATH": "", "DAPO_KERNELS_CUDA_ARCHS": "90a"}
    result = build(tmp_path / "build", **environment, DAPO_KERNELS_CUDA="1" if demanded else "")
    assert (result.returncode == 0) != demanded, result.stderr
    assert "unsupported GNU version: -ccbin g++ " in result.stderr
    assert "DAPO_KERNELS_CUDA=0" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    (built,) = (tmp_path / "build").rglob("*.so")
    assert built.name.startswith("_C.")
    built.with_name(built.name.replace("_C", "_cuda")).touch()  # of earlier sources
    (stale := ROOT / "build" / "lib.stale").mkdir(parents=True, exist_ok=True)  # a wheel would carry it
    build(tmp_path / "build", **environment, DAPO_KERNELS_CUDA="1" if demanded else "")
    assert [*(tmp_path / "build").rglob("*.so")] == [built]
    assert not stale.exists()
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    result = build(tmp_path / "other", **environment, DAPO_KERNELS_CUDA="1" if demanded else "")
    assert (result.returncode == 0) != demanded, result.stderr
    assert "--version fails" in result.stderr


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of setup.py, which builds nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("DAPO_KERNELS_CPP", "0")
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


@pytest.mark.parametrize("refused", ["-fopenmp", "-mavx512bf16", "none"])
def test_what_a_compiler_lacks_is_left_out(refused: str, setup_py: dict[str, Any], tmp_path: Path) -> None:
    """As of gcc 8 and 9, which have no AVX512-BF16. The compiler is a stub."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *{refused}*) exit 1;; esac\n')
    compiler.chmod(0o755)
    words = setup_py["ninja_file"]([str(compiler)], tmp_path / "_C.so").split()
    assert ("-fopenmp" in words) == (refused != "-fopenmp")
    for word in ("-mavx512bf16", "-DDAPO_AVX512BF16", "avx512bf16.o"):
        assert (word in words) == (setup_py["X86"] and refused != "-mavx512bf16")


@pytest.mark.parametrize("archs", ["hopper", "75", "90a;;80"])
def test_architectures_that_cannot_be(archs: str, setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The function alone: an nvcc is not everywhere."""
    monkeypatch.setenv("DAPO_KERNELS_CUDA_ARCHS", archs)
    with pytest.raises(SystemExit, match=archs):
        setup_py["architectures"]((13, 0))


@pytest.mark.elsewhere
def test_the_cluster_kernel_compiles_for_later_gpus(setup_py: dict[str, Any], tmp_path: Path) -> None:
    """For 12.0, which the default build serves by PTX of 9.0: no spills, and the same exponentials as there."""
    nvcc = setup_py["find_nvcc"]()
    if nvcc is None or setup_py["nvcc_version"](nvcc) < (12, 8):
        pytest.skip("no nvcc that knows compute capability 12.0")
    how = [*setup_py["CUDA_FLAGS"], *setup_py["STRICT_CUDA_FLAGS"], "-arch=sm_120", "-keep", "-keep-dir", str(tmp_path)]
    command = [nvcc, *how, "-c", str(ROOT / "csrc/cuda/cluster_loss.cu"), "-o", str(tmp_path / "cluster_loss.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    coefficient = struct.pack(">f", 0.9999992614).hex().upper()  # of polynomial_exp2 in csrc/cuda/element.h
    assert coefficient not in (tmp_path / "cluster_loss.ptx").read_text()


def test_the_pure_torch_package_needs_no_compiler(tmp_path: Path) -> None:
    result = build(tmp_path, CXX="/nowhere/g++", DAPO_KERNELS_CPP="0")
    assert result.returncode == 0, result.stderr
    assert "is absent from the `packages`" not in result.stderr
    assert not list(tmp_path.rglob("_C*.so"))
    (losses,) = tmp_path.rglob("dapo_kernels/losses.py")
    built = losses.parent.parent
    assert (built / "dapo_kernels" / "py.typed").exists()
    assert (built / "dapo_runner" / "py.typed").exists()
    recipes = [
        {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.yaml")}
        for folder in (built / "dapo_runner" / "recipes", ROOT / "recipes")
    ]
    assert recipes[0] == recipes[1] != {}
    page = built / "dapo_runner" / "tools" / "page"
    assert {path.suffix for path in page.glob("page.*")} == {".html", ".css", ".js"}


def test_an_editable_installation_is_a_path(tmp_path: Path) -> None:
    """Type checkers do not run an import hook."""
    command = ["egg_info", "--egg-base", str(tmp_path), "editable_wheel", "--dist-dir", str(tmp_path)]
    environment = os.environ | {"DAPO_KERNELS_CPP": "0"}
    whole = [sys.executable, "setup.py", "-q", *command]
    subprocess.run(whole, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [archive.read(name).decode() for name in archive.namelist() if ".dist-info" not in name]
    assert path.strip() == str(ROOT)


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
    assert {name for name in listed.stdout.split() if (ROOT / name).exists()} - names <= {".ci/run", ".gitignore"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    # What an index shows leads to places that are there.
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert "![" not in text
