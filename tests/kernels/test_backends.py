"""Every backend against one protocol: rows of logits give float64's values, wherever the rows lie and are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import dtypes_of
from rows import EPS, OPTIONS, Problem, T, moved, places, problem, random_rows, solve, wide
from torch import Tensor

from dapo_kernels import OBJECTIVES
from dapo_kernels.backends import Backend, reference
from dapo_kernels.backends import backend as load
from dapo_kernels.engine.shards import request_for_columns, stats_to_send, whole_stats
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowStats, Slopes, Tokens

# Tails of every vector width and of a block of Triton's.
VOCABS = (1, 2, 3, 7, 9, 15, 17, 31, 33, 64, 257, 1031, 4099)


def results(by: Backend, p: Problem, rows: Tensor, device: str) -> list[Tensor]:
    """Statistics, loss and gradients of rows that are where they are: in a tensor of its own, in place, in one pass."""
    request, tokens = moved(p.request, device), moved(p.tokens, device)
    before = rows.clone()
    stats = by.row_stats(rows, request)
    rows.copy_(before)  # a backend may apply the softcap in place
    known = reference.slopes_of_stats(stats, tokens, p.scalars, by.token_loss)
    apart = torch.full_like(rows, math.nan)
    by.row_grad(apart, rows, request, stats, known.slopes)
    rows.copy_(before)
    by.row_grad(rows, rows, request, stats, known.slopes)
    in_place = rows.clone()
    rows.copy_(before)
    loss = by.row_loss_(rows, request, tokens, p.scalars)
    found = [loss.loss, loss.logprobs, stats.logprobs, apart, in_place, rows.clone()]
    assert (loss.entropy is None) == (stats.entropy is None) == (not request.want_entropy)
    if loss.entropy is not None and stats.entropy is not None:
        found += [loss.entropy, stats.entropy]
    assert loss.idle.cpu().tolist() == [t in (1, 2, 4) for t in range(T)]
    return [x.cpu() for x in found]


def check(p: Problem, found: list[Tensor]) -> None:
    truth, dtype = solve(p), p.logits.dtype
    exact = dtype == torch.float64
    loss, loss_logprobs, logprobs, *gradients = found[:6]
    assert float(loss) == pytest.approx(float(truth.loss.loss), rel=2e-5, abs=2e-5)
    for got, expected in zip(found[6:], (truth.stats.entropy,) * 2, strict=False):
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-12 if exact else 1e-5)
    for got in (logprobs, loss_logprobs):
        torch.testing.assert_close(got.double(), truth.stats.logprobs, rtol=2e-7, atol=1e-12 if exact else 4e-6)
    for got in gradients:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), truth.gradient, rtol=EPS[dtype], atol=1e-12 if exact else 1e-5)
        assert not got[[1, 2, 4]].any()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_rows(backend: str, device: str, vocab: int, options: str) -> None:
    """Not a byte outside the rows is written, and at every place of the same alignment the bits are the same."""
    # The C++ backend has torch apply the softcap, which rounds to the dtype of the logits.
    dtypes = (torch.float32,) if (backend, options) == ("cpp", "softcap") else dtypes_of(backend)
    for dtype in dtypes:
        p = problem(random_rows(vocab, dtype), **OPTIONS[options])
        first: dict[bool, list[Tensor]] = {}
        for place in places(p, device):
            found = results(load(backend), p, place.rows, device)
            assert place.is_untouched_outside()
            check(p, found)
            same = first.setdefault(place.aligned or backend != "triton", found)
            if backend != "torch":  # whose kernels go by strides
                assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))


@pytest.mark.parametrize("options", ["plain", "entropy"])
@pytest.mark.parametrize("magnitude", [1e4, 3e7, 3e9, 1e29])
def test_far_logits(backend: str, device: str, magnitude: float, options: str) -> None:
    """Ties in one thread, in two of a slice of CUDA's and in two slices, over far, ordinary and −∞ logits."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_rows(20488, dtype)
        far = torch.tensor(magnitude).to(dtype)
        logits[:, 256:3000] = -far
        logits[:, 9000:9500] = -math.inf
        logits[:3, [8, 9, 40, 15000]] = far
        logits[3] = -far
        logits[5, 12000:] = -far
        p = problem(logits, **OPTIONS[options])
        for row, target in ((0, 40), (2, 70), (6, 300)):
            p.request.target_ids[row] = target
        p = p._replace(tokens=p.tokens._replace(old_logprobs=None, ref_logprobs=None))
        p = p._replace(scalars=ObjectiveScalars.of(OBJECTIVES["dapo"])._replace(entropy_coef=p.scalars.entropy_coef))
        check(p, results(load(backend), p, logits.to(device, copy=True), device))


def test_a_softcap_from_well_inside_to_far_beyond(backend: str, device: str) -> None:
    """Also of −∞, which it takes to its bound."""
    scale = torch.tensor([1e-3, 1.0, 1.0, 12.0, 1.0, 60.0, 1e4])[:, None]  # two formulas of tanh meet at 0.6 of the cap
    logits = torch.randn(T, 5000, generator=torch.Generator().manual_seed(9)) * scale
    logits[6, 100:4990] = -math.inf
    p = problem(logits, entropy_coef=0.1, softcap=20.0)
    check(p, results(load(backend), p, logits.to(device, copy=True), device))


def test_many_tokens(backend: str, device: str) -> None:
    """More than one block of them, the last part full; dead ones hold NaN."""
    g = torch.Generator().manual_seed(8)
    live = torch.rand(600, generator=g) > 0.2
    values = [torch.randn(600, generator=g).masked_fill(~live, math.nan) for _ in range(5)]
    tokens = Tokens(live, torch.rand(600, generator=g) * live, values[0], None, values[1], values[2].abs())
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])._replace(kl_coef=0.1)
    given = (values[3], 0.3 * values[4])
    truth = reference.token_loss(*(x.double() for x in given), wide(tokens), scalars)
    found = load(backend).token_loss(*(x.to(device) for x in given), moved(tokens, device), scalars)
    for got, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected.double(), rtol=1e-5, atol=1e-6)


# --- rows that ranks hold parts of ------------------------------------------------------------------------

V = 150
CUTS = {"two": (75, 75), "one_column": (149, 1), "four": (40, 50, 3, 57)}


def in_parts(
    by: Backend, logits: Tensor, request: RowRequest, cut: tuple[int, ...], slopes: Slopes
) -> tuple[list[RowStats], Tensor]:
    """What each rank comes to know of the whole rows, and their gradient, put together from each rank's columns."""
    parts, first, requests, sent = logits.split(cut, 1), 0, [], []
    for part in parts:
        requests.append(request_for_columns(request, first, part.shape[1]))
        sent.append(stats_to_send(by.row_stats(part.clone(), requests[-1]), requests[-1]))
        first += part.shape[1]
    known = [whole_stats(by, torch.stack(sent), request) for _ in parts]
    gradients = []
    for part, own, stats in zip(parts, requests, known, strict=True):
        gradients.append(torch.full_like(part, math.nan, memory_format=torch.contiguous_format))
        by.row_grad(gradients[-1], part.clone(), own, stats, slopes)
    return known, torch.cat(gradients, 1)


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "far": {"shift": 1e4},
    "further": {"shift": 1e8, "size": 30.0},  # where a maximum in base 2 is no float
    "very far": {"shift": 3e9, "size": 100.0},  # and where two of them differ by less than its rounding
    "peaked": {"size": 200.0},
    "bfloat16": {"dtype": torch.bfloat16},
    "impossible": {"impossible": slice(40, 90)},
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_parts_are_the_whole(backend: str, device: str, cut: tuple[int, ...], kind: str) -> None:
    """Statistics and gradient of rows that are cut into columns, also where some of them are −∞ only."""
    how = {"size": 3.0, "shift": 0.0, "dtype": torch.float32, "softcap": None, "impossible": slice(0), **PARTS[kind]}
    by, g = load(backend), torch.Generator().manual_seed(5)
    logits = how["shift"] + how["size"] * torch.randn(T, V, generator=g)
    logits[:, how["impossible"]] = -math.inf
    logits = logits.to(how["dtype"]).to(device)
    live = torch.tensor([True] * (T - 2) + [False] * 2)
    targets = torch.tensor([0, V - 1, 7, 39, 149, 20, -100])
    taus = 0.5 + torch.rand(T, generator=g)
    request = moved(RowRequest(targets, live, 1.0, taus, True, softcap=how["softcap"]), device)
    slopes = Slopes(*(torch.randn(T, generator=g).to(device) for _ in range(2)))
    truth, expected = by.row_stats(logits.clone(), request), torch.empty_like(logits)
    by.row_grad(expected, logits.clone(), request, truth, slopes)
    known, gradient = in_parts(by, logits, request, cut, slopes)
    for stats in known:
        assert torch.equal(stats.norm, known[0].norm)
        torch.testing.assert_close(stats.logprobs, truth.logprobs, atol=1e-6, rtol=3e-7)
        torch.testing.assert_close(stats.entropy, truth.entropy, atol=1e-6, rtol=1e-6)
    rtol = 1e-5 if how["dtype"] == torch.float32 else 2**-7
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=rtol)
    assert not gradient[:, how["impossible"]].any()
    if kind == "impossible":
        request.target_ids[:] = 45
        (known, *_), _ = in_parts(by, logits, request, cut, slopes)
        assert torch.equal(known.logprobs, by.row_stats(logits.clone(), request).logprobs)
        assert known.logprobs.isneginf().tolist() == live.tolist()


@pytest.mark.parametrize("column", [3, 125])
def test_a_nan_in_anyones_columns_shows(backend: str, device: str, column: int) -> None:
    logits = torch.randn(T, V, generator=torch.Generator().manual_seed(5))
    logits[2, column] = math.nan
    logits[-1] = math.nan  # a dead row may hold anything
    live = torch.arange(T) < T - 1
    request = moved(RowRequest(torch.arange(T), live, 1.0, None, True), device)
    slopes = Slopes(*(torch.ones(T, device=device) for _ in range(2)))
    (known, *_), gradient = in_parts(load(backend), logits.to(device), request, (75, 75), slopes)
    spoilt = [t == 2 for t in range(T)]
    assert known.logprobs.isnan().tolist() == known.entropy.isnan().tolist() == spoilt
    assert gradient.isnan().any(1).tolist() == spoilt
