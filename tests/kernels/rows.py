"""Rows of logits as a backend's functions take them, and what float64 makes of them.

T rows, V vocabulary. Rows 1 and 4 are dead and hold NaN; row 2 has no weight in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dapo_kernels.backends import reference
from dapo_kernels.objectives import OBJECTIVES
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, RowsSlopes, RowStats, Tokens

T = 7
EPS = {torch.float64: 2.0**-40, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
Record = TypeVar("Record", bound=tuple[Any, ...])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy": {"entropy_coef": 0.1, "per_token": True},
    "softcap": {"softcap": 5.0, "entropy_coef": 0.1},
}


class Problem(NamedTuple):
    logits: Tensor  # [T, V], finite in dead rows too
    request: RowRequest
    tokens: Tokens
    scalars: ObjectiveScalars


class Truth(NamedTuple):
    """In float64; the gradient is that of the loss."""

    stats: RowStats
    loss: RowsLoss
    gradient: Tensor


def problem(
    logits: Tensor, *, entropy_coef: float = 0.0, softcap: float | None = None, per_token: bool = False
) -> Problem:
    """GRPO's loss of these rows, with random targets, advantages and weights."""
    n, vocab = logits.shape
    g = torch.Generator().manual_seed(vocab)
    live = torch.ones(n, dtype=torch.bool)
    live[[1, 4]] = False
    ids = torch.randint(vocab, (n,), generator=g)
    taus = 0.5 + torch.rand(n, generator=g) if per_token else None
    request = RowRequest(ids, live, 0.7, taus, entropy_coef != 0, softcap=softcap)
    logprobs = true_stats(logits, request).logprobs
    old, ref = ((logprobs + 0.3 * torch.randn(n, generator=g)).float() for _ in range(2))
    weights = torch.rand(n, generator=g)
    weights[[1, 2, 4]] = 0.0
    tokens = Tokens(live, weights, torch.randn(n, generator=g), old, ref, None)
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])._replace(entropy_coef=entropy_coef)
    return Problem(logits, request, tokens, scalars)


def random_rows(vocab: int, dtype: torch.dtype) -> Tensor:
    logits = 3.0 * torch.randn(T, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[3] *= 8.0  # nearly certain
    return logits.to(dtype)


def true_stats(logits: Tensor, request: RowRequest) -> RowStats:
    """Log-probs and entropies with their autograd, spelled out."""
    x = logits.double()
    z = x if request.softcap is None else request.softcap * torch.tanh(x / request.softcap)
    z = z / (request.temperature if request.temperatures is None else request.temperatures.double()[:, None])
    log_p = torch.log_softmax(z, -1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)
    logprobs = log_p.gather(1, request.target_ids[:, None])[:, 0]
    live = request.live
    return RowStats(torch.where(live, logprobs, 0.0), log_p, torch.where(live, entropy, 0.0))


def wide(record: Record) -> Record:
    """With its floating tensors in float64."""
    return type(record)(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in record))


def moved(record: Record, device: str) -> Record:
    return type(record)(*(x.to(device) if isinstance(x, Tensor) else x for x in record))


def solve(p: Problem) -> Truth:
    leaf = p.logits.to(torch.float64, copy=True).requires_grad_()
    stats = true_stats(leaf, p.request)
    found = RowStats(stats.logprobs.detach(), stats.norm.detach(), stats.entropy.detach())
    known: RowsSlopes = reference.slopes_of_stats(found, wide(p.tokens), p.scalars, reference.token_loss)
    upstream = (known.slopes.logprobs * stats.logprobs).sum()
    if known.slopes.entropy is not None:
        upstream = upstream + (known.slopes.entropy * stats.entropy).sum()
    upstream.backward()
    loss = RowsLoss(known.loss.detach(), found.logprobs, found.entropy, known.clip_hit, known.ref_kl, known.slopes.idle)
    return Truth(found, loss, leaf.grad)


class Place(NamedTuple):
    """Rows within memory that holds NaN everywhere else."""

    memory: Tensor
    clean: Tensor  # the memory before anything was computed
    rows: Tensor  # [T, V]
    aligned: bool  # whether every row starts on 16 bytes

    @classmethod
    def of(cls, p: Problem, offset: int, gap: int, device: str = "cpu") -> Place:
        """The problem's rows, those that are dead full of NaN, after ``offset`` elements, with ``gap`` between them."""
        n, vocab = p.logits.shape
        memory = torch.full((offset + n * (vocab + gap) + 64,), math.nan, dtype=p.logits.dtype, device=device)
        rows = memory[offset : offset + n * (vocab + gap)].view(n, vocab + gap)[:, :vocab]
        rows.copy_(p.logits.masked_fill(~p.request.live[:, None], math.nan))
        per_vector = 16 // p.logits.element_size()
        return cls(memory, memory.clone(), rows, offset % per_vector == 0 and (vocab + gap) % per_vector == 0)

    def is_untouched_outside(self) -> bool:
        """Whether all bits around the rows are as they were."""
        bits, expected = BITS[self.memory.dtype], self.clean.clone()
        expected.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset()).copy_(self.rows)
        return torch.equal(self.memory.view(bits), expected.view(bits))


def places(p: Problem, device: str = "cpu") -> Iterator[Place]:
    """On 16 bytes with a part full vector at a row's end; off them at the start, and at every row."""
    vocab = p.logits.shape[1]
    for offset, gap in ((8, -vocab % 8), (1, -vocab % 8 + 3), (5, -vocab % 8)):
        yield Place.of(p, offset, gap, device)
