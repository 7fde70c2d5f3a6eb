"""Which backend serves CUDA tensors, what is said where it cannot, and the machine code of the built CUDA module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import OPTIONS, problem, random_rows

import dapo_kernels
from dapo_kernels import use_backend
from dapo_kernels.backends import backend_for, covers, registry, sources
from docs.models import cuda_sass

PAGE = Path(__file__).parents[2] / "docs/cuda.md"


def test_which_devices_an_architecture_covers() -> None:
    known = {
        "80": ([(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        "90a": ([(9, 0)], [(8, 9), (10, 0)]),
        "100a": ([(10, 0)], [(10, 3), (9, 0)]),
        "90+PTX": ([(9, 0), (10, 3), (12, 0)], [(8, 9)]),
    }
    for architecture, (runs, does_not) in known.items():
        found = {capability: covers(architecture, capability) for capability in (*runs, *does_not)}
        assert found == {**dict.fromkeys(runs, True), **dict.fromkeys(does_not, False)}, architecture


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The CUDA module, as built for all devices, of which one is here."""
    module = SimpleNamespace(architectures="80+PTX", toolkit="13.0", sources=sources.digest(), device_error=str)
    monkeypatch.setitem(sys.modules, "dapo_kernels._cuda", module)
    monkeypatch.setattr(registry, "_reasons", {"triton": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return module


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.usefixtures("module")
def test_the_first_row_of_the_defaults_that_fits_decides(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device, dtype and vocabulary; where the cuda backend cannot run it is Triton everywhere."""
    hopper = registry.Default("cuda", capability=(9, 0), vocab=100_000, dtypes=(torch.bfloat16,))
    monkeypatch.setitem(registry._reasons, "cuda", None if built else "not built")
    monkeypatch.setattr(registry, "CUDA_DEFAULTS", (hopper, registry.Default("triton")))
    for capability, dtype, vocab, expected in (
        ((9, 0), torch.bfloat16, 151936, "cuda"),
        ((9, 0), torch.bfloat16, 100_000, "cuda"),
        ((8, 0), torch.bfloat16, 151936, "triton"),
        ((10, 0), torch.bfloat16, 151936, "triton"),
        ((9, 0), torch.float32, 151936, "triton"),
        ((9, 0), torch.bfloat16, 32000, "triton"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        found = registry._cuda_default(torch.device("cuda"), dtype, vocab)
        assert found == (expected if built else "triton")


@pytest.mark.usefixtures("module")
def test_the_defaults_are_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 9.0 alone, of the tensors' device, and for no row that takes another kernel."""
    capabilities = dict(enumerate([(9, 0), (8, 0), (8, 9), (9, 1), (10, 0), (12, 0)]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    vocab, longest, in_place = 128_256, registry.CLUSTER_ROW_BYTES // 4, registry.CALLS[0]

    def is_cuda(*, index: int = 0, dtype: torch.dtype = torch.float32, vocab: int = vocab, **options: Any) -> bool:
        found = registry._cuda_default(torch.device("cuda", index), dtype, vocab, **options)
        assert found in ("cuda", "triton")
        return found == "cuda"

    assert longest == 908_800
    assert [index for index in capabilities if is_cuda(index=index)] == [0]
    assert [n for n in (vocab - 1, vocab, longest, longest + 1) if is_cuda(vocab=n)] == [vocab, longest]
    assert [call for call in registry.CALLS if is_cuda(call=call)] == [in_place]
    assert [start for start in (0, 1, 2, 4, 8) if is_cuda(starts=(0, start))] == [0, 4, 8]
    assert not any(is_cuda(dtype=dtype) for dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(
    ("options", "kernel"),
    [({}, ""), ({"entropy": True}, " with entropy"), ({"entropy_coef": 0.01}, " with entropy")],
)
@pytest.mark.usefixtures("module")
def test_the_default_on_hopper_is_not_for_entropies(
    options: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an entropy the loss in place is another kernel, which was not measured."""
    calls: list[str] = []
    monkeypatch.setattr(
        registry, "_default", lambda _device, _dtype, _vocab, call, _starts: calls.append(call) or "torch"
    )
    logits = torch.zeros(2, 8).requires_grad_() * 1
    dapo_kernels.dapo_loss(logits, torch.tensor([0, 1]), None, torch.ones(2), inplace_backward=True, **options)
    assert calls == [f"in place{kernel}"]
    found = registry._cuda_default(torch.device("cuda"), torch.float32, 151_936, *calls)
    assert found == ("triton" if kernel else "cuda")


def test_a_default_can_be_for_one_kind_of_call_and_for_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public function states its own, and where its rows start."""
    seen: list[str] = []
    rows = [registry.Default(f"{call}, aligned", calls=(call,), aligned=True) for call in registry.CALLS]
    rows += [registry.Default(call, calls=(call,), aligned=False) for call in registry.CALLS]

    def default(*given: Any) -> str:
        seen.append(registry._cuda_default(*given))
        return "torch"

    monkeypatch.setattr(registry, "CUDA_DEFAULTS", rows)
    monkeypatch.setattr(registry, "_default", default)
    ids, advantages = torch.tensor([0, 1]), torch.ones(2)
    for vocab, in_place, needs_gradient, loss, stats in (
        (8, True, True, "in place, aligned", "new gradient, aligned"),
        (7, True, True, "in place", "new gradient"),
        (8, False, True, "new gradient, aligned", "new gradient, aligned"),
        (8, True, False, "no gradient, aligned", "no gradient, aligned"),
    ):
        seen.clear()
        how = {"cu_seqlens": torch.tensor([0, 2]), "inplace_backward": in_place}
        for objective in ("dapo", "gspo"):
            logits = torch.zeros(2, vocab).requires_grad_(needs_gradient) * 1
            dapo_kernels.dapo_loss(logits, ids, None, advantages, objective=objective, **how)
        dapo_kernels.token_logprobs(logits, ids, inplace_backward=in_place)
        assert seen == [loss, stats, stats], (vocab, in_place, needs_gradient)
    seen.clear()
    hidden, weight = torch.zeros(2, 4), torch.zeros(7, 4).requires_grad_()
    dapo_kernels.linear_token_logprobs(hidden, weight, ids)
    dapo_kernels.linear_token_logprobs(hidden, weight.detach(), ids)
    # Rows at a distance of 16 bytes, of which the first one starts in between; and rows of a batch that is.
    for logits in (
        torch.zeros(3, 8)[:, 4:],
        torch.zeros(3, 8)[:, 1:],
        torch.zeros(17)[1:].view(2, 8),
        torch.zeros(34).as_strided((2, 2, 8), (17, 8, 1)),
    ):
        dapo_kernels.token_logprobs(logits, torch.zeros(logits.shape[:-1]).long())
    of_rows = ["no gradient, aligned", *["no gradient"] * 3]
    assert seen == ["hidden, aligned", "hidden, no gradient, aligned", *of_rows]


@pytest.mark.parametrize(
    ("name", "absent", "remedy"),
    [("cuda", "dapo_kernels._cuda", "DAPO_KERNELS_CUDA=1"), ("triton", "triton", "pip install triton")],
)
def test_without_its_module_or_a_device_a_backend_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, absent: str, remedy: str
) -> None:
    is_here = importlib.util.find_spec(absent) is not None
    with monkeypatch.context() as patch:
        patch.delitem(registry._reasons, name, raising=False)  # as found once
        patch.setitem(sys.modules, absent, None)  # import raises ImportError
        with pytest.raises(RuntimeError, match=remedy), use_backend(name):
            pass
    if is_here:
        monkeypatch.delitem(registry._reasons, name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="CUDA"), use_backend(name):
            pass


def test_without_a_driver_for_its_runtime_triton_is_the_default(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch brings a runtime of its own, which may be older."""
    for error, expected in (("cudaErrorInsufficientDriver: too old", "triton"), ("", "cuda")):
        monkeypatch.setattr(registry, "_reasons", {})
        module.device_error = lambda error=error: error
        assert registry._cuda_default(torch.device("cuda"), torch.float32, 151_936) == expected
        reason = registry.available_backends()["cuda"]
        assert error in reason if error else reason is None


def test_one_device_has_code_and_another_has_none(module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the tensors counts, not the current one."""
    capabilities, module.architectures = [(8, 9), (9, 0), (7, 5)], "90a"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda x: capabilities[x.index])
    ada, hopper, turing = (torch.device("cuda", index) for index in range(3))
    found = [backend_for("dapo_loss", device, torch.float32, 151_936) for device in (ada, hopper, turing)]
    assert found == ["triton", "cuda", "triton"]
    with use_backend("cuda"):
        assert backend_for("dapo_loss", hopper, torch.float32) == "cuda"
        for device, remedy in ((ada, "DAPO_KERNELS_CUDA_ARCHS for compute capability 8.9"), (turing, "8.0 or later")):
            with pytest.raises(RuntimeError, match=f"dapo_loss: .*{device}: .*{remedy}"):
                backend_for("dapo_loss", device, torch.float32)
    monkeypatch.setattr(registry, "_reasons", {})
    capabilities.remove((9, 0))
    with pytest.raises(RuntimeError, match=r"use_backend: .*DAPO_KERNELS_CUDA_ARCHS.*8\.9"), use_backend("cuda"):
        pass


needs_module = pytest.mark.skipif(
    importlib.util.find_spec("dapo_kernels._cuda") is None,
    reason="dapo_kernels._cuda is not built (no nvcc when the package was installed)",
)


@needs_module
def test_the_module_imports_without_a_gpu_and_an_error_says_where() -> None:
    from dapo_kernels import _cuda

    assert _cuda.architectures
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: tests/kernels/test_gpu.py runs on it")
    assert _cuda.device_error().startswith("cudaError")
    rows = _cuda.Rows(0, 4, 151936, 4, 0, 151936, 1)
    with pytest.raises(RuntimeError, match=r"csrc/cuda/launch\.cpp:\d+: cudaGetDevice\(.*\): cudaError\w+: "):
        _cuda.choose_path(rows)


@needs_module
def test_a_capture_loads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_kernels.backends import cuda

    device = torch.device("cuda", 99)  # where nothing has been launched

    def launch(dtype: torch.dtype, capturing: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        cuda._check_capture(device, "row_stats", dtype)

    with pytest.raises(RuntimeError, match="row_stats"):
        launch(torch.float32, capturing=True)
    launch(torch.float32, capturing=False)
    launch(torch.float32, capturing=True)
    with pytest.raises(RuntimeError, match="row_stats"):
        launch(torch.bfloat16, capturing=True)

    # The path of a row is asked for after the check: a device's first answer loads a kernel.
    def refuse(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(cuda, "_check_capture", refuse)
    monkeypatch.setattr(cuda._cuda, "choose_path", lambda _: pytest.fail("asked before the check"))
    p = problem(random_rows(37, torch.float32), **OPTIONS["plain"])
    with pytest.raises(InterruptedError):
        cuda.row_loss_(p.logits, p.request, p.tokens, p.scalars)


# --- machine code -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels() -> list[cuda_sass.Kernel]:
    if cuda_sass.tool("cuobjdump") is None:
        pytest.skip("no cuobjdump (in the CUDA toolkit and in the triton package)")
    return cuda_sass.examine()


def check_accesses(kernel: cuda_sass.Kernel) -> None:
    """Bulk copies in the cluster kernels; 128-bit accesses in every loop over logits; hints for the cache where a
    gradient is written from logits in memory.
    """
    if kernel.name == "cluster_loss":
        assert kernel.bulk_copies > 0, kernel
        assert kernel.gpu_fences == 1, kernel  # before the first row, none from row to row
        assert kernel.shared_loads128 >= 8, kernel  # four of each sweep
        assert kernel.shared_bytes <= 2048, kernel  # 1 KiB is the system's
        assert kernel.evict_first < kernel.stores128, kernel  # the zeros of dead rows, not the gradients
    else:
        assert kernel.loads128 >= 4, kernel
        written = kernel.name in ("sweep_loss", "slice_grad")
        assert kernel.evict_first >= 8 if written else kernel.evict_first == 0, kernel  # four loads, four stores
    if "stats" not in kernel.name:
        assert kernel.stores128 >= 4, kernel


@needs_module
@pytest.mark.elsewhere
def test_machine_code(kernels: list[cuda_sass.Kernel]) -> None:
    """No spills, no double precision in a row, the planned occupancy; and the page has a row of each kernel."""
    assert {k.name for k in kernels} >= {"cluster_loss", "sweep_loss", "slice_stats", "slice_grad", "token_loss"}
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for kernel in kernels:
        assert kernel.local_bytes == kernel.local_accesses == 0, kernel
        if kernel.name != "token_loss":  # one number a token, and no row waits for it
            assert kernel.doubles == 0, kernel
        if kernel.occupancy is not None:
            threads, blocks = kernel.occupancy
            assert -(-kernel.registers // 8) * 8 * threads * blocks <= cuda_sass.REGISTERS, kernel
            check_accesses(kernel)
            assert any(f"`{kernel.name}" in row for row in shown), kernel.name
