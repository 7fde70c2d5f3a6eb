"""Triton's launchers: what a launch follows from, and that batches of other shapes compile nothing anew."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from rows import OPTIONS, problem, random_rows
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from dapo_kernels.backends import residency, triton
from dapo_kernels.backends.divergence import Distance
from dapo_kernels.backends.triton import divergence
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.objectives.table import OBJECTIVES
from dapo_kernels.records import RowRequest, Slopes

H100 = GPUTarget("cuda", 90, 32)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def bfloat16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def test_rows_are_aligned_where_all_start_on_16_bytes() -> None:
    for rows, aligned in (
        (bfloat16(4, 128), True),
        (bfloat16(4, 24), True),  # a multiple of 8 is enough
        (bfloat16(4, 37), False),
        (bfloat16(4, 40)[:, :37], True),
        (bfloat16(513)[1:].view(4, 128), False),
        (bfloat16(4096).as_strided((2, 3, 64), (259, 64, 1)), False),
        (bfloat16(2, 4, 64).transpose(0, 1), True),
    ):
        assert (triton._shape(rows)["VEC"] > 1) is aligned
        assert (triton._shape(bfloat16(4, 128), rows)["VEC"] > 1) is aligned  # of both


def test_warps_of_64_threads_are_half_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD's GPUs: the module as a ROCm build of torch imports it."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    spec = importlib.util.find_spec("dapo_kernels.backends.triton")
    amd: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(amd)
    assert [amd._shape(torch.empty(1, v))["num_warps"] for v in (37, 12_288, 151_936)] == [4, 16, 16]


def test_nothing_is_compiled_again_for_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own key of a launch, at batches of other sizes, layouts and positions in memory."""
    backend, keys = make_backend(H100), dict[str, set[str]]()

    def bound(kernel: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        keys.setdefault(kernel.__name__, set()).add(str(bind(*args, **meta)[1]))

    monkeypatch.setattr(JITFunction, "run", bound)
    p = problem(random_rows(512, torch.bfloat16), **OPTIONS["entropy"])
    for shape in ((1,), (2,), (16,), (31,), (1, 1), (2, 16), (3, 5)):
        for first in (0, 1, 3):  # per-token tensors that start anywhere
            n = torch.Size(shape).numel()
            at = (torch.arange(n + first) % 7)[first:]
            logits = torch.zeros(*shape, 512, dtype=torch.bfloat16)
            if shape == (1, 1):  # as in a padded batch beyond 2³¹ elements
                logits = logits.as_strided((1, 1, 512), (2**32, 512, 1))
            request, tokens = p.request.at(at), p.tokens.at(at)
            per_token = torch.zeros(n + first)[first:]
            for number in (0.2, 1, np.float32(0.2)):
                some = ObjectiveScalars.of(replace(OBJECTIVES["grpo"], clip_low=number, entropy_coef=number))
                triton.row_loss_(logits, request, tokens, some)
                triton.token_loss(per_token, per_token, tokens, some)
            request = RowRequest(request.target_ids, request.live, 1.0, None, True)
            stats = triton.row_stats(logits, request)
            triton.row_grad(logits, logits, request, stats, Slopes(per_token, per_token))
    # One layout each, [N, V]; the padded one differs in its strides' divisibility only when they are 0.
    assert {name: len(found) for name, found in keys.items()} == dict.fromkeys(keys, 1)
    assert len(keys) == 4


def forget_launches() -> None:
    divergence.row_divergence_kernel.device_caches.clear()
    triton._held.clear()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The programs of each launch on an H100 that is not there: an SM holds one at 40 registers, two are planned."""
    found: list[int] = []
    utils = SimpleNamespace(
        load_binary=lambda *of: (object(), object(), 40, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 2**17},
        unload_module=lambda *of: None,
    )
    h100 = SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda programs, *of: found.append(programs),
        get_current_target=lambda: H100,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", h100)
    forget_launches()
    yield found
    forget_launches()


def diverge(rows: Tensor) -> None:
    """Launch the divergence's kernel with a CPU's tensors, which the driver does not look into."""
    n = rows.shape[0]
    request = RowRequest(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), 1.0, None, False)
    triton.row_divergence_(rows, rows.clone(), request, torch.ones(n), Distance(0.0, None, None))


def test_a_capture_compiles_nothing(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a kernel says what to do; one that was compiled before is launched."""
    launched: list[tuple[Any, ...]] = []
    with monkeypatch.context() as patch:  # the arguments of a launch
        patch.setattr(JITFunction, "run", lambda kernel, *args, **how: launched.append((args, how)))
        diverge(torch.zeros(3, 64))
    ((args, how),) = launched
    programs, _ = how.pop("grid")[0], how.pop("warmup")

    def launch(capturing: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        triton.launch(divergence.row_divergence_kernel, programs, GPU, *args, **how)

    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.raises(RuntimeError, match="row_divergence_kernel"):
        launch(capturing=True)
    assert started == []
    assert knobs.runtime.jit_cache_hook is None
    launch(capturing=False)
    launch(capturing=True)
    assert started == [3, 3]


def test_fusion_does_not_depend_on_the_default_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Triton 3.9 warns of in every process, and 3.10 changes."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **options: asked.append(options))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    triton.launch(divergence.row_divergence_kernel, 3, GPU, num_warps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_backend(H100).parse_options(asked[0]).enable_fp_fusion


def test_programs_follow_the_registers_that_were_used(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher learns from the first launch how many programs an SM holds."""
    gpu = residency.Gpu(multiprocessors=2, l2_bytes=5 * 2**20, bytes_per_s=1e9)
    monkeypatch.setitem(residency.GPUS, CPU, gpu)
    rows = torch.zeros(9, 2**17)  # with the reference's 1 MiB each: three fit into two thirds of the cache
    diverge(rows)
    diverge(rows)
    assert started == [3, 9]  # two SMs hold four programs as planned; two, one after the other, as it is
    assert list(triton._held.values()) == [1]
