"""Tensors as the structs of csrc/params.h: addresses, sizes, strides. For the launchers of ``_C`` and of ``_cuda``.

``module`` is the extension whose structs are created: each defines its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, TokenLoss, Tokens

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address(x: Tensor | None) -> int:
    """Return the address of a tensor, 0 for None."""
    return 0 if x is None else x.data_ptr()


def rows_of(module: Any, logits: Tensor) -> Any:
    """Describe rows of [N, V] or [B, L, V] with a last stride of 1."""
    *outer, inner, vocab = logits.shape
    *stride_outer, stride_inner, _ = logits.stride()
    batch, stride = (outer[0], stride_outer[0]) if outer else (1, 0)
    return module.Rows(
        logits.data_ptr(), batch * inner, vocab, max(inner, 1), stride, stride_inner, _DTYPES[logits.dtype]
    )


def lists_of(module: Any, logits: Tensor, starts: Tensor) -> Any:
    """Describe rows of different lengths, [K] contiguous: row r is logits[starts[r] : starts[r + 1]]."""
    n, longest = starts.shape[0] - 1, int(starts.diff().amax()) if starts.shape[0] > 1 else 0
    return module.Rows(logits.data_ptr(), n, longest, max(n, 1), 0, 0, _DTYPES[logits.dtype], starts=starts.data_ptr())


def row_inputs(module: Any, request: RowRequest, tokens: Tokens | None = None) -> Any:
    """Describe the request for rows; with ``tokens`` also the inputs of its objective."""
    fields: dict[str, Any] = {"target_ids": request.target_ids.data_ptr(), "live": request.live.data_ptr()}
    if request.temperatures is None:
        fields["temperature"] = request.temperature
    else:
        fields["temperatures"] = request.temperatures.data_ptr()
    if tokens is not None:
        fields |= {"old_logprobs": address(tokens.old_logprobs), **_objective_fields(tokens)}
    return module.TokenInputs(**fields)


@functools.lru_cache(maxsize=128)
def objective_of(module: Any, scalars: ObjectiveScalars) -> Any:
    return module.Objective(*scalars.pack())


def token_inputs(module: Any, tokens: Tokens, log_ratio: Tensor | None) -> Any:
    """Describe the inputs of an objective for existing log-probs."""
    return module.TokenInputs(live=tokens.live.data_ptr(), log_ratio=address(log_ratio), **_objective_fields(tokens))


def _objective_fields(tokens: Tokens) -> dict[str, int]:
    return {
        "weights": tokens.weights.data_ptr(),
        "advantages": tokens.advantages.data_ptr(),
        "ref_logprobs": address(tokens.ref_logprobs),
        "importance_weights": address(tokens.importance_weights),
    }


_NOT_WRITTEN = ("loss", "d_entropy")  # each backend computes the first itself; the second is a multiple of the weights


def outputs(module: Any, record: RowStats | RowsSlopes | RowsLoss | TokenLoss) -> Any:
    """Describe where results go: the struct's fields have the record's names."""
    given = {name: x.data_ptr() for name, x in record._asdict().items() if x is not None and name not in _NOT_WRITTEN}
    return module.TokenOutputs(**given)
