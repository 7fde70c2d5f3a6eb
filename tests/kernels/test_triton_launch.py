"""Triton's launchers: what a launch follows from, and that batches of other shapes compile nothing anew."""

from __future__ import annotations

import contextlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from dapo_kernels import OBJECTIVES
from dapo_kernels.backends import triton
from dapo_kernels.backends.divergence import Distance
from dapo_kernels.backends.triton import divergence, kernels
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, Slopes, Tokens


def test_the_launch_follows_the_row_alone() -> None:
    picked = {(v, b): triton.launch_for(v, b).num_warps for v in (2, 6144, 6145, 32_000, 151_936) for b in (2, 4)}
    assert picked == {
        (2, 2): 4, (2, 4): 4, (6144, 2): 4, (6144, 4): 8, (6145, 2): 8, (6145, 4): 16,
        (32_000, 2): 32, (32_000, 4): 32, (151_936, 2): 32, (151_936, 4): 32,
    }  # fmt: skip
    shape = triton._shape(torch.empty(1, 151_936, dtype=torch.bfloat16))
    assert shape == {"BLOCK_V": 16_384, "VEC": 8, "HAS_REST": False, "num_warps": 32}
    odd = triton._shape(torch.empty(1, 151_937, dtype=torch.bfloat16))
    assert odd == {"BLOCK_V": 8_192, "VEC": 1, "HAS_REST": False, "num_warps": 32}
    assert triton._shape(torch.empty(1, 40)[:, :37])["BLOCK_V"] == 64
    assert triton._shape(torch.empty(1, 37))["BLOCK_V"] == 64
    assert triton._shape(torch.empty(1, 8, dtype=torch.bfloat16)[:, :2])["BLOCK_V"] == 128  # 16 running sums


def test_the_launch_says_what_triton_specializes_on() -> None:
    vocabs = (1, 15, 16, 50_256, 50_257, 50_264, 50_272)
    rests = {v: triton._shape(torch.empty(1, 50_272)[:, :v])["HAS_REST"] for v in vocabs}
    assert rests == {1: True, 15: True, 16: False, 50_256: False, 50_257: True, 50_264: True, 50_272: False}


def test_rows_are_aligned_where_all_start_on_16_bytes() -> None:
    flat = torch.empty(4096, dtype=torch.bfloat16)
    rows = {
        "even": flat[:512].view(4, 128),
        "a multiple of 8 is enough": flat[: 4 * 24].view(4, 24),
        "odd": flat[: 4 * 37].view(4, 37),
        "padded": flat[:160].view(4, 40)[:, :37],
        "shifted": flat[1:513].view(4, 128),
        "odd outer stride": flat.as_strided((2, 3, 64), (259, 64, 1)),
        "transposed back": flat[:512].view(2, 4, 64).transpose(0, 1),
    }
    found = {name: triton._shape(x)["VEC"] > 1 for name, x in rows.items()}
    unaligned = {"odd", "shifted", "odd outer stride"}
    assert found == {name: name not in unaligned for name in rows}
    assert triton._shape(rows["even"], rows["odd"])["VEC"] == 1  # of both


def test_warps_of_64_threads_are_half_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MAX_WARPS", 16)
    assert [triton._shape(torch.empty(1, v))["num_warps"] for v in (37, 12_288, 151_936)] == [4, 16, 16]


def test_nothing_is_compiled_again_for_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own key of a launch, at batches of other sizes, layouts and positions in memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    if not hasattr(kernels.row_loss_kernel, "params"):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys: dict[str, set[str]] = {}

    def launch(kernel: Any, programs: int, device: torch.device, *args: Any, **meta: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, _ = bind(*args, **meta)
        keys.setdefault(kernel.__name__, set()).add(str(specialization))

    monkeypatch.setattr(triton, "launch", launch)
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])
    for shape in ((1,), (2,), (16,), (31,), (1, 1), (2, 16), (3, 5)):
        for first in (0, 1, 3):  # per-token tensors that start anywhere
            n = torch.Size(shape).numel()
            per_token = torch.zeros(n + first)[first:]
            ids = torch.zeros(n + first, dtype=torch.int64)[first:]
            live = torch.ones(n + first, dtype=torch.bool)[first:]
            logits = torch.zeros(*shape, 512, dtype=torch.bfloat16)
            if shape == (1, 1):  # as in a padded batch beyond 2³¹ elements
                logits = logits.as_strided((1, 1, 512), (2**32, 512, 1))
            tokens = Tokens(live, *(per_token,) * 4, None)
            for low in (0.2, 1):  # an int is a number too
                some = scalars._replace(clip_low=low, entropy_coef=0.1)
                triton.row_loss_(logits, RowRequest(ids, live, 1.0, per_token + 1, True), tokens, some)
                triton.token_loss(per_token, per_token, tokens, some)
            request = RowRequest(ids, live, 1.0, None, True)
            stats = triton.row_stats(logits, request)
            triton.row_grad(logits, logits, request, stats, Slopes(per_token, per_token))
    # One layout each, [N, V]; the padded one differs in its strides' divisibility only when they are 0.
    assert {name: len(found) for name, found in keys.items()} == dict.fromkeys(keys, 1)
    assert len(keys) == 4


class Driver:
    """In place of Triton's driver of a GPU: an H100 on which nothing runs. ``registers``: what the compiler used."""

    def __init__(self, registers: int) -> None:
        self.started: list[int] = []
        properties = SimpleNamespace(max_shared_mem=2**17)
        self.utils = SimpleNamespace(
            load_binary=lambda *of: (object(), object(), registers, 0, 1024),
            get_device_properties=lambda device: vars(properties),
            unload_module=lambda *of: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda programs, *of: self.started.append(programs)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver of a GPU for kernels that nobody has launched yet, and the rows that it is given."""
    from triton.runtime import driver

    if not hasattr(kernels.row_loss_kernel, "params"):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    found = Driver(registers=40)
    monkeypatch.setattr(driver, "_active", found)
    for kernel in (kernels.row_loss_kernel, divergence.row_divergence_kernel):
        kernel.device_caches.clear()
    triton._held.clear()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    start = triton.launch  # the tensors are a CPU's, as torch has no GPU here
    on_gpu = torch.device("cuda")
    monkeypatch.setattr(triton, "launch", lambda kernel, n, _, *args, **meta: start(kernel, n, on_gpu, *args, **meta))
    yield found
    for kernel in (kernels.row_loss_kernel, divergence.row_divergence_kernel):
        kernel.device_caches.clear()
    triton._held.clear()


def diverge(rows: torch.Tensor) -> None:
    """Launch the divergence's kernel as the call on a GPU does, with tensors that the driver does not look into."""
    n = rows.shape[0]
    live, ids = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    triton.row_divergence_(
        rows, rows.clone(), RowRequest(ids, live, 1.0, None, False), torch.ones(n), Distance(0.0, None, None)
    )


def test_a_capture_compiles_nothing(h100: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a kernel says what to do; one that was compiled before is launched."""
    import triton as triton_package

    rows = torch.zeros(3, 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="row_divergence_kernel"):
        diverge(rows)
    assert h100.started == []
    assert triton_package.knobs.runtime.jit_cache_hook is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    diverge(rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    diverge(rows)
    assert h100.started == [3, 3]


def test_programs_follow_the_registers_that_were_used(h100: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 registers an SM holds one program of 32 warps, which the launcher learns from the first launch."""
    from dapo_kernels.backends import residency

    gpu = residency.Gpu(multiprocessors=2, l2_bytes=5 * 2**20, bytes_per_s=1e9)
    monkeypatch.setattr(residency, "gpu_of", lambda device: gpu)
    rows = torch.zeros(9, 2**17)  # with the reference's 1 MiB each: three fit into two thirds of the cache
    diverge(rows)
    diverge(rows)
    assert h100.started == [3, 9]  # two SMs hold four programs as planned; two, one after the other, as it is
    assert list(triton._held.values()) == [1]
