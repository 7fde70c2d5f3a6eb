"""Rows of logits cut into columns, as ranks hold them: statistics and gradients are those of the whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dapo_kernels.backends import Backend
from dapo_kernels.backends import backend as load
from dapo_kernels.engine.shards import request_for_columns, stats_to_send, whole_stats
from dapo_kernels.records import RowRequest, RowStats, Slopes

T, V = 7, 150
CUTS = {"two": (75, 75), "one_column": (149, 1), "four": (40, 50, 3, 57)}


def rows(dtype: torch.dtype, size: float = 3.0, shift: float = 0.0) -> tuple[Tensor, RowRequest]:
    g = torch.Generator().manual_seed(5)
    logits = (shift + size * torch.randn(T, V, generator=g)).to(dtype)
    temperatures = 0.5 + torch.rand(T, generator=g)
    live = torch.tensor([True] * (T - 2) + [False] * 2)
    targets = torch.randint(V, (T,), generator=g)
    targets[0], targets[1], targets[-1] = 0, V - 1, -100
    return logits, RowRequest(targets, live, 1.0, temperatures, True)


def in_parts(
    by: Backend, logits: Tensor, request: RowRequest, cut: tuple[int, ...], slopes: Slopes
) -> tuple[list[RowStats], Tensor]:
    """What each rank comes to know of the whole rows, and their gradient, put together from each rank's columns."""
    parts, first, owns, said = logits.split(cut, 1), 0, [], []
    for part in parts:
        owns.append(request_for_columns(request, first, part.shape[1]))
        said.append(stats_to_send(by.row_stats(part.clone(), owns[-1]), owns[-1]))
        first += part.shape[1]
    known = [whole_stats(by, torch.stack(said), request) for _ in parts]
    gradients = []
    for part, own, stats in zip(parts, owns, known, strict=True):
        gradients.append(torch.full_like(part, math.nan, memory_format=torch.contiguous_format))
        by.row_grad(gradients[-1], part.clone(), own, stats, slopes)
    return known, torch.cat(gradients, 1)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_parts_are_the_whole(backend: str, cut: tuple[int, ...], softcap: float | None) -> None:
    by = load(backend)
    for dtype, sizes in ((torch.float32, ((3.0, 0.0), (3.0, 1e4), (200.0, 0.0))), (torch.bfloat16, ((3.0, 0.0),))):
        for size, shift in sizes:
            logits, request = rows(dtype, size, shift)
            request = request._replace(softcap=softcap)
            g = torch.Generator().manual_seed(6)
            slopes = Slopes(torch.randn(T, generator=g), torch.randn(T, generator=g))
            truth, expected = by.row_stats(logits.clone(), request), torch.empty_like(logits)
            by.row_grad(expected, logits.clone(), request, truth, slopes)
            known, gradient = in_parts(by, logits, request, cut, slopes)
            for stats in known:
                assert torch.equal(stats.norm, known[0].norm)
                torch.testing.assert_close(stats.logprobs, truth.logprobs, atol=1e-6, rtol=3e-7)
                torch.testing.assert_close(stats.entropy, truth.entropy, atol=1e-6, rtol=1e-6)
            rtol = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=rtol)


def test_columns_that_cannot_be_sampled(backend: str) -> None:
    """A rank whose columns are all −∞: no share in the row, zeros for a gradient."""
    by = load(backend)
    logits, request = rows(torch.float32)
    request = request._replace(target_ids=request.target_ids.clamp(max=49))
    logits[:, 50:100] = -math.inf
    slopes = Slopes(torch.ones(T), torch.ones(T))
    stats = by.row_stats(logits.clone(), request)
    expected = torch.empty_like(logits)
    by.row_grad(expected, logits.clone(), request, stats, slopes)
    (known, *_), gradient = in_parts(by, logits, request, (50, 50, 50), slopes)
    torch.testing.assert_close(known.logprobs, stats.logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(known.entropy, stats.entropy, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    assert not gradient[:, 50:100].any()


@pytest.mark.parametrize("column", [3, 125])
def test_a_nan_in_anyones_columns_shows(backend: str, column: int) -> None:
    logits, request = rows(torch.float32)
    logits[2, column] = math.nan
    logits[-1] = math.nan  # a dead row may hold anything
    slopes = Slopes(torch.ones(T), torch.ones(T))
    (known, *_), gradient = in_parts(load(backend), logits, request, (75, 75), slopes)
    assert known.logprobs.isnan().tolist() == known.entropy.isnan().tolist() == [t == 2 for t in range(T)]
    assert gradient.isnan().any(1).tolist() == [t == 2 for t in range(T)]
