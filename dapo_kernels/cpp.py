"""The "cpp" backend: launchers of the C++ kernels. Allocate, describe tensors as pointers and strides, call.

Same functions as ``reference.py``. float32, bfloat16 and float16 logits on the CPU; threads as torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels import _C  # type: ignore[attr-defined]
from dapo_kernels.memory import large_empty
from dapo_kernels.reference import raise_bad_target, raise_bad_temperature, unit_stride
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import RowLoss, TokenLoss, Tokens

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BAD_TARGET, _BAD_TEMPERATURE = 1, 2


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(logits: Tensor) -> Any:
    """Rows of [N, V] or [B, L, V], whose last stride is 1."""
    inner = logits.shape[-2]
    outer = logits.stride(0) if logits.dim() == 3 else 0
    n_rows = logits.shape[:-1].numel()
    return _C.Rows(
        logits.data_ptr(),
        n_rows,
        logits.shape[-1],
        max(inner, 1),
        outer,
        logits.stride(-2),
        _DTYPES[logits.dtype],
    )


def _tau(temperature: float | Tensor) -> dict[str, Any]:
    if isinstance(temperature, Tensor):
        return {"temperatures": temperature.data_ptr()}
    return {"temperature": temperature}


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
    rows = _rows(logits)
    inputs = _C.TokenInputs(target_ids=target_ids.data_ptr(), live=live.data_ptr(), **_tau(temperature))
    _check(logits, rows, inputs, target_ids, temperature)
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32)
    norm = torch.empty(*target_ids.shape, 2, dtype=torch.float32)
    entropy = torch.empty_like(logprobs) if want_entropy else None
    out = _C.TokenOutputs(logprobs=logprobs.data_ptr(), norm=norm.data_ptr(), entropy=_address(entropy))
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
) -> None:
    source, to = unit_stride(logits), unit_stride(out)
    inputs = _C.TokenInputs(target_ids=target_ids.data_ptr(), live=live.data_ptr(), **_tau(temperature))
    _C.row_grad(
        _rows(source),
        _rows(to),
        inputs,
        norm.data_ptr(),
        _address(entropy),
        dlogprobs.data_ptr(),
        _address(dentropy),
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
    rows = _rows(work)
    inputs = _C.TokenInputs(
        target_ids=target_ids.data_ptr(),
        live=tokens.live.data_ptr(),
        weights=tokens.weights.data_ptr(),
        advantages=tokens.advantages.data_ptr(),
        old_logprobs=_address(tokens.old_logprobs),
        ref_logprobs=_address(tokens.ref_logprobs),
        importance_weights=_address(tokens.importance_weights),
        **_tau(temperature),
    )
    _check(work, rows, inputs, target_ids, temperature)
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32)
    entropy = torch.empty_like(logprobs) if want_entropy or entropy_coef != 0 else None
    clip_hit = torch.empty_like(logprobs, dtype=torch.int8)
    ref_kl = torch.empty_like(logprobs) if scalars.kl_coef != 0 else None
    idle = torch.empty_like(tokens.live)
    out = _C.TokenOutputs(
        logprobs=logprobs.data_ptr(),
        entropy=_address(entropy),
        clip_hit=clip_hit.data_ptr(),
        ref_kl=_address(ref_kl),
        idle=idle.data_ptr(),
    )
    loss = _C.row_loss(rows, inputs, _C.Objective(*scalars.pack()), entropy_coef, out, torch.get_num_threads())
    if work is not logits:
        logits.copy_(work)
    return RowLoss(torch.tensor(loss, dtype=torch.float32), logprobs, entropy, clip_hit, ref_kl, idle)


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    d_logprobs, d_log_ratio = torch.empty_like(logprobs), torch.empty_like(logprobs)
    clip_hit = torch.empty_like(logprobs, dtype=torch.int8)
    ref_kl = torch.empty_like(logprobs) if scalars.kl_coef != 0 else None
    inputs = _C.TokenInputs(
        live=tokens.live.data_ptr(),
        weights=tokens.weights.data_ptr(),
        advantages=tokens.advantages.data_ptr(),
        log_ratio=_address(log_ratio),
        ref_logprobs=_address(tokens.ref_logprobs),
        importance_weights=_address(tokens.importance_weights),
    )
    out = _C.TokenOutputs(
        clip_hit=clip_hit.data_ptr(),
        ref_kl=_address(ref_kl),
        d_logprobs=d_logprobs.data_ptr(),
        d_log_ratio=d_log_ratio.data_ptr(),
    )
    loss = _C.token_loss(len(logprobs), logprobs.data_ptr(), inputs, _C.Objective(*scalars.pack()), out)
    return TokenLoss(torch.tensor(loss, dtype=torch.float32), d_logprobs, d_log_ratio, clip_hit, ref_kl)


class SplitSum:
    """A float32 sum of bfloat16 tensors whose upper half is the result: 2 bytes per element beside it, not 4.

    ``reference.py`` has no such class: elsewhere the sum is a float32 tensor.
    """

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self.low = large_empty(result.shape, torch.int16, result.device).zero_()

    def add(self, rows: slice, part: Tensor) -> None:
        """sum[rows] += part, contiguous bfloat16."""
        high, low = self.result[rows], self.low[rows]
        _C.add_split(high.data_ptr(), low.data_ptr(), part.data_ptr(), high.numel(), torch.get_num_threads())

    def rounded(self) -> Tensor:
        _C.round_split(self.result.data_ptr(), self.low.data_ptr(), self.low.numel(), torch.get_num_threads())
        return self.result
