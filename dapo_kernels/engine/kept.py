"""Rows that were sampled from a part of the vocabulary: statistics and gradient over the kept tokens.

N rows, V vocabulary, K kept tokens of all rows. The other V − k logits of such a row are not read. Its kept logits are
gathered, [K], and their softmax is computed in float64. For the row kernels the row is dead, so they write zeros, over
which the gradient of the kept logits is written. With z = x/τ of the kept logits x, p = softmax(z), target y::

    ℓ = z_y − lse(z)         dℓ/dx_j = (1[j = y] − p_j) / τ
    H = lse(z) − Σ p_j z_j    dH/dx_j = −p_j (log p_j + H) / τ

Time and memory, about 80 bytes per kept token, are proportional to the lists: those of the chunk's rows, on a GPU those
of all rows in every chunk. Nothing waits for a GPU. A backend may have its own way: the CPU backend treats the lists as
rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_kernels.backends import Backend, KeptLogits
from dapo_kernels.backends.norms import merged
from dapo_kernels.backends.reference import check_rows, slopes_of_stats
from dapo_kernels.engine.wrapped import Wrapped
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowStats, Slopes, Tokens, accumulate_dtype, on_host

# Kept tokens whose gradient is computed at once on a CPU: about ten tensors of 128 KiB stay in a core's cache.
_PART = 2**14


class KeptTokens(Wrapped):
    """A backend for rows of which some have a list of kept tokens. The norm of these is (max of x, log of the sum above
    it), unless the backend gathers them itself.
    """

    def __init__(self, by: Backend, request: RowRequest) -> None:
        super().__init__(by)
        self.gather = by.gather_kept if on_host(request.live) else None

    def _gathered(self, logits: Tensor, request: RowRequest, check: bool = True) -> KeptLogits:
        if self.gather is not None:
            return self.gather(logits, request)
        if check:
            check_rows(request, logits.shape[-1])
        return TruncatedSupport.of(logits, request)

    def row_stats(self, logits: Tensor, request: RowRequest) -> RowStats:
        mine = self._gathered(logits, request).stats(request)
        whole = self.by.row_stats(logits, request.without_lists())
        return RowStats._make(_of_each(_listed(request), mine, whole))

    def row_grad(
        self, out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
    ) -> None:
        kept = self._gathered(logits, request, check=False)
        self.by.row_grad(out, logits, request.without_lists(), stats, slopes, zeroed)
        kept.add_gradient_(out, request, stats, slopes)

    def row_loss_(self, logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
        kept, listed = self._gathered(logits, request), _listed(request)
        mine = slopes_of_stats(kept.stats(request), tokens._replace(live=listed), scalars, self.token_loss)
        rest = request.without_lists()
        whole = self.by.row_loss_(logits, rest, tokens._replace(live=rest.live), scalars)
        kept.add_gradient_(logits, request, mine.stats, mine.slopes)
        loss = RowsLoss(mine.loss, mine.logprobs, mine.entropy, mine.clip_hit, mine.ref_kl, mine.slopes.idle)
        return RowsLoss(loss.loss + whole.loss, *_of_each(listed, loss[1:], whole[1:]))

    def merge_norms(self, norms: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
        norm, log_shares = self.by.merge_norms(norms, request)
        if self.gather is not None:
            return norm, log_shares
        tops, log_sums = norms.double().unbind(-1)
        top = tops.amax(0)
        above, mine = merged(log_sums, (tops - top) / request.tau)
        listed = _listed(request)
        norm = torch.where(listed[:, None], torch.stack([top, above], dim=-1).to(norm.dtype), norm)
        return norm, torch.where(listed, mine, log_shares)


def _of_each(listed: Tensor, mine: Iterable[Tensor | None], whole: Iterable[Tensor | None]) -> Iterator[Tensor | Any]:
    """Yield ``mine`` for rows with a list and ``whole`` for other rows, each [N] or [N, 2]."""
    for a, b in zip(mine, whole, strict=True):
        yield None if a is None or b is None else torch.where(listed if a.dim() == 1 else listed[:, None], a, b)


def _listed(request: RowRequest) -> Tensor:
    assert request.listed is not None
    return request.live & request.listed


class TruncatedSupport(NamedTuple):
    """The kept tokens of all rows, each [K]. ``here``: those of a live row and within these columns. On a CPU there are
    no others; on a GPU each other token has the place (row and id) of one that is here.
    """

    rows: Tensor  # int64
    ids: Tensor  # int64
    here: Tensor  # bool
    logits: Tensor  # after the softcap, in the dtype of the arithmetic; −∞ where not here

    @classmethod
    def of(cls, logits: Tensor, request: RowRequest) -> TruncatedSupport:
        assert request.kept_ids is not None
        rows, here = request.kept_places()
        ids = request.kept_ids.clamp(0, logits.shape[-1] - 1)
        here = here & (request.kept_ids == ids) & request.live.index_select(0, rows)
        if on_host(here):  # on a GPU, leaving out the others would wait for the device
            rows, ids, here = _selected(here, rows, ids, here)
        elif len(here):
            one = _one_of(here)
            rows, ids = (torch.where(here, x, x.index_select(0, one)) for x in (rows, ids))
        x = _at(logits, rows, ids).to(accumulate_dtype(logits.dtype))
        if request.softcap is not None:
            x = request.softcap * torch.tanh(x / request.softcap)
        return cls(rows, ids, here, torch.where(here, x, -torch.inf))

    def stats(self, request: RowRequest) -> RowStats:
        """Return the statistics; zeros on rows without a list."""
        top = self._over_lists("max", self.logits, request)
        z = self._above(top, request)  # NaN if the maximum is NaN or +∞, and so are the statistics
        above = self._over_lists("sum", z.exp(), request).log()
        target = self._over_lists("max", torch.where(self._is_target(request), z, -torch.inf), request)
        dtype, listed, entropy = self.logits.dtype, _listed(request), None
        if request.want_entropy:
            log_p = z - above.index_select(0, self.rows)
            terms = torch.where(z == -torch.inf, 0.0, -log_p.exp() * log_p)
            entropy = self._over_lists("sum", terms, request).clamp(min=0.0)
            entropy = torch.where(listed, entropy, 0.0).to(dtype)
        norm = torch.where(listed[:, None], torch.stack([top, above.to(dtype)], dim=-1), 0.0)
        return RowStats(torch.where(listed, target - above, 0.0).to(dtype), norm, entropy)

    def add_gradient_(self, out: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes) -> None:
        """Write the gradient over the zeros in ``out``. No place is written twice, unless with the same value."""
        size = _PART if on_host(out) else max(1, len(self.rows))
        for part in zip(*(x.split(size) for x in self), strict=True):
            kept = TruncatedSupport(*part)
            places = _places(kept.rows, kept.ids, out)
            gradient = kept._gradient(request, stats, slopes).to(out.dtype)
            if not on_host(out) and len(gradient):
                one = _one_of(kept.here)
                there = out[tuple(x.index_select(0, one) for x in places)]  # stays if no token is here
                there = torch.where(kept.here.index_select(0, one), gradient.index_select(0, one), there)
                gradient = torch.where(kept.here, gradient, there)
            out.index_put_(places, gradient)

    def _gradient(self, request: RowRequest, stats: RowStats, slopes: Slopes) -> Tensor:
        """Return ∂loss/∂x of the logits before the softcap, float64, from ∂loss/∂ℓ and ∂loss/∂H, each [N]."""
        top, above = stats.norm.unbind(-1)
        log_p = self._above(top, request) - above.double().index_select(0, self.rows)
        p = log_p.exp()
        d_logprobs = slopes.logprobs.double().index_select(0, self.rows)
        gradient = torch.where(self._is_target(request), d_logprobs, 0.0) - p * d_logprobs
        if slopes.entropy is not None:
            assert stats.entropy is not None
            d_entropy, entropy = (
                slopes.entropy.double().index_select(0, self.rows),
                stats.entropy.double().index_select(0, self.rows),
            )
            gradient -= d_entropy * torch.where(p == 0, 0.0, p * (log_p + entropy))
        gradient /= self._tau(request)
        if request.softcap is not None:
            gradient *= 1.0 - (self.logits.double() / request.softcap).square()
        return torch.where(self.here & ~slopes.idle.index_select(0, self.rows), gradient, 0.0)

    def _above(self, top: Tensor, request: RowRequest) -> Tensor:
        """Return (x − max)/τ, float64; −∞ for tokens that are not here."""
        top = torch.where(top == -torch.inf, 0.0, top)  # of a row whose kept logits are all −∞, or not here
        z = (self.logits.double() - top.double().index_select(0, self.rows)).div_(self._tau(request))
        return torch.where(self.here, z, -torch.inf)

    def _tau(self, request: RowRequest) -> float | Tensor:
        return (
            request.temperature
            if request.temperatures is None
            else request.temperatures.double().index_select(0, self.rows)
        )

    def _is_target(self, request: RowRequest) -> Tensor:
        return self.here & (self.ids == request.target_ids.index_select(0, self.rows))

    def _over_lists(self, reduce: str, of_tokens: Tensor, request: RowRequest) -> Tensor:
        if on_host(of_tokens):  # some may have been left out
            numbers = torch.arange(request.live.shape[0] + 1, device=self.rows.device)
            request = request._replace(kept_offsets=torch.searchsorted(self.rows, numbers))
        return request.over_lists(reduce, of_tokens)


def _one_of(here: Tensor) -> Tensor:
    """Return int64 [1], the index of a token that is here; of any if none is."""
    return here.to(torch.int8).argmax(0, keepdim=True)


def _selected(keep: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors [K] where ``keep`` [K] is True; unchanged if it is True everywhere."""
    if bool(keep.all()):
        return of
    at = keep.nonzero().squeeze(1)
    return tuple(x[at] for x in of)


def _at(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    if logits.is_contiguous():  # takes a third of the time
        return logits.view(-1).index_select(0, rows * logits.shape[-1] + ids)
    return logits[_places(rows, ids, logits)]


def _places(rows: Tensor, ids: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """Return indices into [N, V] or [B, L, V]."""
    if like.dim() == 2:
        return rows, ids
    length = like.shape[1]
    return rows // length, rows % length, ids
