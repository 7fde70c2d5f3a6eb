"""A base for backends that wrap another one: losses from the statistics of rows and their gradient."""

from __future__ import annotations

from torch import Tensor

from dapo_kernels.backends import Backend
from dapo_kernels.backends.reference import slopes_of_stats
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, Tokens


class Wrapped:
    """A backend whose losses take two passes over the rows, with its own ``row_stats`` and ``row_grad``."""

    def __init__(self, by: Backend) -> None:
        self.by = by
        self.SOFTCAP_COPIES = by.SOFTCAP_COPIES
        self.token_loss = by.token_loss
        self.weight_sum = by.weight_sum
        self.gather_kept = by.gather_kept
        self.row_divergence_ = by.row_divergence_

    def merge_norms(self, norms: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
        return self.by.merge_norms(norms, request)

    def row_slopes(
        self: Backend, logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars
    ) -> RowsSlopes:
        return slopes_of_stats(self.row_stats(logits, request), tokens, scalars, self.token_loss)

    def row_loss_(
        self: Backend, logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars
    ) -> RowsLoss:
        out = slopes_of_stats(stats_before_gradient(self, logits, request), tokens, scalars, self.token_loss)
        self.row_grad(logits, logits, request, out.stats, out.slopes)
        return RowsLoss(out.loss, out.logprobs, out.entropy, out.clip_hit, out.ref_kl, out.slopes.idle)


def stats_before_gradient(by: Backend, logits: Tensor, request: RowRequest) -> RowStats:
    """Return ``row_stats`` and keep the logits for ``row_grad``: a softcap in place would overwrite them."""
    return by.row_stats(logits.clone() if request.softcap is not None and by.SOFTCAP_COPIES else logits, request)
