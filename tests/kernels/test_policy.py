"""The O(T) arithmetic: surrogate, clip edges, dual clip, KL estimators, weights, entropy. `policy_loss` throughout."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch
from closeness import as_accurate
from oracle import Options, TokenInputs, batch_loss
from torch import Tensor

from dapo_kernels import policy_loss, use_backend

LENGTHS = (4, 1, 6, 3)
SPANS = [(0, 4), (4, 5), (5, 11), (11, 14)]
CU_SEQLENS = torch.tensor([0, 4, 5, 11, 14], dtype=torch.int32)
LOG_RATIOS = (-1.2, -0.5, -0.35, -0.1, 0.0, 0.03, 0.1, 0.215, 0.4, 0.55, 0.9, 1.3)


def draw(seed: int) -> dict[str, Tensor]:
    """Float32 inputs of 14 tokens, ratios away from every clip edge in use here."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    logprobs = -torch.rand(n, generator=g) * 4 - 1.5  # at most 0 with every log-ratio
    delta = torch.tensor(LOG_RATIOS)[torch.randint(len(LOG_RATIOS), (n,), generator=g)]
    return {
        "logprobs": logprobs,
        "old": logprobs - delta - 0.01 * torch.rand(n, generator=g),
        "advantages": torch.randn(n, generator=g),
        "ref": (logprobs + torch.randn(n, generator=g) * 0.5).clamp(max=0.0),
        "weights": torch.rand(n, generator=g) * 2,
        "entropy": torch.rand(n, generator=g) * 3,
        "mask": torch.rand(n, generator=g) > 0.3,
    }


def solve(x: dict[str, Tensor], o: Options, dtype: torch.dtype, **kw: Any) -> tuple[Tensor, Tensor, Tensor, dict]:
    """Oracle loss, gradient by log-prob and by entropy, metrics."""
    logprobs = x["logprobs"].to(dtype, copy=True).requires_grad_()
    entropy = x["entropy"].to(dtype, copy=True).requires_grad_()
    inputs = TokenInputs(
        logprobs,
        x["advantages"].to(dtype),
        None if kw.get("on_policy") else x["old"].to(dtype),
        x["ref"].to(dtype) if o.kl_coef else None,
        x["weights"].to(dtype) if kw.get("weighted") else None,
        entropy if o.entropy_coef else None,
    )
    loss, metrics = batch_loss(inputs, x["mask"].tolist(), SPANS, o, kw.get("denominator"))
    loss.backward()
    d_entropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    d_logprobs = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    return loss.detach(), d_logprobs, d_entropy, metrics


def name_of(o: Options) -> str:
    """What differs from PPO, for the test's id."""
    said = (f"{key}={value}" for key, value in o.keywords().items() if value != getattr(Options(), key))
    return ",".join(said) or "plain"


def check(x: dict[str, Tensor], o: Options, **kw: Any) -> None:
    """`policy_loss` against the oracle: loss, both gradients, every metric."""
    truth, d_logprobs, d_entropy, metrics = solve(x, o, torch.float64, **kw)
    eager, eager_logprobs, eager_entropy, _ = solve(x, o, torch.float32, **kw)
    logprobs = x["logprobs"].clone().requires_grad_()
    entropy = x["entropy"].clone().requires_grad_()
    out = policy_loss(
        logprobs,
        None if kw.get("on_policy") else x["old"],
        x["advantages"],
        objective="ppo",
        mask=x["mask"],
        cu_seqlens=CU_SEQLENS,
        denominator=kw.get("denominator"),
        **({"entropy": entropy} if o.entropy_coef else {}),
        **({"ref_logprobs": x["ref"]} if o.kl_coef else {}),
        **({"importance_weights": x["weights"]} if kw.get("weighted") else {}),
        **o.keywords(),
    )
    out.loss.backward()
    as_accurate(out.loss, truth, eager, what="loss", scale=1.0)
    as_accurate(logprobs.grad, d_logprobs, eager_logprobs, what="log-prob gradient", scale=0.5)
    if o.entropy_coef:
        as_accurate(entropy.grad, d_entropy, eager_entropy, what="entropy gradient")
    for key, value in metrics.items():
        if key == "entropy" and not o.entropy_coef:
            continue
        assert float(out.metrics[key]) == pytest.approx(value, rel=2e-6, abs=2e-5), key


@pytest.mark.parametrize(
    "o",
    [
        Options(),
        Options(clip_low=0.1, clip_high=0.5),
        Options(clip_low=1.0, clip_high=3.0),
        Options(dual_clip=2.0),
        Options(dual_clip=1.1),  # below 1 + clip_high: still the bound -cA for A < 0
        Options(surrogate="reinforce"),
        Options(kl_coef=0.3, kl_estimator="k1"),
        Options(kl_coef=0.3, kl_estimator="k2"),
        Options(kl_coef=0.3, kl_estimator="k3"),
        Options(kl_coef=0.3, kl_estimator="k3", kl_through_ratio=True),
        Options(surrogate="reinforce", kl_coef=0.3, kl_estimator="k3", kl_through_ratio=True),
        Options(entropy_coef=0.1),
        Options(entropy_coef=-0.1),  # a penalty on entropy is as well defined as a bonus
        Options(kl_coef=0.3, entropy_coef=0.1, dual_clip=2.0, aggregate="seq-mean-token-mean"),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("seed", range(3))
def test_each_option_alone(backend: str, o: Options, seed: int) -> None:
    check(draw(seed), o)
    check(draw(seed + 10), o, weighted=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_combinations(backend: str, seed: int) -> None:
    """Options do not interact beyond what the formulas say: a random walk through their product."""
    rng = random.Random(seed)
    for _ in range(4):
        surrogate = rng.choice(["clip", "clip", "reinforce"])
        estimator = rng.choice(["k1", "k2", "k3"])
        o = Options(
            surrogate=surrogate,
            clip_low=rng.choice([0.0, 0.2, 0.9]),
            clip_high=rng.choice([0.0, 0.28, 1.7]),
            dual_clip=rng.choice([None, 1.5, 3.2]) if surrogate == "clip" else None,
            kl_coef=rng.choice([0.0, 0.04, 1.0]),
            kl_estimator=estimator,
            kl_through_ratio=False,
            entropy_coef=rng.choice([0.0, 0.01, -0.5]),
            aggregate=rng.choice(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
        )
        if estimator == "k3" and o.kl_coef:
            o = dataclasses.replace(o, kl_through_ratio=rng.random() < 0.5)
        check(
            draw(rng.randrange(10**6)),
            o,
            weighted=rng.random() < 0.5,
            on_policy=rng.random() < 0.3,
            denominator=rng.choice([None, 9.5]),
        )


def one_token(logprob: float, old: float | None, advantage: float, **options: Any) -> tuple[float, float, Any]:
    """Loss, d loss / d logprob and output for a batch of one token; float32."""
    leaf = torch.tensor([logprob], requires_grad=True)
    old_logprobs = None if old is None else torch.tensor([old])
    out = policy_loss(leaf, old_logprobs, torch.tensor([advantage]), objective="ppo", **options)
    out.loss.backward()
    assert leaf.grad is not None
    return out.loss.item(), float(leaf.grad), out


def apart(log_ratio: float) -> tuple[float, float]:
    """Log-prob and old log-prob, the larger one 0: their difference does not round."""
    return min(log_ratio, 0.0), min(-log_ratio, 0.0)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_ratio_of_exactly_one_keeps_its_gradient(backend: str, advantage: float) -> None:
    """At ratio 1 both branches tie whatever the clip range, also an empty one, and w = -A."""
    for low, high in itertools.product((0.0, 0.2), (0.0, 0.28)):
        loss, slope, out = one_token(-1.25, -1.25, advantage, clip_low=low, clip_high=high)
        assert loss == -advantage
        assert slope == -advantage
        assert float(out.metrics["clip_low"]) == 0
        assert float(out.metrics["clip_high"]) == 0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "options"),
    [
        (math.log(2.0), 1.5, {"clip_high": 1.0}),
        (math.log(0.5), -1.5, {"clip_low": 0.5}),
        (math.log(2.0), -1.5, {"dual_clip": 2.0}),
    ],
)
def test_exactly_on_an_edge_is_not_clipped(backend: str, log_ratio: float, advantage: float, options: dict) -> None:
    """exp(float32(log 2)) is 2 to 2e-9: correctly rounded it is the edge itself, and a tie takes the first branch."""
    ratio = math.exp(log_ratio)
    loss, slope, out = one_token(*apart(log_ratio), advantage, **options)
    assert loss == pytest.approx(-ratio * advantage, rel=1e-6)
    assert slope == pytest.approx(-ratio * advantage, rel=1e-6)
    assert all(float(out.metrics[key]) == 0 for key in ("clip_low", "clip_high", "clip_dual"))


@pytest.mark.parametrize("edge", [0.8, 1.2, 1.28])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_around_an_edge(backend: str, edge: float, advantage: float) -> None:
    """Within some float32 steps of an edge either branch is right, but slope and count must tell the same one."""
    start = torch.log(torch.tensor(edge))
    seen = set()
    for steps in (-40, -3, -2, -1, 0, 1, 2, 3, 40):
        delta = float(start.view(torch.int32).add(steps).view(torch.float32))
        loss, slope, out = one_token(*apart(delta), advantage, clip_low=0.2, clip_high=edge - 1 if edge > 1 else 0.28)
        counted = float(out.metrics["clip_low"] + out.metrics["clip_high"])
        assert loss == pytest.approx(-advantage * edge, rel=1e-5)
        assert (slope, counted) == (0.0, 1.0) or (slope == pytest.approx(-advantage * edge, rel=1e-5) and counted == 0)
        seen.add(counted)
    flips = (edge > 1) == (advantage > 0)  # the upper edge acts on A > 0, the lower on A < 0
    assert seen == ({0.0, 1.0} if flips else {0.0})


def test_a_zero_advantage_is_an_exact_zero_at_any_ratio(backend: str) -> None:
    for delta in (0.0, 5.0, 80.0, 100.0, 1e4, -1e4):
        loss, slope, out = one_token(*apart(delta), 0.0, dual_clip=3.0)
        assert loss == 0.0
        assert slope == 0.0
        assert all(float(out.metrics[key]) == 0 for key in ("clip_low", "clip_high", "clip_dual"))


def test_an_overflowing_ratio_is_clipped_where_a_branch_clips(backend: str) -> None:
    """exp(100) is inf in float32; A > 0 takes the upper clip, A < 0 the dual clip, both with a zero slope."""
    loss, slope, out = one_token(*apart(100.0), 2.0, clip_high=0.28)
    assert (loss, slope) == (pytest.approx(-2.56), 0.0)
    assert float(out.metrics["clip_high"]) == 1
    loss, slope, out = one_token(*apart(100.0), -2.0, dual_clip=3.0)
    assert (loss, slope) == (pytest.approx(6.0), 0.0)
    assert float(out.metrics["clip_dual"]) == 1


def test_dual_clip_only_acts_on_negative_advantages(backend: str) -> None:
    loss, slope, _ = one_token(*apart(math.log(4.0)), 1.0, clip_high=9.0, dual_clip=2.0)
    assert loss == pytest.approx(-4.0)
    assert slope == pytest.approx(-4.0)
    loss, slope, _ = one_token(*apart(math.log(4.0)), -1.0, clip_high=9.0, dual_clip=2.0)
    assert loss == pytest.approx(2.0)
    assert slope == 0.0


def test_on_policy_is_ratio_one_with_its_gradient(backend: str) -> None:
    loss, slope, out = one_token(-2.0, None, 1.5)
    assert (loss, slope) == (-1.5, -1.5)
    assert float(out.metrics["ratio"]) == 1
    assert float(out.metrics["ratio_max"]) == 1
    assert float(out.metrics["approx_kl"]) == 0


def test_importance_weights_leave_kl_and_entropy_alone(backend: str) -> None:
    """Weight 0 removes the policy term and nothing else."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 0.25], requires_grad=True)
    out = policy_loss(
        logprobs,
        torch.tensor([-1.1, -1.8]),
        torch.tensor([1.0, -1.0]),
        objective="grpo",
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        ref_logprobs=torch.tensor([-1.5, -1.5]),
        importance_weights=torch.zeros(2),
        entropy=entropy,
        entropy_coef=0.1,
    )
    out.loss.backward()
    d = [-0.5, 0.5]
    kl = [math.exp(v) - v - 1 for v in d]
    assert out.loss.item() == pytest.approx(0.04 * sum(kl) / 2 - 0.1 * 0.75 / 2, rel=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([0.02 * (1 - math.exp(v)) for v in d], rel=1e-6)
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05], rel=1e-6)


def test_float64_gradients_by_finite_differences() -> None:
    """Independent of both autograds: numerical derivative of the reference loss in float64."""
    x = {key: value.double() if value.dtype == torch.float32 else value for key, value in draw(5).items()}

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(
            logprobs,
            x["old"],
            x["advantages"],
            objective="grpo",
            mask=x["mask"],
            cu_seqlens=CU_SEQLENS,
            ref_logprobs=x["ref"],
            importance_weights=x["weights"],
            entropy=entropy,
            dual_clip=2.0,
            entropy_coef=0.1,
            kl_through_ratio=True,
        ).loss

    with use_backend("torch"):
        leaves = (x["logprobs"].clone().requires_grad_(), x["entropy"].clone().requires_grad_())
        assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("factor", [0.0, -2.5, 65536.0])
def test_grad_output_scales_the_gradient(backend: str, factor: float) -> None:
    x = draw(3)
    grads = []
    for scale in (1.0, factor):
        leaf = x["logprobs"].clone().requires_grad_()
        out = policy_loss(leaf, x["old"], x["advantages"], mask=x["mask"])
        (scale * out.loss).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0] * factor, rtol=1e-6, atol=0)


def test_a_long_batch_adds_up(backend: str) -> None:
    """A quarter of a million tokens: sums in float32 would drift in the fourth digit if added one by one."""
    n = 250_000
    g = torch.Generator().manual_seed(8)
    logprobs = -torch.rand(n, generator=g) * 4 - 1.0
    old = logprobs - torch.randn(n, generator=g) * 0.1
    advantages = torch.randn(n, generator=g) + 0.5
    out = policy_loss(logprobs, old, advantages)
    ratio = (logprobs - old).double().exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    assert out.loss.item() == pytest.approx(-float(clipped.mean()), rel=2e-6)
    assert float(out.metrics["tokens"]) == n
    assert float(out.metrics["ratio"]) == pytest.approx(float(ratio.sum()), rel=2e-6)
    assert float(out.metrics["approx_kl"]) == pytest.approx(float((old - logprobs).double().sum()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision_logprobs_get_a_gradient_of_their_dtype(backend: str, dtype: torch.dtype) -> None:
    x = draw(6)
    leaf = x["logprobs"].to(dtype).requires_grad_()
    out = policy_loss(leaf, x["old"], x["advantages"], mask=x["mask"])
    out.loss.backward()
    wide = leaf.detach().float().requires_grad_()
    policy_loss(wide, x["old"], x["advantages"], mask=x["mask"]).loss.backward()
    assert out.loss.dtype == torch.float32
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    assert wide.grad is not None
    assert torch.equal(leaf.grad, wide.grad.to(dtype))


def test_logprobs_out_are_detached_and_zero_on_dead_tokens(backend: str) -> None:
    x = draw(4)
    leaf = x["logprobs"].clone().requires_grad_()
    out = policy_loss(leaf, x["old"], x["advantages"], mask=x["mask"])
    assert not out.logprobs.requires_grad
    assert torch.equal(out.logprobs, torch.where(x["mask"], x["logprobs"], torch.zeros(())))
