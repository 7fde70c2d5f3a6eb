"""The "cpp" backend: launchers of the C++ kernels. Allocate, describe tensors as pointers and strides, call.

Same functions as ``reference.py``. float32, bfloat16 and float16 logits on the CPU; threads as torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels import _C  # type: ignore[attr-defined]
from dapo_kernels.memory import large_gradient
from dapo_kernels.reference import raise_bad_target, raise_bad_temperature, unit_stride
from dapo_kernels.structs import address, outputs, row_inputs, rows_of, token_inputs
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import RowLoss, TokenLoss, Tokens, empty_row_loss, empty_stats

# row_grad takes ``zeroed``: ``out`` holds zeros, which rows without a gradient may keep.
SKIPS_ZEROS = True

_BAD_TARGET, _BAD_TEMPERATURE = 1, 2


def _check(logits: Tensor, rows: Any, inputs: Any, target_ids: Tensor, temperature: float | Tensor) -> None:
    fault, row = _C.find_fault(rows, inputs)
    if fault == _BAD_TARGET:
        raise_bad_target(row, int(target_ids[row]), logits.shape[-1])
    if fault == _BAD_TEMPERATURE:
        assert isinstance(temperature, Tensor)
        raise_bad_temperature(row, float(temperature[row]))


def row_stats(
    logits: Tensor, target_ids: Tensor, live: Tensor, temperature: float | Tensor, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits = unit_stride(logits)
    rows, inputs = rows_of(_C, logits), row_inputs(_C, target_ids, live, temperature)
    _check(logits, rows, inputs, target_ids, temperature)
    logprobs, norm, entropy = empty_stats(target_ids, want_entropy)
    out = outputs(_C, logprobs=logprobs, norm=norm, entropy=entropy)
    _C.row_stats(rows, inputs, out, torch.get_num_threads())
    return logprobs, norm, entropy


def row_grad(
    out: Tensor,
    logits: Tensor,
    target_ids: Tensor,
    live: Tensor,
    temperature: float | Tensor,
    norm: Tensor,
    entropy: Tensor | None,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    zeroed: bool = False,
) -> None:
    source, to = unit_stride(logits), unit_stride(out)
    _C.row_grad(
        rows_of(_C, source),
        rows_of(_C, to),
        row_inputs(_C, target_ids, live, temperature),
        norm.data_ptr(),
        address(entropy),
        dlogprobs.data_ptr(),
        address(dentropy),
        zeroed and to is out,
        torch.get_num_threads(),
    )
    if to is not out:
        out.copy_(to)


def row_loss_(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    tokens: Tokens,
    scalars: ObjectiveScalars,
    entropy_coef: float,
    want_entropy: bool,
) -> RowLoss:
    work = unit_stride(logits)
    rows, inputs = rows_of(_C, work), row_inputs(_C, target_ids, tokens.live, temperature, tokens)
    _check(work, rows, inputs, target_ids, temperature)
    want_entropy = want_entropy or entropy_coef != 0
    logprobs, entropy, clip_hit, ref_kl, idle = empty_row_loss(target_ids, want_entropy, scalars.kl_coef != 0)
    out = outputs(_C, logprobs=logprobs, entropy=entropy, clip_hit=clip_hit, ref_kl=ref_kl, idle=idle)
    loss = _C.row_loss(rows, inputs, _C.Objective(*scalars.pack()), entropy_coef, out, torch.get_num_threads())
    if work is not logits:
        logits.copy_(work)
    return RowLoss(torch.tensor(loss, dtype=torch.float32), logprobs, entropy, clip_hit, ref_kl, idle)


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    d_logprobs, d_log_ratio = torch.empty_like(logprobs), torch.empty_like(logprobs)
    clip_hit = torch.empty_like(logprobs, dtype=torch.int8)
    ref_kl = torch.empty_like(logprobs) if scalars.kl_coef != 0 else None
    inputs = token_inputs(_C, tokens, log_ratio)
    out = outputs(_C, clip_hit=clip_hit, ref_kl=ref_kl, d_logprobs=d_logprobs, d_log_ratio=d_log_ratio)
    loss = _C.token_loss(len(logprobs), logprobs.data_ptr(), inputs, _C.Objective(*scalars.pack()), out)
    return TokenLoss(torch.tensor(loss, dtype=torch.float32), d_logprobs, d_log_ratio, clip_hit, ref_kl)


class SplitSum:
    """A float32 sum of bfloat16 tensors whose upper half is the result: 2 bytes per element beside it, not 4.

    ``reference.py`` has no such class: elsewhere the sum is a float32 tensor.
    """

    def __init__(self, result: Tensor) -> None:
        self.result = result
        kept = large_gradient(result.shape, torch.int16, result.device, "low halves of weight")
        self.low, zeroed = kept or (torch.zeros_like(result, dtype=torch.int16), True)
        if not zeroed:
            self.low.zero_()

    def add(self, rows: slice, part: Tensor) -> None:
        """sum[rows] += part, contiguous bfloat16."""
        high, low = self.result[rows], self.low[rows]
        _C.add_split(high.data_ptr(), low.data_ptr(), part.data_ptr(), high.numel(), torch.get_num_threads())

    def rounded(self) -> Tensor:
        _C.round_split(self.result.data_ptr(), self.low.data_ptr(), self.low.numel(), torch.get_num_threads())
        return self.result
