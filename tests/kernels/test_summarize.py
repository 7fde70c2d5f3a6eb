"""Metrics are sums over live tokens that add up over micro-batches; `summarize` turns them into means."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import linear_case, logits_case
from ranks import on_ranks
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, policy_loss, reduce_metrics, summarize
from dapo_kernels.losses import LossOutput

KEYS = {
    "tokens",
    "clip_low",
    "clip_high",
    "clip_high_prob",
    "clip_dual",
    "ratio",
    "ratio_max",
    "approx_kl",
    "ref_kl",
    "entropy",
    "nonfinite",
    "positive_logprobs",
}

# log-ratio, advantage, live; what hits which limit with clip .2/.28 and dual clip 3
TOKENS = (
    (math.log(0.5), -1.0, True),  # low
    (math.log(0.5), 1.0, True),  # below the range but A > 0: not clipped
    (math.log(2.0), 1.0, True),  # high
    (math.log(2.0), 3.0, True),  # high
    (math.log(2.0), -1.0, True),  # above the range but A < 0: not clipped
    (math.log(4.0), -1.0, True),  # dual
    (math.log(9.0), 1.0, False),  # dead: would be the largest ratio
    (math.log(0.5), 0.0, True),  # zero advantage: nothing to clip
)


def hand_made(order: slice | None = None) -> Any:
    delta, advantages, live = (torch.tensor(column) for column in zip(*TOKENS, strict=True))
    if order is not None:
        delta, advantages, live = delta[order], advantages[order], live[order]
    old = torch.full_like(delta, -2.0)
    ref = old - 0.5
    return policy_loss(
        old + delta,
        old,
        advantages,
        objective="dapo",
        mask=live,
        dual_clip=3.0,
        kl_coef=0.01,
        kl_estimator="k1",
        ref_logprobs=ref,
        entropy=torch.full_like(delta, 2.0),
        entropy_coef=0.01,
    )


def test_sums_by_hand(backend: str) -> None:
    metrics = hand_made().metrics
    assert set(metrics) == KEYS
    deltas = [delta for delta, _, live in TOKENS if live]
    expected = {
        "tokens": 7,
        "clip_low": 1,
        "clip_high": 2,
        "clip_high_prob": 2 * 2.0 / math.e**2,
        "clip_dual": 1,
        "ratio": sum(math.exp(d) for d in deltas),
        "ratio_max": 4.0,
        "approx_kl": -sum(deltas),
        "ref_kl": sum(d + 0.5 for d in deltas),
        "entropy": 14.0,
        "nonfinite": 0,
        "positive_logprobs": 0,
    }
    for key, value in expected.items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-5), key


def test_metrics_are_detached_zero_dim_tensors(backend: str) -> None:
    case = logits_case(seed=121)
    out = dapo_loss(case.fresh()["logits"], case.target_ids, case.old_logprobs, case.advantages, entropy=True)
    assert set(out.metrics) == KEYS
    for value in out.metrics.values():
        assert isinstance(value, Tensor)
        assert value.shape == ()
        assert not value.requires_grad


def test_summarize_one(backend: str) -> None:
    sums = hand_made().metrics
    means = summarize(sums)
    assert set(means) == KEYS
    assert all(type(value) is float for value in means.values())
    assert means["clip_high_prob"] == pytest.approx(2.0 / math.e**2)
    assert "clip_high_prob" not in summarize(hand_made(slice(0, 2)).metrics)  # nothing is clipped from above
    for key in KEYS - {"tokens", "nonfinite", "positive_logprobs", "ratio_max", "clip_high_prob"}:
        assert means[key] == pytest.approx(float(sums[key]) / 7), key
    for key in ("tokens", "nonfinite", "positive_logprobs", "ratio_max"):
        assert means[key] == float(sums[key])


def test_micro_batches_summarize_to_the_whole(backend: str) -> None:
    whole = summarize(hand_made().metrics)
    parts = [hand_made(slice(a, b)).metrics for a, b in ((0, 1), (1, 5), (5, 6), (6, 7), (7, 8))]
    for pieces in (parts, iter(parts), tuple(reversed(parts))):
        means = summarize(pieces)
        for key, value in whole.items():
            assert means[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


def test_summarize_leaves_its_input_alone(backend: str) -> None:
    sums = hand_made().metrics
    before = {key: value.clone() for key, value in sums.items()}
    summarize([sums, sums])
    assert all(torch.equal(sums[key], before[key]) for key in sums)


def test_summarize_without_live_tokens(backend: str) -> None:
    """A batch with nothing to train has no means to take; it must not divide by zero."""
    case = logits_case(seed=122, mask=torch.zeros(19, dtype=torch.bool))
    out = dapo_loss(case.leaves["logits"], case.target_ids, case.old_logprobs, case.advantages, mask=case.mask)
    means = summarize(out.metrics)
    assert means["tokens"] == 0
    assert all(value == 0 for value in means.values())
    live = hand_made().metrics
    for key, value in summarize([out.metrics, live]).items():
        assert value == pytest.approx(summarize(live)[key], abs=1e-7), key


@pytest.mark.parametrize("public", [dapo_loss, linear_dapo_loss, policy_loss])
def test_an_entropy_that_nobody_computed_is_not_reported_as_zero(backend: str, public: Callable[..., Any]) -> None:
    case = linear_case(seed=123) if public is linear_dapo_loss else logits_case(seed=123)
    leaves = [torch.full_like(case.old_logprobs, -2.0)] if public is policy_loss else list(case.fresh().values())[:2]
    targets = [] if public is policy_loss else [case.target_ids]
    tokens = (*targets, case.old_logprobs, case.advantages)
    out = public(*leaves, *tokens)
    assert out.entropy is None
    assert set(out.metrics) == set(summarize(out.metrics)) == KEYS - {"entropy"}
    asked = torch.full_like(case.old_logprobs, 3.0) if public is policy_loss else True
    for said in ({"entropy": asked}, {"entropy": asked, "mask": torch.zeros_like(case.mask)}):
        assert set(public(*leaves, *tokens, **said).metrics) == KEYS
        assert set(summarize(public(*leaves, *tokens, **said).metrics)) >= KEYS - {"clip_high_prob"}


def test_entropy_is_a_mean_over_the_tokens_it_was_computed_for(backend: str) -> None:
    asked = hand_made().metrics
    silent = {key: value for key, value in hand_made().metrics.items() if key != "entropy"}
    for parts in ([asked, silent, silent], [silent, asked]):
        means = summarize(parts)
        assert means["entropy"] == pytest.approx(2.0)
        assert means["tokens"] == 7 * len(parts)


def test_a_maximum_that_is_not_a_number_stays_visible(backend: str) -> None:
    sums = hand_made().metrics
    broken = {**sums, "ratio_max": torch.tensor(math.nan)}
    for parts in ([sums, broken], [broken, sums]):
        assert math.isnan(summarize(parts)["ratio_max"])


def test_nonfinite_counts_tokens(backend: str) -> None:
    logprobs = torch.tensor([-1.0, -math.inf, math.nan, -math.inf, -2.0, -3.0])
    mask = torch.tensor([1, 1, 1, 0, 1, 0])
    out = policy_loss(logprobs, torch.full((6,), -1.0), torch.ones(6), mask=mask)
    assert float(out.metrics["nonfinite"]) == 2
    assert summarize(out.metrics)["nonfinite"] == 2.0


def test_many_tokens_are_counted_exactly(backend: str) -> None:
    """Counts past 2^24 stay whole when micro-batches add up."""
    part = {key: torch.tensor(0.0) for key in KEYS}
    part["tokens"] = torch.tensor(float(2**24))
    one = {**part, "tokens": torch.tensor(1.0)}
    assert summarize([part, one, one])["tokens"] == 2**24 + 2


def some_output() -> LossOutput:
    return dapo_loss(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), None, torch.ones(2))


@pytest.mark.parametrize("wrong", [None, "x", 3, [1.0], some_output()])
def test_anything_else_than_metrics_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"summarize: metrics"):
        summarize(wrong)


def test_metrics_are_those_of_the_call_or_none() -> None:
    """They are computed when they are read: from buffers that were filled anew they would be another batch's."""
    logprobs, old, mask = torch.zeros(4, requires_grad=True), -torch.ones(4), torch.ones(4, dtype=torch.bool)
    for buffer in (old, mask):
        out = policy_loss(logprobs, old, torch.ones(4), mask=mask)
        buffer.zero_()
        with pytest.raises(RuntimeError, match="metrics: "):
            summarize(out.metrics)
    out = policy_loss(logprobs, old, torch.ones(4))
    first = dict(out.metrics)
    old.zero_()
    assert dict(out.metrics) == first  # read before


def test_libraries_may_rebuild_metrics() -> None:
    """As accelerate does with every mapping that a forward pass returns."""
    out = policy_loss(torch.zeros(4, requires_grad=True), -torch.ones(4), torch.ones(4))
    again = type(out.metrics)({name: value.float() for name, value in out.metrics.items()})
    assert summarize(again) == summarize(out.metrics)
    assert summarize(pickle.loads(pickle.dumps(out.metrics))) == summarize(out.metrics)


RANKS = 3


def metrics_of_a_rank(rank: int) -> list[Any]:
    """Two micro-batches; none; one that alone knows an entropy and has the largest ratio."""
    silent = {key: value for key, value in hand_made(slice(0, 3)).metrics.items() if key != "entropy"}
    return [[silent, silent], [], [hand_made().metrics]][rank]


def reduce_on_a_rank(rank: int, folder: Path) -> None:
    pair = dist.new_group([1, 2])
    reduced = {"all": reduce_metrics(metrics_of_a_rank(rank))}
    if rank > 0:
        reduced["pair"] = reduce_metrics(metrics_of_a_rank(rank), pair)
    with pytest.raises(ValueError, match="reduce_metrics: "):
        reduce_metrics([])
    (folder / str(rank)).write_text(json.dumps(reduced))


@pytest.mark.ranks
def test_reduced_over_ranks_is_summarized_over_all_their_micro_batches(tmp_path: Path) -> None:
    on_ranks(RANKS, reduce_on_a_rank, tmp_path)
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    of_all = [part for rank in range(RANKS) for part in metrics_of_a_rank(rank)]
    assert [rank["all"] for rank in ranks] == [summarize(of_all)] * RANKS
    assert [rank["pair"] for rank in ranks[1:]] == [summarize(metrics_of_a_rank(2))] * 2
    assert ranks[0]["all"]["ratio_max"] == pytest.approx(4.0)  # not the sum of three
    assert ranks[0]["all"]["entropy"] == pytest.approx(2.0)  # over the tokens that have one


def test_reduced_over_one_process_is_summarized() -> None:
    metrics = hand_made().metrics
    assert reduce_metrics(metrics) == reduce_metrics([metrics]) == summarize(metrics)
    with pytest.raises(TypeError, match="reduce_metrics: metrics"):
        reduce_metrics([some_output()])
