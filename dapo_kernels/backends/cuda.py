"""The "cuda" backend: launchers of the CUDA C++ kernels. Allocate, describe tensors as pointers and strides, call.

float32, bfloat16 and float16 logits on a CUDA device with compute capability 8.0 or later, on torch's current stream.
No function reads values or allocates outside torch's allocator, so calls can be captured in a CUDA graph, after an
earlier call of the same kind. A row's results do not depend on the other rows, to the bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import dapo_kernels._cuda as _cuda
from dapo_kernels.backends import divergence, registry
from dapo_kernels.backends.divergence import Distance
from dapo_kernels.backends.norms import merge_cpp_norms
from dapo_kernels.backends.reference import check_rows, slopes_of_stats, unit_stride
from dapo_kernels.backends.residency import gpu_of, programs
from dapo_kernels.backends.structs import address, objective_of, outputs, row_inputs, rows_of, token_inputs
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, Slopes, TokenLoss, Tokens, on_host

SOFTCAP_COPIES = False  # the kernels apply it
gather_kept = None
merge_norms = merge_cpp_norms
# How the loss of a row is computed: chosen by device and shape ("automatic"), or a name of _cuda.Path. The results are
# bit-identical, which the tests check.
PATH = "automatic"
# Of sweep_loss (csrc/cuda/sweep_loss.cu, tiles.h): 256 threads for each of up to three slices of 40 KiB, 768 per SM,
# each thread with four 16-byte loads in flight.
_THREADS, _GROUPS, _SLICE_BYTES, _LOADS = 256, 3, 40 * 2**10, 4 * 16


# Kernels that this process has launched: by device and whatever selects the code.
_launched: set[tuple[Any, ...]] = set()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0  # CPU: emulated, in tests


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Select the tensors' device: CUDA launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_capture(device: torch.device, *kernel: Any) -> None:
    """Raise an error at a kernel's first launch while a graph is captured: it loads code and queries the device."""
    key = (device, *kernel)
    if device.type != "cuda" or key in _launched:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"dapo_kernels: the first call of {kernel[0]} with these options loads its code, which is not possible "
            "while a CUDA graph is captured. Make the same call once before the capture."
        )
    _launched.add(key)


def sweep_room(row_bytes: int) -> tuple[int, int]:
    """Return the number of rows that fit into an SM in ``sweep_loss``, and the bytes that each has in flight."""
    groups = max(1, min(_GROUPS, -(-row_bytes // _SLICE_BYTES)))
    return _GROUPS // groups, groups * _THREADS * _LOADS


def _rows_swept(n_rows: int, logits: Tensor) -> int:
    """Return the number of blocks that share the rows in ``sweep_loss``."""
    row_bytes = logits.shape[-1] * logits.element_size()
    return programs(gpu_of(logits.device), n_rows, row_bytes, *sweep_room(row_bytes))


def _workspace(rows: Any, device: torch.device) -> Tensor:
    return torch.empty(_cuda.workspace_bytes(rows), dtype=torch.uint8, device=device)


def row_stats(logits: Tensor, request: RowRequest) -> RowStats:
    check_rows(request, logits.shape[-1])
    logits = unit_stride(logits)
    device = logits.device
    stats = RowStats.empty(request)
    rows = rows_of(_cuda, logits)
    work = _workspace(rows, device)
    with _on(device):
        _check_capture(device, "row_stats", logits.dtype, request.want_entropy or request.softcap is not None)
        _cuda.row_stats(
            rows,
            row_inputs(_cuda, request),
            request.softcap or 0.0,
            outputs(_cuda, stats),
            work.data_ptr(),
            _stream(device),
        )
    return stats


def row_grad(
    out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
) -> None:
    source, to = unit_stride(logits), unit_stride(out)
    device = source.device
    rows = rows_of(_cuda, source)
    work = _workspace(rows, device)
    with _on(device):
        _check_capture(device, "row_grad", source.dtype, slopes.entropy is not None or request.softcap is not None)
        _cuda.row_grad(
            rows,
            row_inputs(_cuda, request),
            request.softcap or 0.0,
            rows_of(_cuda, to),
            stats.norm.data_ptr(),
            address(stats.entropy),
            slopes.logprobs.data_ptr(),
            address(slopes.entropy),
            work.data_ptr(),
            _stream(device),
        )
    if to is not out:
        out.copy_(to)


def row_slopes(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
    return slopes_of_stats(row_stats(logits, request), tokens, scalars, token_loss)


def row_loss_(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
    check_rows(request, logits.shape[-1])
    work = unit_stride(logits)
    device = work.device
    result = RowsLoss.empty(request, scalars.kl_coef != 0)
    losses = torch.empty_like(result.logprobs, dtype=torch.float64)
    rows = rows_of(_cuda, work)
    scratch = _workspace(rows, device)
    with _on(device):
        _check_capture(device, "row_loss")  # the first answer of choose_path loads a kernel
        options = request.want_entropy or request.softcap is not None, work.shape[-1], _cuda.choose_path(rows), PATH
        _check_capture(device, "row_loss", work.dtype, *options)
        _cuda.row_loss(
            rows,
            row_inputs(_cuda, request, tokens),
            request.softcap or 0.0,
            objective_of(_cuda, scalars),
            scalars.entropy_coef,
            outputs(_cuda, result),
            losses.data_ptr(),
            scratch.data_ptr(),
            getattr(_cuda.Path, PATH),
            _rows_swept(request.live.numel(), work),
            _stream(device),
        )
    if work is not logits:
        logits.copy_(work)
    return result._replace(loss=losses.sum().to(torch.float32))


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    device = logprobs.device
    result = TokenLoss.empty(logprobs, scalars.kl_coef != 0)
    losses = torch.empty_like(logprobs, dtype=torch.float64)
    inputs, out, objective = (
        token_inputs(_cuda, tokens, log_ratio),
        outputs(_cuda, result),
        objective_of(_cuda, scalars),
    )
    with _on(device):
        _check_capture(device, "token_loss")
        _cuda.token_loss(
            logprobs.numel(), logprobs.data_ptr(), inputs, objective, out, losses.data_ptr(), _stream(device)
        )
    return result._replace(loss=losses.sum().to(torch.float32))


def row_divergence_(
    logits: Tensor, ref_logits: Tensor, request: RowRequest, weights: Tensor, distance: Distance
) -> Tensor:
    """Use the Triton kernel if Triton is available, else eager torch: the module has no kernel for it."""
    by_triton = not on_host(logits) and registry.available_backends()["triton"] is None
    by: Any = registry.backend("triton") if by_triton else divergence
    found: Tensor = by.row_divergence_(logits, ref_logits, request, weights, distance)
    return found


def weight_sum(result: Tensor) -> None:
    return None
