"""The "cpp" backend: launchers of the C++ kernels. Allocate, describe tensors as pointers and strides, call.

float32, bfloat16 and float16 logits on the CPU, with torch's number of threads. torch applies the softcap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dapo_kernels._C as _C
from dapo_kernels.backends.divergence import row_divergence_ as row_divergence_
from dapo_kernels.backends.norms import merge_cpp_norms
from dapo_kernels.backends.reference import check_rows, raise_bad_target, raise_bad_temperature, unit_stride
from dapo_kernels.backends.structs import address, lists_of, objective_of, outputs, row_inputs, rows_of, token_inputs
from dapo_kernels.memory import large_tensor
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, Slopes, TokenLoss, Tokens

SOFTCAP_COPIES = True
merge_norms = merge_cpp_norms

_BAD_TARGET, _BAD_TEMPERATURE = 1, 2


def _check(rows: Any, inputs: Any, request: RowRequest, vocab: int) -> None:
    if request.partial:
        return
    fault, row = _C.find_fault(rows, inputs)
    if fault == _BAD_TARGET:
        raise_bad_target(request, row, vocab)
    if fault == _BAD_TEMPERATURE:
        raise_bad_temperature(request, row)


def _scalar(loss: float) -> Tensor:
    return torch.full((), loss, dtype=torch.float32, device="cpu")


def _cap_(logits: Tensor, request: RowRequest) -> Tensor:
    if request.softcap is None:
        return logits
    if not bool(request.live.all()):
        logits.view(-1, logits.shape[-1])[~request.live] = (
            0.0  # dead rows may hold anything, and ``_uncap_`` reads them
        )
    return logits.div_(request.softcap).tanh_().mul_(request.softcap)


def _uncap_(gradient: Tensor, capped: Tensor | None, request: RowRequest) -> None:
    """Convert ∂/∂(c·tanh(x/c)) to ∂/∂x: multiply by 1 − (z/c)²."""
    if capped is not None and request.softcap is not None:
        gradient.mul_(capped.div_(request.softcap).square_().neg_().add_(1.0))


def row_stats(logits: Tensor, request: RowRequest) -> RowStats:
    logits = unit_stride(_cap_(logits, request))
    rows, inputs = rows_of(_C, logits), row_inputs(_C, request)
    _check(rows, inputs, request, logits.shape[-1])
    stats = RowStats.empty(request)
    _C.row_stats(rows, inputs, outputs(_C, stats), torch.get_num_threads())
    return stats


def row_grad(
    out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
) -> None:
    source, to = unit_stride(_cap_(logits, request)), unit_stride(out)
    capped = None if request.softcap is None else source.clone()
    _C.row_grad(
        rows_of(_C, source),
        rows_of(_C, to),
        row_inputs(_C, request),
        stats.norm.data_ptr(),
        address(stats.entropy),
        slopes.logprobs.data_ptr(),
        address(slopes.entropy),
        zeroed and to is out,
        torch.get_num_threads(),
    )
    _uncap_(to, capped, request)
    if to is not out:
        out.copy_(to)


def row_slopes(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
    logits = unit_stride(logits)
    rows, inputs = rows_of(_C, logits), row_inputs(_C, request, tokens)
    _check(rows, inputs, request, logits.shape[-1])
    stats = RowStats.empty(request)
    result = RowsSlopes(
        stats.logprobs,
        *stats,
        clip_hit=torch.empty_like(stats.logprobs, dtype=torch.int8),
        ref_kl=torch.empty_like(stats.logprobs) if scalars.kl_coef != 0 else None,
        d_logprobs=torch.empty_like(stats.logprobs),
        d_entropy=-scalars.entropy_coef * tokens.weights if scalars.entropy_coef != 0 else None,
    )
    objective, out = objective_of(_C, scalars), outputs(_C, result)
    loss = _C.row_slopes(rows, inputs, objective, scalars.entropy_coef, out, torch.get_num_threads())
    return result._replace(loss=_scalar(loss))


def row_loss_(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
    work = unit_stride(_cap_(logits, request))
    capped = None if request.softcap is None else work.clone()
    rows, inputs = rows_of(_C, work), row_inputs(_C, request, tokens)
    _check(rows, inputs, request, work.shape[-1])
    result = RowsLoss.empty(request, scalars.kl_coef != 0)
    objective, out = objective_of(_C, scalars), outputs(_C, result)
    loss = _C.row_loss(rows, inputs, objective, scalars.entropy_coef, out, torch.get_num_threads())
    _uncap_(work, capped, request)
    if work is not logits:
        logits.copy_(work)
    return result._replace(loss=_scalar(loss))


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    result = TokenLoss.empty(logprobs, scalars.kl_coef != 0)
    inputs, out = token_inputs(_C, tokens, log_ratio), outputs(_C, result)
    loss = _C.token_loss(len(logprobs), logprobs.data_ptr(), inputs, objective_of(_C, scalars), out)
    return result._replace(loss=_scalar(loss))


class KeptRows:
    """Kept tokens as rows, one after another, each as long as its list. The kernels treat them like any other rows."""

    def __init__(self, logits: Tensor, request: RowRequest) -> None:
        assert request.kept_ids is not None
        assert request.kept_offsets is not None
        logits = unit_stride(logits)
        self.ids, self.starts = request.kept_ids, request.kept_offsets
        self.logits = torch.empty(self.ids.shape, dtype=logits.dtype, device="cpu")
        self.rows = lists_of(_C, self.logits, self.starts)
        places = torch.empty_like(request.target_ids)
        listed = request.without_others()
        good = _C.gather_kept(
            rows_of(_C, logits),
            row_inputs(_C, listed),
            self.ids.data_ptr(),
            request.partial,
            self.rows,
            places.data_ptr(),
            torch.get_num_threads(),
        )
        if not good:
            check_rows(request, logits.shape[-1])
        self.request = listed._replace(target_ids=places)
        self.capped = None
        if request.softcap is not None:
            self.logits = self.logits.float().div_(request.softcap).tanh_().mul_(request.softcap)
            self.rows = lists_of(_C, self.logits, self.starts)
            if request.partial:
                elsewhere = (self.ids < 0) | (self.ids >= logits.shape[-1])
                self.logits.masked_fill_(elsewhere, -torch.inf)  # its value before the softcap
            self.capped = self.logits.clone()

    def stats(self, request: RowRequest) -> RowStats:
        stats = RowStats.empty(self.request)
        _C.row_stats(self.rows, row_inputs(_C, self.request), outputs(_C, stats), torch.get_num_threads())
        return stats

    def add_gradient_(self, out: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes) -> None:
        to, inputs, threads = unit_stride(out), row_inputs(_C, self.request), torch.get_num_threads()
        _C.row_grad(
            self.rows,
            self.rows,
            inputs,
            stats.norm.data_ptr(),
            address(stats.entropy),
            slopes.logprobs.data_ptr(),
            address(slopes.entropy),
            False,
            threads,
        )
        _uncap_(self.logits, self.capped, request)
        rounded = self.logits.to(to.dtype)
        _C.scatter_kept(lists_of(_C, rounded, self.starts), inputs, self.ids.data_ptr(), rows_of(_C, to), threads)
        if to is not out:
            out.copy_(to)


gather_kept = KeptRows


def find_repeated(ids: Tensor, offsets: Tensor, live: Tensor) -> int | None:
    """Return the index of the first id that occurs twice in the list of a live row; None if there is none. Lists are
    ids[offsets[r] : offsets[r + 1]], int64; all contiguous.
    """
    addresses = ids.data_ptr(), offsets.data_ptr(), live.data_ptr()
    at = _C.find_repeated(*addresses, len(live), torch.get_num_threads())
    return None if at < 0 else at


def weight_sum(result: Tensor) -> SplitSum | None:
    return SplitSum(result) if result.dtype == torch.bfloat16 else None


class SplitSum:
    """A float32 sum of bfloat16 tensors whose upper half is the result: it takes 2 more bytes per element, not 4."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        kept = large_tensor(result.shape, torch.int16, result.device, "low halves of weight")
        self.low, zeroed = kept or (torch.zeros_like(result, dtype=torch.int16), True)
        if not zeroed:
            self.low.zero_()

    def add(self, rows: slice, part: Tensor) -> None:
        """Add ``part``, contiguous bfloat16, to sum[rows]."""
        high, low = self.result[rows], self.low[rows]
        _C.add_split(high.data_ptr(), low.data_ptr(), part.data_ptr(), high.numel(), torch.get_num_threads())

    def rounded(self) -> Tensor:
        _C.round_split(self.result.data_ptr(), self.low.data_ptr(), self.low.numel(), torch.get_num_threads())
        return self.result
