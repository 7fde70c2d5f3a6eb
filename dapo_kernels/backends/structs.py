"""Tensors as the structs of csrc/params.h: addresses, sizes, strides. For the launchers of ``_C`` and of ``_cuda``.

``module`` is the one whose structs are made: each binds its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels.records import Asked, RowsLoss, RowStats, TokenLoss, Tokens

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address(x: Tensor | None) -> int:
    """0 is no tensor."""
    return 0 if x is None else x.data_ptr()


def rows_of(module: Any, logits: Tensor) -> Any:
    """Rows of [N, V] or [B, L, V], whose last stride is 1."""
    outer = logits.stride(0) if logits.dim() == 3 else 0
    n_rows, inner = logits.shape[:-1].numel(), max(logits.shape[-2], 1)
    dtype = _DTYPES[logits.dtype]
    return module.Rows(logits.data_ptr(), n_rows, logits.shape[-1], inner, outer, logits.stride(-2), dtype)


def row_inputs(module: Any, asked: Asked, tokens: Tokens | None = None) -> Any:
    """What a row is asked for; with ``tokens`` also what its objective looks at."""
    said: dict[str, Any] = {"target_ids": asked.target_ids.data_ptr(), "live": asked.live.data_ptr()}
    if asked.temperatures is None:
        said["temperature"] = asked.temperature
    else:
        said["temperatures"] = asked.temperatures.data_ptr()
    if tokens is not None:
        said |= {"old_logprobs": address(tokens.old_logprobs), **_objective_fields(tokens)}
    return module.TokenInputs(**said)


def token_inputs(module: Any, tokens: Tokens, log_ratio: Tensor | None) -> Any:
    """The same where log-probs are there already."""
    return module.TokenInputs(live=tokens.live.data_ptr(), log_ratio=address(log_ratio), **_objective_fields(tokens))


def _objective_fields(tokens: Tokens) -> dict[str, int]:
    return {
        "weights": tokens.weights.data_ptr(),
        "advantages": tokens.advantages.data_ptr(),
        "ref_logprobs": address(tokens.ref_logprobs),
        "importance_weights": address(tokens.importance_weights),
    }


def outputs(module: Any, record: RowStats | RowsLoss | TokenLoss) -> Any:
    """Where results go: the struct has fields of the record's names. Of a loss each backend keeps its own sum."""
    return module.TokenOutputs(**{name: address(x) for name, x in record._asdict().items() if name != "loss"})
