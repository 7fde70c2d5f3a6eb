"""The arithmetic of one token at its edges: clip bounds, ratios of 0, 1 and infinity, tokens that do not train."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_kernels import dapo_loss, policy_loss, use_backend
from dapo_kernels.objectives.table import SURROGATES

LOG2 = math.log(2.0)


def apart(log_ratio: float, largest: float = 0.0) -> tuple[float, float]:
    """Log-prob and old log-prob, the larger one ``largest``: with 0 their difference does not round."""
    return largest + min(log_ratio, 0.0), largest + min(-log_ratio, 0.0)


def one_token(name: str, logprob: float, old: float | None, advantage: float, **options: Any) -> tuple[Any, ...]:
    """Loss and d loss / d logprob of a batch of one token, and which clip bounds it hit."""
    leaf = torch.tensor([logprob], requires_grad=True)
    old_logprobs = None if old is None else torch.tensor([old])
    bounds = {"cu_seqlens": torch.tensor([0, 1])}
    out = policy_loss(leaf, old_logprobs, torch.tensor([advantage]), objective=name, **bounds, **options)
    out.loss.backward()
    hits = [bound for bound in ("low", "high", "dual") if float(out.metrics[f"clip_{bound}"])]
    return out.loss.item(), float(leaf.grad), " ".join(hits)


def slope_of_sapo(delta: float, advantage: float) -> float:
    tau, ratio = (1.0 if advantage > 0 else 1.05), math.exp(delta)
    closing = 1 / (1 + math.exp(tau * (ratio - 1)))
    return -advantage * 4 / (1 + math.exp(-tau * (ratio - 1))) * closing * ratio


GATE = 4 / 1.05 / (1 + math.exp(1.05))  # of a ratio of 0 and A < 0
Edge = tuple[str, tuple[float, float | None], float, dict[str, Any], tuple[float, float], str]
EDGES: list[Edge] = [  # `test_random.py` has what lies between
    # exp(float32(log 2)) is 2 to 2e-9, the edge itself, and a tie takes the first branch
    ("ppo", apart(LOG2), 1.5, {"clip_high": 1.0}, (-3.0, -3.0), ""),
    ("ppo", apart(-LOG2), -1.5, {"clip_low": 0.5}, (0.75, 0.75), ""),
    ("ppo", apart(LOG2), -1.5, {"dual_clip": 2.0}, (3.0, 3.0), ""),
    # exp(100) is inf in float32
    ("ppo", apart(100.0), 2.0, {"clip_high": 0.28}, (-2.56, 0.0), "high"),
    ("ppo", apart(100.0), -2.0, {"dual_clip": 3.0}, (6.0, 0.0), "dual"),
    ("ppo", apart(-100.0), 2.0, {}, (0.0, 0.0), ""),
    ("ppo", apart(-100.0), -2.0, {}, (1.6, 0.0), "low"),
    # at a ratio of 1 both branches tie whatever the clip range, also an empty one, and the slope is -A
    *(
        ("ppo", (-1.25, -1.25), a, {"clip_low": low, "clip_high": high}, (-a, -a), "")
        for a, low, high in itertools.product((1.5, -1.5), (0.0, 0.2), (0.0, 0.28))
    ),
    # on-policy the ratio is 1 and has a gradient
    ("ppo", (-2.0, None), 1.5, {}, (-1.5, -1.5), ""),
    # the weight of CISPO is bounded, its gradient stays; 1 + clip_high is the raw 5 of the libraries that print that
    ("cispo", apart(100.0, -2.0), 1.5, {}, (15.0, -7.5), "high"),
    ("cispo", apart(-100.0, -2.0), 1.5, {}, (0.0, 0.0), ""),
    # SAPO at 1 has PPO's slope; far above, the gate has shut and nothing overflows; far below, the ratio is 0
    ("sapo", (-1.25, -1.25), 1.5, {}, (-3.0, -1.5), ""),
    ("sapo", apart(100.0), -1.5, {}, (6.0 / 1.05, 0.0), ""),
    ("sapo", apart(-100.0), -1.5, {}, (1.5 * GATE, 0.0), ""),
    # gates of 1e-8, where 1 - sigmoid in float32 would have no digit left
    *(("sapo", apart(d), 0.7, {}, (math.nan, slope_of_sapo(d, 0.7)), "") for d in (-2.0, 0.4, 2.0, 2.9)),
    # log-probs that float32 has rounded to 0: no infinity, and no gradient lost to one
    ("dppo_kl", (0.0, 0.0), 1.0, {}, (0.0, -1.0), ""),
    ("dppo_kl", (0.0, -1e-4), 1.0, {}, (0.0, -math.exp(1e-4)), ""),
    ("dppo_kl", (-1e-6, 0.0), -1.0, {}, (-1e-6, 1.0), ""),
    ("dppo_kl", (0.0, -2.0), 1.0, {}, (0.0, 0.0), "high"),
    ("dppo_tv", (0.0, -2.0), 1.0, {}, (0.0, 0.0), "high"),
    # UP has no ratio for A > 0, and PPO's clip for A < 0
    ("up", apart(100.0, -2.0), 1.5, {}, (3.0, -1.5), ""),
    ("up", apart(-100.0, -2.0), 1.5, {}, (153.0, -1.5), ""),
    ("up", (-2.0, None), 1.5, {}, (3.0, -1.5), ""),
    ("up", apart(-100.0), -2.0, {}, (1.6, 0.0), "low"),
    ("up", apart(LOG2), -1.5, {}, (3.0, 3.0), ""),
    ("up", apart(100.0), -2.0, {"dual_clip": 3.0}, (6.0, 0.0), "dual"),
    # VESPO far from the old policy weighs nothing
    *(("vespo", apart(far, -2.0), a, {}, (0.0, 0.0), "") for far in (60.0, -60.0) for a in (1.0, -1.0)),
    # on-policy, a penalty to the old policy is nothing
    ("dro", (-1.0, None), 1.5, {}, (1.5, -1.5), ""),
    ("dro", (-1.0, -1.0), 1.5, {}, (1.5, -1.5), ""),
]


@pytest.mark.parametrize("edge", EDGES, ids=lambda e: f"{e[0]} {e[1][0]:.3g} {e[1][1]} A={e[2]}")
def test_a_token_at_an_edge(backend: str, edge: Edge) -> None:
    name, logprobs, advantage, options, (loss, slope), hit = edge
    found = one_token(name, *logprobs, advantage, **options)
    if not math.isnan(loss):
        assert found[0] == pytest.approx(loss, rel=2e-6, abs=1e-12)
    assert found[1:] == (pytest.approx(slope, rel=2e-5, abs=1e-12), hit)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_zero_advantage_is_an_exact_zero_at_any_ratio(backend: str, surrogate: str) -> None:
    for delta in (0.0, 5.0, 80.0, 100.0, 1e4, -1e4):
        assert one_token("ppo", *apart(delta, -0.2), 0.0, surrogate=surrogate) == (0.0, 0.0, "")


@pytest.mark.parametrize("edge", [0.8, 1.2, 1.28])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_around_an_edge(backend: str, edge: float, advantage: float) -> None:
    """Within some float32 steps of an edge either branch is right, but slope and count must be of the same one."""
    start, seen = torch.log(torch.tensor(edge)), set()
    for steps in (-40, -3, -2, -1, 0, 1, 2, 3, 40):
        delta = float(start.view(torch.int32).add(steps).view(torch.float32))
        clip = {"clip_low": 0.2, "clip_high": edge - 1 if edge > 1 else 0.28}
        loss, slope, hit = one_token("ppo", *apart(delta), advantage, **clip)
        assert loss == pytest.approx(-advantage * edge, rel=1e-5)
        assert slope == (0.0 if hit else pytest.approx(-advantage * edge, rel=1e-5))
        seen.add(bool(hit))
    acts = (edge > 1) == (advantage > 0)  # the upper edge acts on A > 0, the lower on A < 0
    assert seen == ({False, True} if acts else {False})


def test_all_tokens_of_a_sequence_have_its_ratio(backend: str) -> None:
    """Not one rounded like each token's log-prob: GSPO's clip range is narrow."""
    logprobs, bounds = torch.linspace(-30.0, -0.1, 40), torch.tensor([0, 40], dtype=torch.int32)
    given: Any = (logprobs, logprobs - 3.997e-4, torch.ones(40))
    outs = [policy_loss(*given, objective=name, cu_seqlens=bounds) for name in ("gspo", "gspo_token")]
    assert dict(outs[0].metrics) == dict(outs[1].metrics)


@pytest.mark.parametrize(
    ("deltas", "advantages", "mean"), [((0.0, 2.0), (1.0, -0.5), 1.0), ((-2.0, 0.0), (0.5, -1.0), -1.0)]
)
def test_a_mean_of_clipped_ratios_is_not_clipped(
    backend: str, deltas: Any, advantages: tuple[float, float], mean: float
) -> None:
    """With both signs of the advantage in one sequence it may lie outside the bounds of each token."""
    logprobs, old = (torch.tensor([[end[i] for end in map(apart, deltas)]], requires_grad=i == 0) for i in (0, 1))
    out = policy_loss(logprobs, old, torch.tensor([advantages]), objective="gmpo")
    out.loss.backward()
    expected = -sum(advantages) / 2 * math.exp(mean)
    assert out.loss.item() == pytest.approx(expected)
    assert logprobs.grad[0].tolist() == pytest.approx([expected / 2] * 2)
    assert not any(float(out.metrics[f"clip_{bound}"]) for bound in ("low", "high"))


# --- tokens that do not train -----------------------------------------------------------------------------

CHOSEN = torch.tensor([True, False, True])
IDLE: dict[str, dict[str, Any]] = {
    "a selection": {"objective": "top_entropy", "selection": CHOSEN},
    "a low entropy": {"objective": "top_entropy", "top_entropy": 0.5, "entropy": torch.tensor([1.0, 0.1, 0.9])},
    "clip_cov": {"objective": "clip_cov", "selection": ~CHOSEN},
    "an importance weight of 0": {"objective": "dapo", "importance_weights": CHOSEN.float()},
    "a selection of kl_cov": {"objective": "kl_cov", "selection": CHOSEN, "importance_weights": CHOSEN.float()},
    "an old probability": {"objective": "spo", "kl_coef": 0.1, "ref_logprobs": torch.tensor([-1.0, 0.0, -1.0])},
}


@pytest.mark.parametrize("why", IDLE)
def test_a_token_that_does_not_train_cannot_spoil_the_others(backend: str, why: str) -> None:
    """Its ratio (or its KL estimate) overflows float32, and it has no say: like a masked token, where, not multiply."""
    given, ids, advantages = IDLE[why], torch.tensor([0, 1, 2]), torch.tensor([1.0, -1.0, 1.0])
    of_kl = "ref_logprobs" in given
    old = torch.tensor([-1.1, -0.01 if of_kl else -200.0, -0.5])
    logprobs = torch.tensor([-1.0, -150.0 if of_kl else -2.0, -0.5], requires_grad=True)
    calls: list[tuple[Tensor, Any]] = [(logprobs, policy_loss(logprobs, old, advantages, **given))]
    if "entropy" not in given and not of_kl:
        for inplace in (False, True):
            logits = torch.zeros(3, 4, requires_grad=True)
            calls.append((logits, dapo_loss(logits, ids, old, advantages, inplace_backward=inplace, **given)))
    for leaf, out in calls:
        out.loss.backward()
        assert math.isfinite(out.loss.item())
        assert bool(leaf.grad.isfinite().all())
        assert not leaf.grad[1].any()
        assert leaf.grad[0].any()


# --- dtypes and sizes -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("objective", ["gspo", "gmpo", "luspo"])
def test_the_gradient_of_a_long_sequence_keeps_its_digits(backend: str, objective: str) -> None:
    """Sums over it in float32 would scale the whole gradient by another factor for each length."""
    n = 60_000
    g = torch.Generator().manual_seed(8)
    cu_seqlens, old = torch.tensor([0, n], dtype=torch.int32), -torch.rand(n, generator=g) * 3 - 0.5
    found = []
    for dtype in (torch.float32, torch.float64):
        logprobs = (old + 1e-5).to(dtype).requires_grad_()
        with use_backend("torch" if dtype == torch.float64 else backend):
            out = policy_loss(logprobs, old.to(dtype), torch.tensor([0.7]), cu_seqlens=cu_seqlens, objective=objective)
        out.loss.backward()
        found.append(logprobs.grad)
    torch.testing.assert_close(found[0].double(), found[1], rtol=5e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logprobs_get_a_gradient_of_their_dtype(backend: str, dtype: torch.dtype) -> None:
    leaf = torch.tensor([-1.3, -2.7, -0.4]).to(dtype).requires_grad_()
    wide = leaf.detach().float().requires_grad_()
    for x in (leaf, wide):
        out = policy_loss(x, torch.tensor([-1.4, -2.6, -0.4]), torch.tensor([1.0, -0.3, 0.2]))
        out.loss.backward()
        assert out.loss.dtype == torch.float32
    assert torch.equal(leaf.grad, wide.grad.to(dtype))
