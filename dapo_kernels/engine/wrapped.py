"""A backend around a backend: what follows from the statistics of rows and their gradient, whichever they are."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dapo_kernels.backends import Backend
from dapo_kernels.backends.reference import slopes_of_stats
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Asked, RowsLoss, RowsSlopes, RowStats, Slopes, Tokens


class Wrapped(ABC):
    """A backend whose losses take two passes over the rows."""

    def __init__(self, by: Backend) -> None:
        self.by = by
        self.SOFTCAP_COPIES = by.SOFTCAP_COPIES
        self.token_loss = by.token_loss
        self.weight_sum = by.weight_sum
        self.gather_kept = by.gather_kept

    def merge_norms(self, norms: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        return self.by.merge_norms(norms, asked)

    @abstractmethod
    def row_stats(self, logits: Tensor, asked: Asked, softcap: float | None = None) -> RowStats: ...

    @abstractmethod
    def row_grad(
        self,
        out: Tensor,
        logits: Tensor,
        asked: Asked,
        stats: RowStats,
        slopes: Slopes,
        softcap: float | None = None,
        zeroed: bool = False,
    ) -> None: ...

    def row_slopes(self, logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
        return slopes_of_stats(self.row_stats(logits, asked), tokens, scalars, self.token_loss)

    def row_loss_(
        self, logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars, softcap: float | None = None
    ) -> RowsLoss:
        stats = stats_before_gradient(self, logits, asked, softcap)
        out = slopes_of_stats(stats, tokens, scalars, self.token_loss)
        self.row_grad(logits, logits, asked, out.stats, out.slopes, softcap)
        return RowsLoss(out.loss, out.logprobs, out.entropy, out.clip_hit, out.ref_kl, out.slopes.idle)


def stats_before_gradient(by: Backend, logits: Tensor, asked: Asked, softcap: float | None) -> RowStats:
    """``row_stats`` that leaves the logits for ``row_grad``: a softcap that works in place would not."""
    before = logits.clone() if softcap is not None and by.SOFTCAP_COPIES else logits
    return by.row_stats(before, asked, softcap)
