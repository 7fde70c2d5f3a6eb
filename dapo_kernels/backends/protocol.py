"""What a backend is: a module with these functions. ``reference.py`` says in eager torch what each computes.

N rows, V vocabulary. Logits are [N, V] or, padded, [B, L, V] with N = B·L, any strides. With ``asked.softcap``,
``logits`` may be used as scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Asked, RowsLoss, RowsSlopes, RowStats, Slopes, TokenLoss, Tokens


class WeightSum(Protocol):
    """A sum of 16-bit tensors kept in float32."""

    def add(self, rows: slice, part: Tensor) -> None: ...

    def rounded(self) -> Tensor: ...


class KeptLogits(Protocol):
    """The logits of the tokens that rows with a list kept."""

    def stats(self, asked: Asked) -> RowStats:
        """Over the kept tokens; zeros on rows without a list."""

    def add_gradient_(self, out: Tensor, asked: Asked, stats: RowStats, slopes: Slopes) -> None:
        """Write ∂loss/∂logits of them into ``out``, which holds zeros there. Their logits may then be gone."""


class Backend(Protocol):
    SOFTCAP_COPIES: bool
    """Whether a softcap takes a second buffer of the logits' size."""
    gather_kept: Callable[[Tensor, Asked], KeptLogits] | None
    """The kept logits of rows with a list, on a CPU, after the softcap and with every check of rows and lists; None:
    engine/kept.py gathers them.
    """

    def row_stats(self, logits: Tensor, asked: Asked) -> RowStats: ...

    def row_grad(
        self, out: Tensor, logits: Tensor, asked: Asked, stats: RowStats, slopes: Slopes, zeroed: bool = False
    ) -> None:
        """Write ∂loss/∂logits into ``out`` (may be ``logits`` itself). ``zeroed``: it holds zeros, which rows without a
        gradient may keep.
        """

    def row_slopes(self, logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
        """``row_stats``, and the loss of token-level objectives with its slopes; the logits stay as they are."""

    def row_loss_(self, logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
        """The whole loss of token-level objectives; ∂loss/∂logits overwrites ``logits``."""

    def merge_norms(self, norms: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        """Of rows cut into R parts: their norm [N, 2] from the parts' [R, N, 2], and the log of the probability that
        falls to each part, float64 [R, N]. Dead rows: anything.
        """

    def token_loss(
        self, logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars
    ) -> TokenLoss:
        """The surrogate and the KL term over all tokens. ``log_ratio`` [N], or ``None`` on-policy."""

    def weight_sum(self, result: Tensor) -> WeightSum | None:
        """A running sum that is rounded into the 16-bit ``result`` in the end; None: a plain float32 tensor serves."""
