"""Edges of the surrogates beyond the clip, combinations that are refused, tokens that do not train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dapo_kernels import Objective, dapo_loss, linear_dapo_loss, policy_loss

# --- edges of the surrogates ------------------------------------------------------------------------------


def one_token(name: str, logprob: float, old: float, advantage: float, **changes: Any) -> tuple[float, float, Any]:
    leaf = torch.tensor([logprob], requires_grad=True)
    given = (leaf, torch.tensor([old]), torch.tensor([advantage]))
    out = policy_loss(*given, objective=name, cu_seqlens=torch.tensor([0, 1]), **changes)
    out.loss.backward()
    assert leaf.grad is not None
    return out.loss.item(), float(leaf.grad), out


def apart(delta: float, largest: float = 0.0) -> tuple[float, float]:
    """Log-prob and old log-prob, the larger one ``largest``."""
    return largest + min(delta, 0.0), largest + min(-delta, 0.0)


@pytest.mark.parametrize("name", ["cispo", "sapo"])
def test_a_zero_advantage_is_an_exact_zero(backend: str, name: str) -> None:
    for delta in (0.0, 5.0, 100.0, 1e4, -1e4):
        loss, slope, out = one_token(name, *apart(delta, -200.0), 0.0)
        assert (loss, slope) == (0.0, 0.0)
        assert float(out.metrics["clip_low"] + out.metrics["clip_high"]) == 0


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_sapo_at_one_and_far_from_it(backend: str, advantage: float) -> None:
    """At ratio 1 the slope is PPO's; far above, the gate has shut and nothing overflows; far below, ratio 0."""
    tau = 1.0 if advantage > 0 else 1.05
    loss, slope, _ = one_token("sapo", -1.25, -1.25, advantage)
    assert loss == pytest.approx(-advantage * 2 / tau, rel=1e-6)
    assert slope == pytest.approx(-advantage, rel=1e-6)
    for delta in (6.0, 50.0, 100.0):
        loss, slope, _ = one_token("sapo", *apart(delta), advantage)
        assert loss == pytest.approx(-advantage * 4 / tau, rel=1e-6)
        assert slope == pytest.approx(0.0, abs=1e-30)
    loss, slope, _ = one_token("sapo", -100.0, 0.0, advantage)
    assert loss == pytest.approx(-advantage * 4 / tau / (1 + math.exp(tau)), rel=1e-6)
    assert slope == pytest.approx(0.0, abs=1e-30)


def test_sapo_slopes_between(backend: str) -> None:
    """Down to gates of 1e-8, where 1 - sigmoid in float32 would have no digit left."""
    for delta in (-2.0, -0.3, 0.4, 1.0, 2.0, 2.9):
        for advantage in (0.7, -0.7):
            tau, ratio = (1.0 if advantage > 0 else 1.05), math.exp(float(torch.tensor(delta)))
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            closing = 1 / (1 + math.exp(tau * (ratio - 1)))
            _, slope, _ = one_token("sapo", *apart(delta), advantage)
            assert slope == pytest.approx(-advantage * 4 * gate * closing * ratio, rel=2e-5)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(backend: str, advantage: float) -> None:
    """Weight min(ratio, 5) with the row's bounds: 1 + clip_high is the raw 5.0 of the libraries that print that."""
    for delta, weight in ((0.5, math.exp(0.5)), (1.7, 5.0), (100.0, 5.0), (-100.0, 0.0)):
        logprob, old = apart(delta, -2.0)
        loss, slope, out = one_token("cispo", logprob, old, advantage)
        assert slope == pytest.approx(-weight * advantage, rel=1e-6)
        assert loss == pytest.approx(-weight * advantage * logprob, rel=1e-6)
        assert float(out.metrics["clip_high"]) == float(weight == 5.0)
        assert float(out.metrics["clip_low"]) == 0
    loss, slope, out = one_token("cispo", -2.0, -1.0, advantage, clip_low=0.2)
    assert slope == pytest.approx(-0.8 * advantage, rel=1e-6)
    assert float(out.metrics["clip_low"]) == 1


def test_kl_cov_does_not_clip(backend: str) -> None:
    for delta, advantage in ((2.0, 1.0), (-2.0, -1.0)):
        loss, slope, out = one_token("kl_cov", -3.0 + delta, -3.0, advantage, kl_cov=(1.0, 0.5))
        assert loss == pytest.approx(-math.exp(delta) * advantage + 0.5 * abs(delta), rel=1e-6)
        assert slope == pytest.approx(-math.exp(delta) * advantage + 0.5 * math.copysign(1, delta), rel=1e-6)
        assert float(out.metrics["clip_low"] + out.metrics["clip_high"]) == 0


def test_dppo_minds_the_probability_and_not_the_ratio(backend: str) -> None:
    """A rare token may become ten times as likely; a likely one may not lose a quarter of its probability."""
    for name, delta in (("dppo_tv", 0.2), ("dppo_kl", 0.05)):
        for new, old, advantage, trains in (
            (1e-3, 1e-4, 1.0, True),
            (0.7, 0.97, -1.0, False),
            (0.7, 0.97, 1.0, True),  # on its way back
            (0.97, 0.7, 1.0, False),
            (0.97, 0.7, -1.0, True),
        ):
            loss, slope, out = one_token(name, math.log(new), math.log(old), advantage)
            weight = new / old if trains else 0.0
            assert slope == pytest.approx(-weight * advantage, rel=1e-5), (name, delta, new, old)
            assert loss == pytest.approx(-weight * advantage * math.log(new), rel=1e-5)
            hit = "clip_high" if advantage > 0 else "clip_low"
            assert float(out.metrics[hit]) == float(not trains)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_of_certain_tokens(backend: str, name: str) -> None:
    """Log-probs that float32 has rounded to 0, before, after and both: no infinity, and no gradient lost to one."""
    for new, old in ((0.0, 0.0), (0.0, -1e-6), (-1e-6, 0.0), (0.0, -1e-4)):
        for advantage in (1.0, -1.0):
            loss, slope, _ = one_token(name, new, old, advantage)
            assert slope == pytest.approx(-advantage * math.exp(new - old), rel=1e-5), (new, old)
            assert math.isfinite(loss)
    assert one_token(name, 0.0, -2.0, 1.0)[1] == 0.0


def test_dppo_bounds_the_weight_and_keeps_the_gradient(backend: str) -> None:
    loss, slope, out = one_token("dppo_tv", -6.0, -8.0, -1.0, dual_clip=5.0)
    assert (loss, slope) == (pytest.approx(-30.0), pytest.approx(5.0))
    assert float(out.metrics["clip_dual"]) == 1


def two_sequences(name: str, delta: list[float], advantages: list[float], **changes: Any) -> tuple[Any, list[float]]:
    """Sequences of two tokens, with log-ratios ``delta``; the slope of every log-prob, times their number."""
    log_ratio = torch.tensor(delta)
    leaf = (log_ratio.clamp(max=0.0) - 2.0).requires_grad_()
    bounds = {"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)}
    old = leaf.detach() - log_ratio
    out = policy_loss(leaf, old, torch.tensor(advantages), objective=name, **bounds, **changes)
    out.loss.backward()
    assert leaf.grad is not None
    return out, (4 * leaf.grad).tolist()


def test_vespo_weighs_a_response_by_its_whole_ratio(backend: str) -> None:
    """W = 1 weighs 1 whatever its tokens do; far from it the weight vanishes, and nothing overflows."""
    _, slopes = two_sequences("vespo", [0.7, -0.7, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0])
    assert slopes == pytest.approx([-1.0, -1.0, 1.0, 1.0], rel=1e-6)
    _, slopes = two_sequences("vespo", [0.2, 0.3, 0.2, 0.3], [1.0, 1.0, -1.0, -1.0])
    w = math.exp(0.5)
    expected = (-(w**2) * math.exp(3 * (1 - w)), w**3 * math.exp(2 * (1 - w)))
    assert slopes == pytest.approx([expected[0]] * 2 + [expected[1]] * 2, rel=1e-5)
    for far in (60.0, -60.0):
        out, slopes = two_sequences("vespo", [far] * 4, [1.0, 1.0, -1.0, -1.0])
        assert slopes == pytest.approx([0.0] * 4, abs=1e-6)
        assert out.loss.item() == pytest.approx(0.0, abs=1e-6)


def test_the_off_policy_mask_leaves_gains_and_the_kl_alone(backend: str) -> None:
    """Both responses have become improbable; only the one with A < 0 loses its policy term, and not its KL's."""
    fields: dict[str, Any] = {"kl_coef": 0.5, "kl_estimator": "k1", "ref_logprobs": torch.full((4,), -2.0)}
    _, slopes = two_sequences("opsm", [-0.5, -0.7, -0.5, -0.7], [1.0, 1.0, -1.0, -1.0], **fields)
    expected = [0.5 - math.exp(-0.5), 0.5 - math.exp(-0.7), 0.5, 0.5]
    assert slopes == pytest.approx(expected, rel=1e-5)
    _, slopes = two_sequences("opsm", [-0.5, -0.7, -0.5, -0.4], [1.0, 1.0, -1.0, -1.0], clip_low=1.0)
    assert slopes[2] == pytest.approx(math.exp(-0.5), rel=1e-5)  # a mean of 0.45 is within 0.5


def test_gmpo_clips_a_token_before_the_mean(backend: str) -> None:
    """Far beyond the range a token counts as the bound, and passes no gradient; the others still do."""
    out, slopes = two_sequences("gmpo", [3.0, 0.1, -3.0, -0.1], [1.0, 1.0, -1.0, -1.0])
    ratios = math.exp(0.25), math.exp(-0.25)
    assert slopes == pytest.approx([0.0, -ratios[0], 0.0, ratios[1]], rel=1e-5)
    assert out.loss.item() == pytest.approx((ratios[1] - ratios[0]) / 2, rel=1e-5)
    assert [float(out.metrics[key]) for key in ("clip_low", "clip_high")] == [1, 1]
    assert float(out.metrics["ratio_max"]) == pytest.approx(ratios[0], rel=1e-5)


def test_a_penalty_to_the_old_policy_starts_at_nothing(backend: str) -> None:
    """On-policy DRO is REINFORCE, with old log-probs and without."""
    x, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -0.5])
    slopes = []
    for objective, old in (("reinforce", None), ("dro", None), ("dro", x)):
        leaf = x.clone().requires_grad_()
        policy_loss(leaf, old, advantages, objective=objective).loss.backward()
        slopes.append(leaf.grad)
    assert torch.equal(slopes[0], slopes[1])
    assert torch.equal(slopes[0], slopes[2])


# --- refusals ---------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"objective": "reinforce", "ratio": "sequence"}, ("reinforce", "ratio")),
    ({"objective": "reinforce", "clip_cov": (0.1, 1.0, 5.0)}, ("reinforce", "clip_cov")),
    ({"objective": "reinforce", "kl_cov": (0.1, 1.0)}, ("reinforce", "kl_cov")),
    ({"objective": "reinforce", "clip_high": 0.3}, ("clip_high", "reinforce")),
    ({"objective": "reinforce", "dual_clip": 3.0}, ("dual_clip", "reinforce")),
    ({"objective": "sapo", "clip_low": 0.3}, ("clip_low", "sapo")),
    ({"objective": "sapo", "dual_clip": 3.0}, ("dual_clip", "sapo")),
    ({"objective": "cispo", "dual_clip": 3.0}, ("dual_clip", "cispo")),
    ({"objective": "gmpo", "dual_clip": 3.0}, ("dual_clip", "sequence_clipped")),
    ({"objective": "cispo", "ratio": "sequence_clipped"}, ("sequence_clipped", "cispo")),
    ({"objective": "dppo_tv", "ratio": "sequence"}, ("dppo_tv", "ratio")),
    ({"objective": "dppo_kl", "sapo_tau": (1.0, 2.0)}, ("sapo_tau", "dppo_kl")),
    ({"objective": "dro", "kl_estimator": "k1"}, ("kl_to", "k1")),
    ({"objective": "dro", "ref_logprobs": torch.zeros(6)}, ("ref_logprobs", "kl_to='old'")),
    ({"objective": "dro", "kl_to": "new"}, ("kl_to", "reference")),
    ({"objective": "vespo", "vespo": (1.0, 2.0)}, ("vespo", "λ for A < 0")),
    ({"objective": "vespo", "cu_seqlens": None}, ("cu_seqlens", "vespo")),
    ({"objective": "opsm", "off_policy_mask": -0.1}, ("off_policy_mask", "-0.1")),
    ({"objective": "opsm", "aggregate": "token-mean", "cu_seqlens": None}, ("cu_seqlens", "off_policy_mask")),
    ({"objective": "dapo", "sapo_tau": (1.0, 2.0)}, ("sapo_tau", "clip")),
    ({"objective": "top_entropy", "clip_cov": (0.1, 1.0, 5.0)}, ("top_entropy", "clip_cov")),
    ({"objective": "top_entropy", "kl_cov": (0.1, 1.0)}, ("top_entropy", "kl_cov")),
    ({"objective": "clip_cov", "kl_cov": (0.1, 1.0)}, ("clip_cov", "kl_cov")),
    ({"objective": "gspo", "kl_coef": 0.1, "kl_through_ratio": True, "ref_logprobs": torch.zeros(6)}, ("sequence",)),
    ({"objective": "dapo", "length_norm": 8.0}, ("length_norm", "token-mean")),
    ({"objective": "spo", "old_logprobs": None}, ("max_old_prob", "old_logprobs")),
    ({"objective": "gspo", "cu_seqlens": None}, ("cu_seqlens",)),
    ({"objective": "gspo_token", "cu_seqlens": None, "aggregate": "token-mean"}, ("cu_seqlens", "sequence_token")),
    ({"objective": "dapo", "selection": torch.ones(6, dtype=torch.bool)}, ("selection",)),
    ({"objective": "spo", "selection": torch.ones(6, dtype=torch.bool)}, ("selection",)),
    ({"objective": "clip_cov", "selection": 0.5}, ("selection", "clip_cov")),
    ({"objective": "kl_cov", "selection": torch.tensor(0.5)}, ("selection", "kl_cov")),
    ({"objective": "top_entropy", "selection": torch.ones(5, dtype=torch.bool)}, ("selection", "[6]", "[5]")),
    ({"objective": "top_entropy", "top_entropy": 0.0}, ("top_entropy", "0.0")),
    ({"objective": "top_entropy", "top_entropy": 1.5}, ("top_entropy", "1.5")),
    ({"objective": "spo", "max_old_prob": 0.0}, ("max_old_prob",)),
    ({"objective": "sapo", "sapo_tau": (0.0, 1.0)}, ("sapo_tau",)),
    ({"objective": "sapo", "sapo_tau": 1.0}, ("sapo_tau",)),
    ({"objective": "clip_cov", "clip_cov": (0.1, 1.0)}, ("clip_cov", "share, low, high")),
    ({"objective": "clip_cov", "clip_cov": (0.0, 1.0, 5.0)}, ("clip_cov",)),
    ({"objective": "kl_cov", "kl_cov": (0.1, math.nan)}, ("kl_cov",)),
    ({"objective": "gspo", "ratio": "sentence"}, ("ratio", "sequence_token")),
    ({"objective": "cispo", "surrogate": "cispoo"}, ("surrogate", "cispo")),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=lambda v: "-".join(map(str, v)) if type(v) is tuple else "")
def test_combinations_without_a_meaning_are_refused(wrong: dict[str, Any], words: tuple[str, ...]) -> None:
    """By name, at every entry point, whatever the tensors hold."""
    shared: dict[str, Any] = {
        "old_logprobs": torch.full((6,), -2.0),
        "advantages": torch.ones(6),
        "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32),
        **wrong,
    }
    ids = torch.arange(6)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (dapo_loss, {"logits": torch.randn(6, 11), "target_ids": ids}),
        (linear_dapo_loss, {"hidden": torch.randn(6, 4), "weight": torch.randn(11, 4), "target_ids": ids}),
        (policy_loss, {"logprobs": torch.full((6,), -2.1), "entropy": torch.ones(6)}),
    ]
    for fn, kwargs in calls:
        with pytest.raises(ValueError, match=words[0]) as caught:
            fn(**kwargs, **shared)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_top_entropy_of_logprobs_needs_the_entropy(backend: str) -> None:
    x = torch.full((6,), -2.0)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(x, x, torch.ones(6), objective="top_entropy")
    chosen = torch.tensor([True, False] * 3)
    out = policy_loss(x, x, torch.ones(6), objective="top_entropy", selection=chosen)
    assert out.loss.item() == pytest.approx(-0.5)


def test_an_objective_object_is_checked_like_a_name() -> None:
    for fields in ({"clip_cov": (0.1, 1.0, 5.0), "kl_cov": (0.1, 1.0)}, {"surrogate": "sapo", "dual_clip": 2.0}):
        with pytest.raises(ValueError, match=r"choose one|dual_clip"):
            Objective(**fields)  # type: ignore[arg-type]


# --- tokens that do not train -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["selection", "entropy", "clip_cov", "importance weight", "max_old_prob"])
def test_a_token_that_does_not_train_cannot_spoil_the_loss(backend: str, kind: str) -> None:
    """Its ratio (or its KL estimate) overflows float32, and it has no say: like a masked token, where, not multiply."""
    old, advantages = torch.tensor([-1.1, -200.0, -0.5]), torch.tensor([1.0, -1.0, 1.0])
    chosen = torch.tensor([True, False, True])
    kwargs: dict[str, Any] = {
        "selection": {"objective": "top_entropy", "selection": chosen},
        "entropy": {"objective": "top_entropy", "top_entropy": 0.5, "entropy": torch.tensor([1.0, 0.1, 0.9])},
        "clip_cov": {"objective": "clip_cov", "selection": ~chosen},
        "importance weight": {"objective": "dapo", "importance_weights": chosen.float()},
        "max_old_prob": {"objective": "spo", "kl_coef": 0.1, "ref_logprobs": torch.tensor([-1.0, 0.0, -1.0])},
    }[kind]
    leaf = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    if kind == "max_old_prob":
        old[1], leaf = -0.01, torch.tensor([-1.0, -150.0, -0.5], requires_grad=True)
    out = policy_loss(leaf, old, advantages, **kwargs)
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert leaf.grad is not None
    assert leaf.grad[1] == 0.0
    assert bool(leaf.grad.isfinite().all())


def test_a_token_that_does_not_train_cannot_spoil_the_gradient_of_logits(backend: str) -> None:
    """The same where the loss and its gradient are one pass over the logits, and where they are two."""
    cases = [{"objective": "top_entropy", "selection": torch.tensor([True, False, True])}]
    cases += [{"objective": "dapo", "importance_weights": torch.tensor([1.0, 0.0, 1.0])}]
    for kwargs in cases:
        for inplace in (False, True):
            logits = torch.zeros(3, 4, requires_grad=True)
            out = dapo_loss(
                logits,
                torch.tensor([0, 1, 2]),
                torch.tensor([-1.0, -200.0, -1.0]),
                torch.tensor([1.0, -1.0, 1.0]),
                inplace_backward=inplace,
                **kwargs,
            )
            out.loss.backward()
            assert math.isfinite(out.loss.item())
            assert logits.grad is not None
            assert bool(logits.grad.isfinite().all())
            assert not logits.grad[1].any()
