"""The "cuda" backend where there is no GPU: its kernels' headers on the host (``cuda_emulation.cpp``), and the machine
code of the built module.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import cuda_sass
import pytest
import torch

from dapo_kernels import use_backend
from dapo_kernels.backends import covers, registry

pytestmark = pytest.mark.elsewhere
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUITE = ["cuda_suite.py", "test_logits.py", "test_logprobs.py", "test_edges.py", "test_golden.py", "test_objectives.py"]
SUITE += ["test_row_parts.py", "test_aggregation.py", "test_distillation.py", "test_selection.py"]
SMOKE = ["test_golden.py", "test_row_parts.py"]
# Averages over many rows, and vocabularies that take a host minutes thread by thread.
TOO_LARGE = ("real_vocabulary", "eagers_on_average", "long_batch")


def emulation(folder: Path) -> Path:
    import pybind11

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (apt install g++)")
    out = folder / "emulation.so"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    flags += ["-ffp-contract=off", "-DDAPO_ISA=portable", '-DDAPO_CUDA_ARCHS="none"', '-DDAPO_CUDA_TOOLKIT="none"']
    flags += ["-U_FORTIFY_SOURCE", f"-I{HERE / 'cuda_host'}"]  # it takes a jump to another stack for an attack
    flags += [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_paths()["include"])]
    sources = [ROOT / "csrc/bindings_cuda.cpp", ROOT / "csrc/cuda/launch.cpp", HERE / "cuda_emulation.cpp"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(out)], check=True)
    return out


def test_the_suite_under_emulation(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """One test: the module is built once."""
    of_all_backends = SMOKE if pytestconfig.getoption("--smoke") else SUITE[1:]
    path = os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONPATH": path, "CUDA_EMULATION": str(emulation(tmp_path)), "OMP_NUM_THREADS": "1"}
    for backend, modules in (("", SUITE[:1]), ("cuda", of_all_backends)):
        options = ["--backends", backend, "-k", " and ".join(f"not {name}" for name in TOO_LARGE)] if backend else []
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "emulated_cuda"]
        command += ["-m", "not slow and not gpu", *options, *(str(HERE / module) for module in modules)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout or "100%" in done.stdout
        assert "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("architecture", "runs", "does_not"),
    [
        ("80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("100a", [(10, 0)], [(10, 3), (9, 0)]),
        ("90+PTX", [(9, 0), (10, 3), (12, 0)], [(8, 9)]),
    ],
)
def test_which_devices_an_architecture_covers(
    architecture: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]
) -> None:
    assert all(covers(architecture, capability) for capability in runs)
    assert not any(covers(architecture, capability) for capability in does_not)


def test_defaults_hold_for_every_shape_and_are_triton_until_measured() -> None:
    last = registry.CUDA_DEFAULTS[-1]
    assert last == registry.Default("triton")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert registry._cuda_default(torch.device("cuda"), dtype, 151936) == "triton"


def test_a_row_of_the_defaults_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = registry.Default("cuda", capability=(9, 0), vocab=100_000, dtypes=(torch.bfloat16,))
    monkeypatch.setattr(registry, "CUDA_DEFAULTS", (hopper, registry.Default("triton")))
    device = torch.device("cuda")
    for capability, dtype, vocab, expected in (
        ((9, 0), torch.bfloat16, 151936, "cuda"),
        ((8, 0), torch.bfloat16, 151936, "triton"),
        ((9, 0), torch.float32, 151936, "triton"),
        ((9, 0), torch.bfloat16, 32000, "triton"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert registry._cuda_default(device, dtype, vocab) == expected


def test_without_the_module_or_a_device_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_reasons", {})
    monkeypatch.setitem(sys.modules, "dapo_kernels._cuda", None)  # import raises ImportError
    with pytest.raises(RuntimeError, match="DAPO_KERNELS_CUDA=1"), use_backend("cuda"):
        pass


needs_module = pytest.mark.skipif(
    importlib.util.find_spec("dapo_kernels._cuda") is None,
    reason="dapo_kernels._cuda is not built (no nvcc when the package was installed)",
)


@needs_module
def test_the_module_imports_without_a_gpu_and_an_error_says_where() -> None:
    from dapo_kernels import _cuda  # type: ignore[attr-defined]

    assert _cuda.architectures
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: tests/kernels/test_gpu.py runs on it")
    rows = _cuda.Rows(0, 4, 151936, 4, 0, 151936, 1)
    with pytest.raises(RuntimeError, match=r"csrc/cuda/launch\.cpp:\d+: cudaGetDevice\(.*\): cudaError\w+: "):
        _cuda.choose_path(rows)


@needs_module
def test_a_capture_loads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_kernels.backends import cuda

    monkeypatch.setattr(cuda, "_launched", set())
    device, capturing = torch.device("cuda"), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with pytest.raises(RuntimeError, match="row_stats"):
        cuda._check_capture(device, "row_stats", torch.float32)
    capturing[0] = False
    cuda._check_capture(device, "row_stats", torch.float32)
    capturing[0] = True
    cuda._check_capture(device, "row_stats", torch.float32)
    with pytest.raises(RuntimeError, match="row_stats"):
        cuda._check_capture(device, "row_stats", torch.bfloat16)


@needs_module
def test_machine_code() -> None:
    """No spills; bulk copies in the cluster kernels; 128-bit accesses in every loop over logits; planned occupancy;
    hints for the cache where a gradient is written from logits in memory.
    """
    if cuda_sass.tool("cuobjdump") is None:
        pytest.skip("no cuobjdump (in the CUDA toolkit and in the triton package)")
    kernels = cuda_sass.examine()
    assert {k.name for k in kernels} >= {"cluster_loss", "sweep_loss", "slice_stats", "slice_grad", "token_loss"}
    for kernel in kernels:
        assert kernel.local_bytes == 0, kernel
        assert kernel.local_accesses == 0, kernel
        if kernel.name != "token_loss":  # one number a token, and no row waits for it
            assert kernel.doubles == 0, kernel
        if kernel.occupancy is None:
            continue
        threads, blocks = kernel.occupancy
        assert -(-kernel.registers // 8) * 8 * threads * blocks <= cuda_sass.REGISTERS, kernel
        if kernel.name == "cluster_loss":
            assert kernel.bulk_copies > 0, kernel
            assert kernel.gpu_fences == 1, kernel  # before the first row, none from row to row
            assert kernel.shared_loads128 >= 8, kernel  # four of each sweep
            assert kernel.shared_bytes <= 2048, kernel  # 1 KiB is the system's
        else:
            assert kernel.loads128 >= 4, kernel
        if "stats" not in kernel.name:
            assert kernel.stores128 >= 4, kernel
        if kernel.name in ("sweep_loss", "slice_grad"):
            assert kernel.evict_first >= 8, kernel  # four loads, four stores
        elif kernel.name == "cluster_loss":
            assert kernel.evict_first < kernel.stores128, kernel  # the zeros of dead rows, not the gradients
        else:
            assert kernel.evict_first == 0, kernel


@needs_module
def test_the_page_shows_what_the_command_prints() -> None:
    if cuda_sass.tool("cuobjdump") is None:
        pytest.skip("no cuobjdump (in the CUDA toolkit and in the triton package)")
    page = (ROOT / "docs/cuda.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for kernel in cuda_sass.examine():
        if kernel.occupancy is not None:
            assert any(f"`{kernel.name}" in row for row in rows), kernel.name
