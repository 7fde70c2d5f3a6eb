"""The interface of a backend: a module with these functions. ``reference.py`` implements each in eager torch.

N rows, V vocabulary. Logits are [N, V] or, padded, [B, L, V] with N = B·L, any strides. With ``request.softcap``,
``logits`` may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dapo_kernels.backends.divergence import Distance
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, Slopes, TokenLoss, Tokens


class WeightSum(Protocol):
    """A sum of 16-bit tensors in float32."""

    def add(self, rows: slice, part: Tensor) -> None: ...

    def rounded(self) -> Tensor: ...


class KeptLogits(Protocol):
    """The logits of the kept tokens of rows with a list."""

    def stats(self, request: RowRequest) -> RowStats:
        """Return statistics over the kept tokens; zeros on rows without a list."""

    def add_gradient_(self, out: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes) -> None:
        """Write their ∂loss/∂logits into ``out``, which contains zeros there. This may overwrite the kept logits."""


class Backend(Protocol):
    SOFTCAP_COPIES: bool
    """Whether a softcap needs a second buffer of the size of the logits."""
    gather_kept: Callable[[Tensor, RowRequest], KeptLogits] | None
    """Return the kept logits of rows with a list, on a CPU, after the softcap, and check rows and lists. If None,
    engine/kept.py gathers them.
    """

    def row_stats(self, logits: Tensor, request: RowRequest) -> RowStats: ...

    def row_grad(
        self, out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
    ) -> None:
        """Write ∂loss/∂logits into ``out`` (may be ``logits`` itself). ``zeroed``: it contains zeros, so rows without a
        gradient need not be written.
        """

    def row_slopes(self, logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
        """Return ``row_stats``, and the loss of token-level objectives with its slopes. Does not change the logits."""

    def row_loss_(self, logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
        """Return the whole loss of token-level objectives, and overwrite ``logits`` with ∂loss/∂logits."""

    def merge_norms(self, norms: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
        """Return, for rows split into R parts, their norm [N, 2] from the parts' norms [R, N, 2], and the log of the
        probability of each part, float64 [R, N]. Dead rows may have any value.
        """

    def token_loss(
        self, logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars
    ) -> TokenLoss:
        """Return the policy and KL loss over all tokens. ``log_ratio`` [N], or ``None`` on-policy."""

    def row_divergence_(
        self, logits: Tensor, ref_logits: Tensor, request: RowRequest, weights: Tensor, distance: Distance
    ) -> Tensor:
        """Return the divergence of every row of [N, V] from the reference's, [N], and overwrite ``logits`` with
        ∂(Σ weights · divergence)/∂logits.
        """

    def weight_sum(self, result: Tensor) -> WeightSum | None:
        """Return a running sum that is finally rounded into the 16-bit ``result``; None: use a float32 tensor."""
