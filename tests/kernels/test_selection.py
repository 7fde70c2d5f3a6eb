"""Which tokens train: the selections themselves, and a selection made once that every micro-batch obeys."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from cases import HEAD, Case, linear_case, logits_case, part_of
from entries import LOGITS_ENTRIES, call, token_values
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import covariances, highest, share_down, share_up
from test_random import FIXED
from torch import Tensor

from dapo_kernels import select, token_logprobs


def indices(mask: Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


# --- select.py --------------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 40),
    dead=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([2e-4, 0.07, 0.2, 0.29, 0.5, 1.0]),
    ties=st.booleans(),
    garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e38]),
)
@example(n=1, dead=0.0, seed=0, share=1.0, ties=False, garbage=0.0)
@settings(FIXED, max_examples=80)
def test_selections_take_the_highest(n: int, dead: float, seed: int, share: float, ties: bool, garbage: float) -> None:
    """Of ties the earlier token, whatever dead tokens hold."""
    g = torch.Generator().manual_seed(seed)
    logprobs, advantages, entropy = -torch.rand(n, generator=g), torch.randn(n, generator=g), torch.rand(n, generator=g)
    live = torch.rand(n, generator=g) >= dead
    if ties:
        entropy = (4 * entropy).round()
    dirty = [x.masked_fill(~live, garbage) for x in (logprobs, advantages, entropy)]
    tokens, alive = indices(live), live.tolist()
    scores = covariances(logprobs.double(), advantages.double(), alive)
    got = select.covariance(dirty[0], dirty[1], live)
    assert indices(got > -math.inf) == tokens
    assert [float(got[t]) for t in scores] == pytest.approx(list(scores.values()), rel=1e-5, abs=1e-6)
    kept = highest({t: float(entropy[t]) for t in tokens}, share_up(alive, share))
    assert indices(select.top_entropy(dirty[2], live, share)) == kept
    paying = highest({t: float(got[t]) for t in tokens}, share_down(alive, share))
    assert indices(select.kl_cov(dirty[0], dirty[1], live, (share, 1.0))) == paying
    hit = (torch.rand(n, generator=g) < 0.3).to(torch.int8)
    candidates = {t for t in tokens if 0.01 < float(got[t]) < 0.3 and not hit[t]}
    drawn = indices(select.clip_cov(dirty[0], dirty[1], live, hit, (share, 0.01, 0.3), None))
    assert drawn <= candidates
    assert len(drawn) == min(len(candidates), share_down(alive, share))


def test_a_share_is_not_off_by_one() -> None:
    """In binary, 0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996."""
    for share, n, up, down in (
        (0.2, 10, 2, 2),
        (0.2, 11, 3, 2),
        (0.07, 100, 7, 7),
        (0.29, 100, 29, 29),
        (0.5, 0, 1, 1),
    ):
        live = torch.arange(n + 3) < n
        assert int(select.share_of(live, share, rounding="up")) == up
        assert int(select.share_of(live, share, rounding="down")) == down


def test_clip_cov_draws_evenly_and_from_its_generator_alone() -> None:
    g = torch.Generator().manual_seed(7)
    logprobs, advantages, live = -torch.rand(40, generator=g) * 4, torch.randn(40, generator=g), torch.ones(40).bool()
    hit = torch.zeros(40, dtype=torch.int8)

    def drawn(generator: torch.Generator | None) -> set[int]:
        return indices(select.clip_cov(logprobs, advantages, live, hit, (0.1, 0.2, 1.5), generator))

    before, times, one = torch.random.get_rng_state(), Counter[int](), torch.Generator().manual_seed(3)
    assert drawn(torch.Generator().manual_seed(3)) == drawn(one)
    for _ in range(600):
        chosen = drawn(one)
        assert len(chosen) == 4
        times.update(chosen)
    assert torch.equal(torch.random.get_rng_state(), before), "a generator was given; the global one moved"
    scores = covariances(logprobs.double(), advantages.double(), live.tolist())
    assert set(times) == {t for t, score in scores.items() if 0.2 < score < 1.5}
    expected = 600 * 4 / len(times)
    assert all(abs(n - expected) < 6 * math.sqrt(expected) for n in times.values())
    torch.manual_seed(5)
    first = drawn(None)
    torch.manual_seed(5)
    assert drawn(None) == first


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["global", "own"])
def test_clip_cov_draws_evenly_whatever_the_default_dtype(generator: torch.Generator | None) -> None:
    """In bfloat16 there are few random numbers, and of equal ones the earlier token would be drawn."""
    n, drawn = 4000, []
    logprobs, advantages = torch.linspace(-2.0, 0.0, n), torch.linspace(-1.0, 1.0, n)
    for dtype in (torch.float32, torch.bfloat16):
        (generator or torch.default_generator).manual_seed(5)
        torch.set_default_dtype(dtype)
        try:
            hit = torch.zeros(n, dtype=torch.int8)
            drawn.append(select.clip_cov(logprobs, advantages, hit == 0, hit, (0.01, -1.0, 9.0), generator))
        finally:
            torch.set_default_dtype(torch.float32)
    assert int(drawn[0].sum()) == 40
    assert torch.equal(*drawn)


# --- the selection of a call ------------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "top_entropy": {"top_entropy": 0.3},
    "clip_cov": {"clip_cov": (0.2, 0.05, 3.0), "clip_low": 0.2, "clip_high": 0.2},
    "kl_cov": {"kl_cov": (0.25, 0.7)},
}
LENGTHS = (2, 12, 4)
ENTRIES = (*LOGITS_ENTRIES, "linear")


def case_of(entry: str, dead: float = 0.2) -> Case:
    return (linear_case if entry == "linear" else logits_case)(23, lengths=LENGTHS, seed=61, dead=dead)


def full_selection(name: str, case: Case) -> Tensor:
    """What a trainer computes once over the whole batch."""
    logprobs, entropy = token_values(case)
    if name == "top_entropy":
        return select.top_entropy(entropy, case.mask, 0.3)
    if name == "kl_cov":
        return select.kl_cov(logprobs, case.advantages, case.mask, CUTS[name]["kl_cov"])
    ratio = (logprobs - case.old_logprobs).exp()
    hit = ((case.advantages > 0) & (ratio > 1.2)) | ((case.advantages < 0) & (ratio < 0.8))
    generator = torch.Generator().manual_seed(1)
    return select.clip_cov(logprobs, case.advantages, case.mask, hit.to(torch.int8), CUTS[name]["clip_cov"], generator)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", CUTS)
def test_a_selection_handed_in_is_the_one_that_is_made_and_holds_for_parts(backend: str, name: str, entry: str) -> None:
    """The reason for `selection=`: one decision over the batch, then any split of it."""
    case = case_of(entry)
    chosen = full_selection(name, case)
    assert 1 <= int(chosen.sum()) < int(case.mask.sum())
    shared = {**CUTS[name], "with_entropy": name == "top_entropy", "denominator": float(case.mask.sum())}
    generator = {"generator": torch.Generator().manual_seed(1)} if name == "clip_cov" else {}
    made, made_grads = call(entry, case, name, **shared, **generator)
    whole, grads = call(entry, case, name, selection=chosen | ~case.mask, **shared)  # it may name dead tokens
    torch.testing.assert_close(made.loss, whole.loss, rtol=1e-6, atol=1e-7)
    added, total = {key: torch.zeros_like(grad) for key, grad in grads.items()}, 0.0
    for i in range(len(LENGTHS)):
        part, places = part_of(case, [i])
        out, part_grads = call(entry, part, name, selection=chosen[places], **shared)
        total += out.loss.item()
        for key, grad in part_grads.items():
            added[key][slice(None) if key in HEAD else places] += grad
    assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(made_grads, grads, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(added, grads, rtol=1e-4, atol=1e-7)
    none, _ = call(entry, case, name, selection=torch.zeros(18, dtype=torch.bool), **shared)
    assert none.loss.item() != pytest.approx(whole.loss.item(), rel=1e-3)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_threshold_is_the_mask_it_cuts(backend: str, entry: str) -> None:
    """top_entropy takes an entropy too; as a number or as a 0-d tensor."""
    case = case_of(entry)
    entropy, chosen = token_values(case)[1], full_selection("top_entropy", case)
    threshold = (entropy[chosen].min() + entropy[case.mask & ~chosen].max()) / 2
    by_mask, grads = call(entry, case, "top_entropy", selection=chosen, with_entropy=True)
    for value in (float(threshold), threshold, threshold.double()):
        out, got = call(entry, case, "top_entropy", selection=value, with_entropy=True)
        torch.testing.assert_close((out.loss, *got.values()), (by_mask.loss, *grads.values()), rtol=1e-5, atol=1e-7)


def test_the_threshold_itself_trains_and_entropy_is_not_computed_for_a_known_selection(backend: str) -> None:
    """entropy >= threshold: the k-th largest entropy, as computed, keeps k tokens."""
    case = case_of("logits", dead=0.0)
    entropy = token_logprobs(case.leaves["logits"], case.target_ids, entropy=True).entropy
    threshold = entropy.sort(descending=True).values[3]
    _, grads = call("logits", case, "top_entropy", selection=threshold, clip_low=1.0, clip_high=math.inf)
    assert int((grads["logits"].abs().amax(-1) > 0).sum()) == 4
    known, _ = call("inplace", case, "top_entropy", selection=entropy > threshold)
    assert known.entropy is None
    assert call("inplace", case, "top_entropy")[0].entropy is not None


def test_an_entropy_that_is_not_a_number_shows_in_the_loss(backend: str) -> None:
    case = case_of("logits", dead=0.0)
    case.leaves["logits"][3] = math.nan
    for threshold in (0.0, 99.0):
        out, _ = call("logits", case, "top_entropy", selection=threshold)
        assert math.isnan(out.loss.item())


def test_the_draw_of_a_call_comes_from_its_generator(backend: str) -> None:
    """And not from what dead tokens hold."""
    case, losses = case_of("logits"), []
    for seed, fill in ((0, -1.0), (0, math.nan), (1, -1.0), (2, -1.0), (3, -1.0)):
        filled = dataclasses.replace(case, old_logprobs=case.old_logprobs.masked_fill(~case.mask, fill))
        generator = torch.Generator().manual_seed(seed)
        out, _ = call("logits", filled, "clip_cov", generator=generator, clip_cov=(0.1, 0.0, 5.0))
        losses.append(out.loss.item())
    assert losses[0] == losses[1]
    assert len(set(losses)) > 1
