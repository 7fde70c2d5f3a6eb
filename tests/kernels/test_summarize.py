"""Metrics are sums over live tokens that add up over micro-batches; `summarize` turns them into means."""

from __future__ import annotations

import inspect
import io
import math
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import linear_case, logits_case
from entries import call
from ranks import on_ranks
from torch import Tensor

from dapo_kernels import policy_loss, reduce_metrics, summarize

COUNTS = {"tokens", "nonfinite", "positive_logprobs"}
MEANS = {"clip_low", "clip_high", "clip_dual", "ratio", "approx_kl", "ref_kl", "entropy"}
KEYS = COUNTS | MEANS | {"clip_high_prob", "ratio_max"}

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


def hand_made(part: slice = slice(None)) -> Any:
    """The metrics of those tokens."""
    delta, advantages, live = (torch.tensor(column)[part] for column in zip(*TOKENS, strict=True))
    old = torch.full_like(delta, -2.0)
    given: dict[str, Any] = {"mask": live, "dual_clip": 3.0, "ref_logprobs": old - 0.5, "entropy_coef": 0.01}
    given |= {"kl_coef": 0.01, "kl_estimator": "k1", "entropy": torch.full_like(delta, 2.0)}
    return policy_loss((old + delta).requires_grad_(), old, advantages, objective="dapo", **given).metrics


def test_sums_and_means_by_hand(backend: str) -> None:
    metrics = hand_made()
    deltas = [delta for delta, _, live in TOKENS if live]
    sums = {
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
    assert {key: float(value) for key, value in metrics.items()} == pytest.approx(sums, rel=1e-5)
    assert all(x.shape == () and not x.requires_grad for x in metrics.values())
    before = dict(metrics)
    means = summarize(metrics)
    assert all(type(value) is float for value in means.values())
    expected = {key: value / 7 if key in MEANS else value for key, value in sums.items()}
    assert means == pytest.approx(expected | {"clip_high_prob": 2.0 / math.e**2}, rel=1e-5)
    assert "clip_high_prob" not in summarize(hand_made(slice(0, 2)))  # nothing is clipped from above
    assert all(metrics[key] is before[key] for key in KEYS)


def test_micro_batches_summarize_to_the_whole(backend: str) -> None:
    parts = [hand_made(slice(a, b)) for a, b in ((0, 1), (1, 5), (5, 6), (6, 7), (7, 8))]  # one is dead
    for pieces in (parts, iter(parts), tuple(reversed(parts))):
        assert summarize(pieces) == pytest.approx(summarize(hand_made()), rel=1e-6, abs=1e-7)
    assert reduce_metrics(parts[1]) == reduce_metrics(parts[1:2]) == summarize(parts[1])  # of one process


@pytest.mark.parametrize("entry", ["logits", "linear", "policy"])
def test_an_entropy_that_nobody_computed_is_not_reported_as_zero(backend: str, entry: str) -> None:
    case = (linear_case if entry == "linear" else logits_case)(seed=123)
    out, _ = call(entry, case, "dapo")
    assert out.entropy is None
    assert set(out.metrics) == KEYS - {"entropy"}
    asked = {"with_entropy": True} if entry == "policy" else {"entropy": True}
    for mask in (case.mask, torch.zeros_like(case.mask)):
        case.mask = mask
        out, _ = call(entry, case, "dapo", **asked)
        assert set(out.metrics) == KEYS
    assert not any(summarize(out.metrics).values())  # without a live token there is nothing to divide by


def test_an_entropy_that_some_know_and_a_maximum_that_is_not_a_number() -> None:
    """The mean is over the tokens it was computed for; a NaN stays visible."""
    asked = hand_made()
    silent = {key: value for key, value in asked.items() if key != "entropy"}
    broken = {**asked, "ratio_max": torch.tensor(math.nan)}
    for parts in ([asked, silent, silent], [silent, asked]):
        means = summarize(parts)
        assert (means["entropy"], means["tokens"]) == (pytest.approx(2.0), 7 * len(parts))
    assert all(math.isnan(summarize(parts)["ratio_max"]) for parts in ([asked, broken], [broken, asked]))


def test_every_metric_is_defined() -> None:
    """In a line of its own in ``help(summarize)``; the maximum beside its mean."""
    text = inspect.getdoc(summarize) or ""
    assert all(re.search(rf"^ +(ratio, )?{key}\b.* {{2}}", text, re.MULTILINE) for key in KEYS)


def test_counts_are_whole(backend: str) -> None:
    """Live tokens that are not finite; and numbers past 2^24."""
    logprobs = torch.tensor([-1.0, -math.inf, math.nan, -math.inf, -2.0, -3.0])
    out = policy_loss(logprobs, torch.full((6,), -1.0), torch.ones(6), mask=torch.tensor([1, 1, 1, 0, 1, 0]))
    assert summarize(out.metrics)["nonfinite"] == 2.0
    many = {**dict.fromkeys(KEYS, torch.tensor(0.0)), "tokens": torch.tensor(float(2**24))}
    one = {**many, "tokens": torch.tensor(1.0)}
    assert summarize([many, one, one])["tokens"] == 2**24 + 2


def output() -> Any:
    return policy_loss(-torch.ones(4, requires_grad=True), -torch.ones(4), torch.ones(4))


@pytest.mark.parametrize(
    "wrong",
    [None, "x", 3, [1.0], output(), {"tokens": 3.0}, {"tokens": torch.ones(2)}],  # the last one gathered from two ranks
    ids=lambda wrong: type(wrong).__name__,
)
def test_anything_else_than_metrics_is_refused(wrong: Any) -> None:
    for function in (summarize, reduce_metrics):
        with pytest.raises(TypeError, match=f"{function.__name__}: metrics"):
            function(wrong)
        for none in ([], {}, [{}]):
            with pytest.raises(ValueError, match=f"{function.__name__}: no metrics"):
                function(none)


def test_metrics_are_those_of_the_call_or_none() -> None:
    """They are computed when they are read: from buffers that were filled anew they would be another batch's."""

    def overwrite(read_before: bool, buffer: int) -> Any:
        buffers: list[Tensor] = [-torch.ones(4), torch.ones(4, dtype=torch.bool)]
        out = policy_loss(torch.zeros(4, requires_grad=True), buffers[0], torch.ones(4), mask=buffers[1])
        first = dict(out.metrics) if read_before else None
        buffers[buffer].zero_()
        return first, out.metrics

    for buffer in (0, 1):
        first, metrics = overwrite(True, buffer)
        assert dict(metrics) == first
        with pytest.raises(RuntimeError, match="metrics: "):
            summarize(overwrite(False, buffer)[1])
        with torch.inference_mode():  # where no change can be noticed
            assert dict(overwrite(False, buffer)[1]) == first


def test_libraries_may_rebuild_metrics() -> None:
    """As accelerate does with every mapping that a forward pass returns."""
    metrics = output().metrics
    again = type(metrics)({name: value.float() for name, value in metrics.items()})
    assert len(metrics) == len(again) > 5
    assert "tokens" in repr(metrics)
    assert summarize(again) == summarize(metrics) == summarize(pickle.loads(pickle.dumps(metrics)))


def test_a_checkpoint_may_hold_metrics() -> None:
    metrics, checkpoint = output().metrics, io.BytesIO()
    torch.save({"metrics": metrics}, checkpoint)
    checkpoint.seek(0)
    assert summarize(torch.load(checkpoint)["metrics"]) == summarize(metrics)


# --- over ranks -------------------------------------------------------------------------------------------


def reduce_on_a_rank(rank: int) -> None:
    """Two micro-batches; none; one that alone knows an entropy and has the largest ratio."""
    silent = {key: value for key, value in hand_made(slice(0, 3)).items() if key != "entropy"}
    of_ranks, pair = [[silent, silent], [], [hand_made()]], dist.new_group([1, 2])
    assert reduce_metrics(of_ranks[rank]) == summarize([part for parts in of_ranks for part in parts])
    if rank > 0:
        assert reduce_metrics(of_ranks[rank], pair) == summarize(of_ranks[2])
    with pytest.raises(ValueError, match="reduce_metrics: "):
        reduce_metrics([])


@pytest.mark.ranks
def test_reduced_over_ranks_is_summarized_over_all_their_micro_batches() -> None:
    on_ranks(3, reduce_on_a_rank)
