"""The "triton" backend: launchers of the Triton kernels.

For CUDA tensors; for CPU tensors under ``TRITON_INTERPRET=1``, in tests. No function reads values, allocates memory
outside torch's allocator or depends on the stream, so calls can be captured in a CUDA graph, if the kernels were
compiled by an earlier call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dapo_kernels.backends import residency
from dapo_kernels.backends.divergence import Distance
from dapo_kernels.backends.norms import merge_triton_norms
from dapo_kernels.backends.reference import check_rows, slopes_of_stats, unit_stride
from dapo_kernels.backends.triton import divergence, kernels
from dapo_kernels.objectives.surrogate import N_PER_TOKEN, ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, Slopes, TokenLoss, Tokens

SOFTCAP_COPIES = False  # the kernels apply it
gather_kept = None
merge_norms = merge_triton_norms


class Launch(NamedTuple):
    """How many warps share a row, and how many rows fill an SM of 64 warps."""

    row_bytes: int | None  # rows up to this size
    num_warps: int
    rows_per_sm: int  # the most that the divergence has in flight (``programs_for``)

    def warps(self, vec: int) -> int:
        """Return how many warps share a row whose accesses take VEC logits."""
        return self.num_warps if vec > 1 else min(self.num_warps, NARROW_WARPS)

    def block(self, vec: int) -> int:
        """Return the number of logits per step of the loops."""
        return 32 * self.warps(vec) * (LOADS * vec if vec > 1 else NARROW_LOADS)


# 128-bit accesses that a thread has in flight. With four, ptxas spills if there is a softcap.
LOADS = 2
# The same for accesses of one logit, for rows that do not start at 16-byte boundaries. More warps than NARROW_WARPS,
# which take more than 32 registers for such rows, would leave an SM one row at a time.
NARROW_LOADS, NARROW_WARPS = 8, 16
# Limits of the registers of a thread: with 32 an SM is full. Without a limit ptxas takes up to 46 where 32 are enough:
# one row of 32 warps to an SM instead of two. With soft caps, mixtures of two rows and rows on other boundaries, 32
# would spill. tests/kernels/test_triton_compile.py checks every kernel.
FULL_SM_REGISTERS, MAX_REGISTERS = 32, 64
# The longer the row, the more warps share it. Of 8, 16 and 32 warps, 16 are the fastest for rows of 62 KiB on an H200,
# and 32 from 125 KiB on (benchmarks/results/gpu-kernels-nvidia-h200-20261127.md). Other rows were not measured.
LAUNCHES = (
    Launch(12 * 2**10, 4, 16),
    Launch(24 * 2**10, 8, 8),
    Launch(96 * 2**10, 16, 4),
    Launch(None, 32, 2),
)
# A program has at most 1024 threads; a warp of AMD's larger GPUs has 64.
MAX_WARPS = 32 if torch.version.hip is None else 16
_BLOCK_T = 256
_SCALING_PROGRAMS = 4  # of the scaling kernel, per SM; not tuned
# How many rows an SM holds, of kernels that have been launched: by kernel, device, dtype and compile-time options.
_held: dict[tuple[Any, ...], int] = {}


def launch_for(vocab: int, itemsize: int) -> Launch:
    """Return the launch for a row size. It depends on nothing else: a row gives the same bits with any number of rows,
    and at any 16-byte boundary. Elsewhere the last bits may differ, but are the same at all such positions.
    """
    return next(x for x in LAUNCHES if x.row_bytes is None or vocab * itemsize <= x.row_bytes)


def _aligned(rows: Tensor) -> bool:
    """Return whether every row starts at a 16-byte boundary."""
    strides = (stride * rows.element_size() for stride in rows.stride()[:-1])
    return all(distance % 16 == 0 for distance in (rows.data_ptr(), *strides))


def _row_size(logits: Tensor) -> tuple[int, int]:
    return logits.shape[-1], logits.element_size()


def _vec(*rows: Tensor) -> int:
    """Return the logits per access: 128 bits if all rows allow it, else 1."""
    return 16 // rows[0].element_size() if all(map(_aligned, rows)) else 1


def _shape(logits: Tensor, *others: Tensor, is_large: bool = False) -> dict[str, Any]:
    """Return the kernel's block sizes. ``HAS_REST`` repeats what Triton specializes V on, so it adds no compilation.

    Args:
        is_large: the kernel needs more registers than ``FULL_SM_REGISTERS``.
    """
    vocab, itemsize = _row_size(logits)
    chosen, vec = launch_for(vocab, itemsize), _vec(logits, *others)
    registers = MAX_REGISTERS if is_large or vec == 1 else FULL_SM_REGISTERS
    return {
        # At least 16 running sums, because each logit after the last multiple of VEC takes one.
        "BLOCK_V": min(chosen.block(vec), max(16 * vec, triton.next_power_of_2(vocab))),
        "VEC": vec,
        "HAS_REST": vec > 1 and vocab % 16 != 0,
        "num_warps": min(chosen.warps(vec), MAX_WARPS),
        **({"maxnreg": registers} if torch.version.hip is None else {}),
    }


def programs_for(n_rows: int, rows: tuple[Tensor, ...], step: int, held: int | None = None) -> int:
    """Return how many programs share the rows of a kernel that reads each of ``rows`` more than once.

    Args:
        step: number of logits that a program reads of each at a time.
        held: how many programs the registers of an SM hold; None: not known yet.
    """
    vocab, itemsize = _row_size(rows[0])
    planned = launch_for(vocab, itemsize).rows_per_sm
    held = planned if held is None else min(planned, held)
    sizes = vocab * itemsize * len(rows), step * itemsize * len(rows)
    return residency.programs(residency.gpu_of(rows[0].device), n_rows, sizes[0], held, sizes[1])


def launch(kernel: Any, programs: int, device: torch.device, *args: Any, **meta: Any) -> Any:
    """Start a kernel on the tensors' device: Triton launches on the current one. Return it as compiled."""
    if not programs:
        return None
    if device.type != "cuda":
        return kernel[(programs,)](*args, **meta)
    # Products and sums are one operation, as with every Triton so far: the default of 3.10 is another.
    with torch.cuda.device(device), _compiled_earlier():
        return kernel[(programs,)](*args, **meta, enable_fp_fusion=True)


@contextmanager
def _compiled_earlier() -> Iterator[None]:
    """Raise an error if a kernel would have to be compiled and loaded while a CUDA graph is captured."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    runtime, before = triton.knobs.runtime, triton.knobs.runtime.jit_cache_hook
    runtime.jit_cache_hook = _refuse_to_compile
    try:
        yield
    finally:
        runtime.jit_cache_hook = before


def _refuse_to_compile(*, fn: Any, **_: Any) -> None:
    if torch.cuda.is_current_stream_capturing():  # another thread may compile
        raise RuntimeError(
            f"dapo_kernels: {fn.name} is not compiled yet for these options and layouts, and cannot be compiled while "
            "a CUDA graph is captured. Make the same call once before the capture."
        )


def _launch_rows(kernel: Any, n_rows: int, rows: tuple[Tensor, ...], *args: Any, **shape: int) -> None:
    """Start a kernel whose programs take rows from a counter, ``Next``."""
    device = rows[0].device
    options = (x if isinstance(x, str | bool) else x is None for x in args)
    key = (kernel, device, rows[0].dtype, *shape.values(), *options)
    n = programs_for(n_rows, rows, shape["BLOCK_V"], _held.get(key))
    counter = torch.full((1,), n, dtype=torch.int32, device=device)
    compiled = launch(kernel, n, device, *args, N=n_rows, Next=counter, **shape)
    if compiled is not None and key not in _held:
        _held[key] = max(1, residency.rows_held(compiled.n_regs, shape["num_warps"]))


def _rows(logits: Tensor) -> tuple[Any, int, int, int]:
    """Return pointer and (inner, stride_outer, stride_inner) of [N, V] or [B, L, V] with a last stride of 1."""
    outer = logits.stride(0) if logits.dim() == 3 else 0
    return logits, max(logits.shape[-2], 1), outer, logits.stride(-2)


def _inputs(logits: Tensor, request: RowRequest) -> tuple[Any, ...]:
    """Return the arguments that all row kernels take."""
    cap = None if request.softcap is None else float(request.softcap)
    tau = (request.temperatures, float(request.temperature))
    return *_rows(logits), logits.shape[-1], request.target_ids, request.live.view(torch.int8), *tau, cap


def row_stats(logits: Tensor, request: RowRequest) -> RowStats:
    check_rows(request, logits.shape[-1])
    logits = unit_stride(logits)
    stats = RowStats.empty(request)
    n, shape = request.target_ids.numel(), _shape(logits, is_large=request.softcap is not None)
    launch(kernels.row_stats_kernel, n, logits.device, *_inputs(logits, request), *stats, **shape)
    return stats


def row_grad(
    out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
) -> None:
    source, to = unit_stride(logits), unit_stride(out)
    launch(
        kernels.row_grad_kernel,
        request.target_ids.numel(),
        source.device,
        *_rows(to),
        *_inputs(source, request),
        *stats[1:],
        *slopes,
        **_shape(source, to, is_large=request.softcap is not None),
    )
    if to is not out:
        out.copy_(to)


def row_slopes(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
    return slopes_of_stats(row_stats(logits, request), tokens, scalars, token_loss)


def row_loss_(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
    check_rows(request, logits.shape[-1])
    work = unit_stride(logits)
    result = RowsLoss.empty(request, scalars.kl_coef != 0)
    losses = torch.empty_like(result.logprobs)
    launch(
        kernels.row_loss_kernel,
        request.target_ids.numel(),
        logits.device,
        *_inputs(work, request),
        *tokens[1:],
        losses,
        *result[1:-1],
        result.idle.view(torch.int8),
        *scalars[:N_PER_TOKEN],
        scalars.entropy_coef or None,
        **_shape(work, is_large=request.softcap is not None),
    )
    if work is not logits:
        logits.copy_(work)
    return result._replace(loss=losses.sum(dtype=torch.float64).to(torch.float32))


def scale_(rows: Tensor, factor: Tensor) -> None:
    """Multiply rows, [V], [N, V] or [B, L, V] with a last stride of 1, by a factor that stays on the device."""
    rows = rows.detach()[None] if rows.dim() == 1 else rows.detach()
    n = rows[..., 0].numel()
    gpu = residency.gpu_of(rows.device)
    programs = n if gpu is None else min(n, _SCALING_PROGRAMS * gpu.multiprocessors)
    shape = {name: value for name, value in _shape(rows).items() if name != "HAS_REST"}
    launch(kernels.scale_kernel, programs, rows.device, *_rows(rows), rows.shape[-1], factor, n, **shape)


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    result = TokenLoss.empty(logprobs, scalars.kl_coef != 0)
    losses = torch.zeros_like(logprobs)
    n = logprobs.numel()
    launch(
        kernels.token_loss_kernel,
        triton.cdiv(n, _BLOCK_T),
        logprobs.device,
        n,
        logprobs,
        log_ratio,
        tokens.live.view(torch.int8),
        tokens.weights,
        tokens.advantages,
        tokens.ref_logprobs,
        tokens.importance_weights,
        losses,
        *result[1:],
        *scalars[:N_PER_TOKEN],
        BLOCK_T=_BLOCK_T,
    )
    return result._replace(loss=losses.sum(dtype=torch.float64).to(torch.float32))


def row_divergence_(
    logits: Tensor, ref_logits: Tensor, request: RowRequest, weights: Tensor, distance: Distance
) -> Tensor:
    found = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    kind = divergence.kind_of(distance.beta)
    is_large = distance.softcap is not None or distance.ref_softcap is not None or kind == divergence.MIXTURE.value
    shape = _shape(logits, ref_logits, is_large=is_large)
    # Half a step: a thread holds logits of two rows, and more would take more than MAX_REGISTERS.
    shape["BLOCK_V"] = max(shape["BLOCK_V"] // LOADS, 16 * shape["VEC"])
    _launch_rows(
        divergence.row_divergence_kernel,
        logits.shape[0],
        (logits, ref_logits),
        logits,
        logits.stride(0),
        ref_logits,
        ref_logits.stride(0),
        logits.shape[1],
        request.live.view(torch.int8),
        request.temperatures,
        float(request.temperature),
        None if distance.softcap is None else float(distance.softcap),
        None if distance.ref_softcap is None else float(distance.ref_softcap),
        weights,
        found,
        float(distance.beta),
        KIND=kind,
        **shape,
    )
    return found


def weight_sum(result: Tensor) -> None:
    return None
