"""Which tokens train: the selections themselves, and a selection made once that every micro-batch obeys."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case
from entries import LOGITS_ENTRIES, call, token_values
from oracle_family import covariances, highest, share_down
from torch import Tensor

from dapo_kernels import dapo_loss, select, token_logprobs

DEAD_VALUES = (math.nan, math.inf, -math.inf, 1e38)


def draw(seed: int, n: int = 40, dead: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, advantages, live."""
    g = torch.Generator().manual_seed(seed)
    return -torch.rand(n, generator=g) * 4, torch.randn(n, generator=g), torch.rand(n, generator=g) >= dead


def indices(mask: Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


# --- select.py --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_covariance_is_the_papers_equation(seed: int) -> None:
    logprobs, advantages, live = draw(seed)
    truth = covariances(logprobs.double(), advantages.double(), live.tolist())
    for value in (0.0, *DEAD_VALUES):
        got = select.covariance(logprobs.masked_fill(~live, value), advantages.masked_fill(~live, value), live)
        assert indices(got > -math.inf) == set(truth)
        for t, expected in truth.items():
            assert float(got[t]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_highest_takes_live_tokens_and_the_earlier_of_equals(count: int) -> None:
    scores = torch.tensor([3.0, 1.0, 3.0, math.inf, 2.0, 3.0, -9.0, 1.0])
    live = torch.tensor([True, True, True, False, True, True, True, True])
    expected = highest({t: float(scores[t]) for t in range(8) if live[t]}, count)
    assert indices(select.highest(scores, live, torch.tensor(count))) == expected
    dirty = scores.masked_fill(~live, math.nan)
    assert indices(select.highest(dirty, live, torch.tensor(count))) == expected


def test_highest_of_all_equal_takes_the_first() -> None:
    live = torch.ones(1000, dtype=torch.bool)
    assert indices(select.highest(torch.zeros(1000), live, torch.tensor(17))) == set(range(17))


@pytest.mark.parametrize(
    ("share", "n", "up", "down"),
    [
        (0.2, 10, 2, 2),
        (0.2, 11, 3, 2),
        (0.2, 1, 1, 1),
        (0.07, 100, 7, 7),  # 0.07 * 100 is 7.000000000000001 in binary
        (0.29, 100, 29, 29),  # 0.29 * 100 is 28.999999999999996
        (2e-4, 4999, 1, 1),
        (2e-4, 5000, 1, 1),
        (2e-4, 10000, 2, 2),
        (1.0, 7, 7, 7),
        (0.5, 0, 1, 1),
    ],
)
def test_a_share_is_not_off_by_one(share: float, n: int, up: int, down: int) -> None:
    live = torch.cat([torch.ones(n, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)])
    assert int(select.share_of(live, share, rounding="up")) == up
    assert int(select.share_of(live, share, rounding="down")) == down


@pytest.mark.parametrize("seed", range(3))
def test_top_entropy_and_kl_cov_take_the_highest(seed: int) -> None:
    logprobs, advantages, live = draw(seed)
    entropy = torch.rand(40, generator=torch.Generator().manual_seed(seed))
    n = int(live.sum())
    tokens = indices(live)
    kept = highest({t: float(entropy[t]) for t in tokens}, math.ceil(0.2 * n - 1e-9))
    assert indices(select.top_entropy(entropy.masked_fill(~live, math.nan), live, 0.2)) == kept
    scores = covariances(logprobs.double(), advantages.double(), live.tolist())
    paying = highest(scores, share_down(live.tolist(), 0.3))
    assert indices(select.kl_cov(logprobs, advantages, live, (0.3, 1.0))) == paying


def clip_cov_candidates(logprobs: Tensor, advantages: Tensor, live: Tensor, hit: Tensor) -> set[int]:
    scores = covariances(logprobs.double(), advantages.double(), live.tolist())
    return {t for t, s in scores.items() if 0.2 < s < 1.5 and not hit[t]}


def test_clip_cov_draws_evenly_among_its_candidates() -> None:
    logprobs, advantages, live = draw(7)
    hit = (torch.rand(40, generator=torch.Generator().manual_seed(8)) < 0.3).to(torch.int8)
    candidates = clip_cov_candidates(logprobs, advantages, live, hit)
    count = share_down(live.tolist(), 0.1)
    assert 0 < count < len(candidates) < int(live.sum())
    drawn: Counter[int] = Counter()
    generator = torch.Generator().manual_seed(0)
    draws = 600
    for _ in range(draws):
        chosen = indices(select.clip_cov(logprobs, advantages, live, hit, (0.1, 0.2, 1.5), generator))
        assert len(chosen) == count
        assert chosen <= candidates
        drawn.update(chosen)
    assert set(drawn) == candidates
    expected = draws * count / len(candidates)
    assert all(abs(times - expected) < 6 * math.sqrt(expected) for times in drawn.values())


def test_clip_cov_takes_all_when_there_are_too_few() -> None:
    logprobs, advantages, live = draw(7)
    hit = torch.zeros(40, dtype=torch.int8)
    candidates = clip_cov_candidates(logprobs, advantages, live, hit)
    chosen = select.clip_cov(logprobs, advantages, live, hit, (1.0, 0.2, 1.5), None)
    assert indices(chosen) == candidates
    none = select.clip_cov(logprobs, advantages, live, hit, (1.0, 50.0, 60.0), None)
    assert not none.any()


def test_the_generator_alone_decides() -> None:
    logprobs, advantages, live = draw(9)
    hit = torch.zeros(40, dtype=torch.int8)

    def chosen(generator: torch.Generator | None) -> Tensor:
        return select.clip_cov(logprobs, advantages, live, hit, (0.05, 0.2, 1.5), generator)

    before = torch.random.get_rng_state()
    a = [chosen(torch.Generator().manual_seed(s)) for s in range(8)]
    assert torch.equal(torch.random.get_rng_state(), before), "a generator was given; the global one moved"
    b = [chosen(torch.Generator().manual_seed(s)) for s in range(8)]
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert len({tuple(x.tolist()) for x in a}) > 1
    one = torch.Generator().manual_seed(0)
    assert len({tuple(chosen(one).tolist()) for _ in range(8)}) > 1, "the generator does not advance"
    torch.manual_seed(5)
    first = chosen(None)
    torch.manual_seed(5)
    assert torch.equal(first, chosen(None))


@pytest.mark.parametrize("live_tokens", [0, 1, 2])
def test_selections_of_almost_nothing(live_tokens: int) -> None:
    live = torch.zeros(5, dtype=torch.bool)
    live[:live_tokens] = True
    x = torch.linspace(-2, -1, 5)
    assert indices(select.top_entropy(x, live, 0.2)) == indices(live) & ({live_tokens - 1})
    assert int(select.kl_cov(x, x, live, (0.2, 1.0)).sum()) == min(live_tokens, 1)
    assert not select.clip_cov(x, x, live, torch.zeros(5, dtype=torch.int8), (0.5, 1.0, 5.0), None).any()
    empty = torch.zeros(0)
    assert select.top_entropy(empty, empty.bool(), 0.2).shape == (0,)


# --- the selection of a call ------------------------------------------------------------------------------

SPLITS = {"one": [(0, 18)], "halves": [(0, 9), (9, 18)], "uneven": [(0, 2), (2, 14), (14, 18)]}
CUTS: dict[str, dict[str, Any]] = {
    "top_entropy": {"top_entropy": 0.3},
    "clip_cov": {"clip_cov": (0.2, 0.05, 3.0)},
    "kl_cov": {"kl_cov": (0.25, 0.7)},
}


def entropies(case: Case) -> Tensor:
    return token_values(case)[1]


def full_selection(name: str, case: Case) -> Tensor:
    """What a trainer computes once over the whole batch."""
    logprobs = token_values(case)[0]
    if name == "top_entropy":
        return select.top_entropy(entropies(case), case.mask, CUTS[name]["top_entropy"])
    if name == "kl_cov":
        return select.kl_cov(logprobs, case.advantages, case.mask, CUTS[name]["kl_cov"])
    ratio = (logprobs - case.old_logprobs).exp()
    hit = ((case.advantages > 0) & (ratio > 1.2)) | ((case.advantages < 0) & (ratio < 0.8))
    generator = torch.Generator().manual_seed(1)
    return select.clip_cov(logprobs, case.advantages, case.mask, hit.to(torch.int8), CUTS[name]["clip_cov"], generator)


def part_of(case: Case, a: int, b: int) -> Case:
    fields = ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs", "importance_weights")
    leaves = {k: v if k in ("weight", "bias") else v[a:b] for k, v in case.leaves.items()}
    part = {f: getattr(case, f)[a:b] for f in fields}
    return dataclasses.replace(case, **part, lengths=(b - a,), leaves=leaves)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CUTS)
def test_micro_batches_with_a_selection_add_up_to_the_whole(backend: str, name: str, split: str) -> None:
    """The reason for `selection=`: one decision over the batch, then any split of it."""
    options = {**CUTS[name], "kl_coef": 0.1, "entropy_coef": 0.05}
    for entry in (*LOGITS_ENTRIES, "linear"):
        make: Callable[..., Case] = linear_case if entry == "linear" else logits_case
        case = make(23, lengths=(18,), seed=61, dead=0.2)
        chosen = full_selection(name, case)
        assert 1 <= int(chosen.sum()) < int(case.mask.sum())
        extra = {"with_entropy": True} if entry == "policy" else {}
        kw = {**options, **extra, "denominator": float(case.mask.sum())}
        whole, grads = call(entry, case, name, selection=chosen, ref_logprobs=case.ref_logprobs, **kw)
        total, parts = 0.0, []
        for a, b in SPLITS[split]:
            part = part_of(case, a, b)
            out, grad = call(entry, part, name, selection=chosen[a:b], ref_logprobs=part.ref_logprobs, **kw)
            total += out.loss.item()
            parts.append(grad)
        assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6)
        for key, grad in grads.items():
            pieces = [p[key] for p in parts]
            joined = torch.stack(pieces).sum(0) if key == "weight" else torch.cat(pieces)
            torch.testing.assert_close(joined, grad, rtol=1e-4, atol=1e-7, msg=f"{entry} {key}")


@pytest.mark.parametrize("name", CUTS)
def test_a_selection_handed_in_is_the_one_that_would_have_been_made(backend: str, name: str) -> None:
    case = logits_case(23, lengths=(18,), seed=61, dead=0.2)
    chosen = full_selection(name, case)
    for entry in LOGITS_ENTRIES:
        extra: dict[str, Any] = {"with_entropy": True} if entry == "policy" else {}
        own = {**extra, "generator": torch.Generator().manual_seed(1)} if name == "clip_cov" else extra
        made, made_grads = call(entry, case, name, **own, **CUTS[name])
        given, given_grads = call(entry, case, name, selection=chosen, **extra, **CUTS[name])
        torch.testing.assert_close(made.loss, given.loss, rtol=1e-6, atol=1e-7)
        for key, grad in made_grads.items():
            torch.testing.assert_close(grad, given_grads[key], rtol=1e-5, atol=1e-9)
        for layout in ("packed", "padded"):
            same, _ = call(entry, case, name, layout=layout, selection=chosen, **extra, **CUTS[name])
            torch.testing.assert_close(same.loss, given.loss, rtol=1e-6, atol=1e-7)
    without, _ = call("logits", case, name, selection=torch.zeros(18, dtype=torch.bool), **CUTS[name])
    assert without.loss.item() != pytest.approx(given.loss.item(), rel=1e-3)


@pytest.mark.parametrize("entry", [*LOGITS_ENTRIES, "linear"])
def test_a_threshold_is_the_mask_it_cuts(backend: str, entry: str) -> None:
    """top_entropy takes the entropy of the last token in; as a number or as a 0-d tensor; per micro-batch too."""
    make: Callable[..., Case] = linear_case if entry == "linear" else logits_case
    case = make(23, lengths=(18,), seed=62, dead=0.2)
    chosen = select.top_entropy(entropies(case), case.mask, 0.3)
    inside, outside = entropies(case)[chosen].min(), entropies(case)[case.mask & ~chosen].max()
    threshold = (inside + outside) / 2
    extra: dict[str, Any] = {"with_entropy": True} if entry == "policy" else {}
    kw = {**extra, "denominator": float(case.mask.sum())}
    by_mask, grads = call(entry, case, "top_entropy", selection=chosen, **kw)
    for value in (float(threshold), threshold, threshold.double()):
        out, got = call(entry, case, "top_entropy", selection=value, **kw)
        torch.testing.assert_close(out.loss, by_mask.loss, rtol=1e-6, atol=1e-7)
        for key, grad in grads.items():
            torch.testing.assert_close(got[key], grad, rtol=1e-5, atol=1e-8)
    total = 0.0
    for a, b in SPLITS["uneven"]:
        out, _ = call(entry, part_of(case, a, b), "top_entropy", selection=threshold, **kw)
        total += out.loss.item()
    assert total == pytest.approx(by_mask.loss.item(), rel=1e-5)


def test_the_threshold_itself_trains(backend: str) -> None:
    """entropy >= threshold: the k-th largest entropy, as computed, keeps k tokens."""
    case = logits_case(23, lengths=(18,), seed=63, dead=0.0)
    got = token_logprobs(case.leaves["logits"], case.target_ids, entropy=True).entropy
    assert got is not None
    threshold = got.sort(descending=True).values[3]
    _, grads = call("logits", case, "top_entropy", selection=threshold, clip_low=1.0, clip_high=math.inf)
    assert int((grads["logits"].abs().amax(-1) > 0).sum()) == 4


def test_clip_cov_is_reproducible_from_its_generator(backend: str) -> None:
    case = logits_case(23, lengths=(18,), seed=64, dead=0.2)
    for entry in LOGITS_ENTRIES:
        losses = []
        for seed in (0, 0, 1, 2, 3, 4, 5):
            generator = torch.Generator().manual_seed(seed)
            out, _ = call(entry, case, "clip_cov", generator=generator, clip_cov=(0.1, 0.0, 5.0))
            losses.append(out.loss.item())
        assert losses[0] == losses[1]
        assert len(set(losses)) > 2


def test_the_draw_does_not_depend_on_what_dead_tokens_hold(backend: str) -> None:
    case = logits_case(23, lengths=(18,), seed=65, dead=0.3)
    results = []
    for value in (0.0, math.nan):
        dirty = dataclasses.replace(case, old_logprobs=case.old_logprobs.masked_fill(~case.mask, value))
        generator = torch.Generator().manual_seed(3)
        results.append(call("logits", dirty, "clip_cov", generator=generator, clip_cov=(0.1, 0.0, 5.0)))
    assert torch.equal(results[0][0].loss, results[1][0].loss)
    assert torch.equal(results[0][1]["logits"], results[1][1]["logits"])


def test_a_selection_may_name_dead_tokens(backend: str) -> None:
    """A mask made elsewhere, true on padding: dead stays dead."""
    case = logits_case(23, lengths=(18,), seed=66, dead=0.4)
    for name, cut in CUTS.items():
        chosen = full_selection(name, case)
        clean, grads = call("logits", case, name, selection=chosen, **cut)
        wide, wide_grads = call("logits", case, name, selection=chosen | ~case.mask, **cut)
        assert torch.equal(clean.loss, wide.loss), name
        assert torch.equal(grads["logits"], wide_grads["logits"]), name


def test_entropy_is_not_asked_for_where_the_selection_is_known(backend: str) -> None:
    """With a mask there is no entropy left to compute: one pass, and None in the result."""
    case = logits_case(23, lengths=(18,), seed=67)
    chosen = select.top_entropy(entropies(case), case.mask, 0.3)
    out, _ = call("inplace", case, "top_entropy", selection=chosen)
    assert out.entropy is None
    out, _ = call("inplace", case, "top_entropy")
    assert out.entropy is not None


def test_all_dead_with_every_selection(backend: str) -> None:
    for name in CUTS:
        logits = torch.randn(4, 9, requires_grad=True)
        ids, zeros, dead = torch.zeros(4, dtype=torch.int64), torch.zeros(4), torch.zeros(4, dtype=torch.bool)
        out = dapo_loss(logits, ids, zeros, zeros, objective=name, mask=dead)
        out.loss.backward()
        assert out.loss.item() == 0.0
        assert logits.grad is not None
        assert not logits.grad.any()
