"""The backends' suite, elsewhere: Triton interpreted, CUDA emulated, other instruction sets, each in its process."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUITE = ["test_backends.py", "test_layouts.py", "test_golden.py", "test_distillation.py", "test_edges.py"]
SMOKE = "test_a_backend_reaches_the_golden_values or (test_rows and 1031) or (test_parts_are_the_whole and two)"
FULL = "not thread_count"
ISAS = ("avx512bf16", "avx512", "avx2", "portable")
CALL = """
import torch
from dapo_kernels import _C, token_logprobs
token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]))
print(_C.isa())
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def suite(files: list[str], *options: str, **environment: str) -> None:
    # The configuration's -q and another one would leave out the line with the counts.
    plain = ("-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-x")
    paths = (str(HERE / name) for name in files)
    done = python("-m", "pytest", *plain, "-m", "not slow and not gpu", *options, *paths, **environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = done.stdout.splitlines()[-1]
    assert " passed" in counts, done.stdout[-2000:]
    assert "skipped" not in counts, done.stdout[-2000:]


@pytest.fixture
def chosen(pytestconfig: pytest.Config) -> str:
    return SMOKE if pytestconfig.getoption("--smoke") else FULL


@pytest.mark.elsewhere
def test_triton_interpreted(chosen: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    suite(SUITE, "--backends", "triton", "-k", f"({chosen}) and not caches", TRITON_INTERPRET="1")
    suite(["triton_suite.py"], TRITON_INTERPRET="1")


def emulation(folder: Path) -> Path:
    import pybind11

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (apt install g++)")
    out = folder / "emulation.so"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    flags += ["-ffp-contract=off", "-DDAPO_ISA=portable"]
    flags += [f'-DDAPO_{name}="none"' for name in ("CUDA_ARCHS", "CUDA_TOOLKIT", "SOURCES")]
    flags += ["-U_FORTIFY_SOURCE", f"-I{HERE / 'cuda_host'}"]  # it takes a jump to another stack for an attack
    flags += shlex.split(os.environ.get("EMULATION_FLAGS", ""))  # of `make sanitize`
    flags += [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_paths()["include"])]
    sources = [ROOT / "csrc/bindings_cuda.cpp", ROOT / "csrc/cuda/launch.cpp", HERE / "cuda_emulation.cpp"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(out)], check=True)
    return out


@pytest.mark.elsewhere
def test_cuda_emulated(tmp_path: Path, chosen: str) -> None:
    emulated = {"CUDA_EMULATION": str(emulation(tmp_path))}
    suite(SUITE, "-p", "emulated_cuda", "--backends", "cuda", "-k", f"({chosen}) and not caches", **emulated)
    more = ("-k", "clusters or path_of_a_device") if chosen == SMOKE else ()
    suite(["cuda_suite.py"], "-p", "emulated_cuda", *more, **emulated)


@pytest.mark.elsewhere
@pytest.mark.parametrize("isa", ISAS)
def test_another_instruction_set(isa: str, chosen: str) -> None:
    pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    probe = python("-c", CALL, DAPO_KERNELS_ISA=isa)
    if probe.returncode != 0:
        assert f"DAPO_KERNELS_ISA={isa}" in probe.stderr, probe.stderr[-2000:]
        pytest.skip(f"this processor does not run {isa}")
    assert probe.stdout.strip() == isa
    if python("-c", CALL).stdout.strip() == isa:
        pytest.skip(f"{isa} is what this processor chooses: every other test runs on it")
    suite(SUITE, "--backends", "cpp", "-k", f"({chosen}) or any_bits", DAPO_KERNELS_ISA=isa)


def test_an_unknown_instruction_set_is_an_error_not_a_crash() -> None:
    pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    done = python("-c", CALL, DAPO_KERNELS_ISA="sse9")
    assert done.returncode == 1, f"exit status {done.returncode}: {done.stderr[-500:]}"
    assert all(name in done.stderr for name in ("sse9", *ISAS))
