"""Live tokens at the extremes: -inf logits, overflowing ratios, NaN rows; and sizes beyond 2^31."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import call_linear, call_logits, dtypes_of, linear_case, logits_case, solve
from closeness import EPS, as_accurate
from oracle import Options
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, linear_token_logprobs, token_logprobs, use_backend


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_banned_tokens(backend: str, inplace: bool) -> None:
    """-inf away from the target: p = 0 there, entropy and its gradient finite, gradient exactly 0 there."""
    o = Options(entropy_coef=0.1, clip_high=0.28)
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=259, dtype=dtype, seed=81)
        banned = torch.rand(19, 259, generator=torch.Generator().manual_seed(2)) < 0.5
        banned[torch.arange(19), case.target_ids] = False
        banned[:, :64] = banned[:, :64] | (case.target_ids >= 64)[:, None]  # whole leading blocks of -inf
        case.leaves["logits"] = case.leaves["logits"].masked_fill(banned, -math.inf)
        picked = torch.log_softmax(case.leaves["logits"].double(), -1).gather(1, case.target_ids[:, None])[:, 0]
        case.old_logprobs = picked.float() - 0.05
        out, grad = call_logits(dapo_loss, case, "ppo", mask=case.mask, inplace_backward=inplace, **o.keywords())
        truth, eager = solve(case, o), solve(case, o, dtype=dtype)
        as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=2.0)
        as_accurate(grad, truth.grads["logits"], eager.grads["logits"], what="gradient")
        assert not grad[banned].any()
        assert float(out.metrics["nonfinite"]) == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_an_impossible_target(backend: str, name: str, advantage: float) -> None:
    """log-prob -inf: ratio 0, so A > 0 loses nothing and A < 0 is clipped low; counted, and no NaN anywhere."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, lengths=(4,), dtype=dtype, seed=82, dead=0.0)
        case.leaves["logits"][2, int(case.target_ids[2])] = -math.inf
        case.old_logprobs = torch.full((4,), -3.0)
        case.advantages = torch.full((4,), advantage)
        out, grad = call_logits(dapo_loss, case, name, clip_low=0.2, clip_high=9.0)
        assert out.logprobs[2] == -math.inf
        assert float(out.metrics["nonfinite"]) == 1
        assert bool(torch.isfinite(grad).all())
        assert not grad[2].any()
        assert math.isfinite(out.loss.item())
        truth = solve(case, Options(clip_low=0.2, clip_high=9.0), use_mask=False)
        assert out.loss.item() == pytest.approx(truth.loss.item(), rel=1e-4, abs=1e-6)


def test_an_impossible_target_on_policy(backend: str) -> None:
    """Without old log-probs the ratio is 1 by definition, not exp(-inf + inf)."""
    case = logits_case(vocab=67, lengths=(4,), seed=82, dead=0.0)
    case.leaves["logits"][2, int(case.target_ids[2])] = -math.inf
    out, grad = call_logits(dapo_loss, case, "dapo", old=None)
    assert out.loss.item() == pytest.approx(-float(case.advantages.mean()), rel=1e-6)
    assert bool(torch.isfinite(grad).all())
    assert float(out.metrics["nonfinite"]) == 1
    assert float(out.metrics["ratio"]) == 4


def test_a_nan_row_is_seen_not_hidden(backend: str) -> None:
    """A NaN in a live row makes the loss NaN and is counted; the other rows' numbers stay right."""
    case = logits_case(vocab=67, lengths=(6,), seed=83, dead=0.0)
    clean, clean_grad = call_logits(dapo_loss, case, "dapo")
    case.leaves["logits"][3, 20] = math.nan
    out, grad = call_logits(dapo_loss, case, "dapo")
    assert math.isnan(out.loss.item())
    assert float(out.metrics["nonfinite"]) == 1
    others = torch.tensor([0, 1, 2, 4, 5])
    assert torch.equal(out.logprobs[others], clean.logprobs[others])
    assert torch.equal(grad[others], clean_grad[others])
    assert math.isnan(float(out.logprobs[3]))


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 66])
def test_nan_is_found_at_every_position(backend: str, at: int) -> None:
    """SIMD maximum instructions drop a NaN operand by position: each lane and the tail must pass it on."""
    logits = torch.zeros(1, 67)
    logits[0, at] = math.nan
    stats = token_logprobs(logits, torch.tensor([5]), entropy=True)
    assert math.isnan(float(stats.logprobs))
    assert math.isnan(float(stats.entropy))


def test_a_row_of_minus_infinity_is_counted(backend: str) -> None:
    """No token is possible: there is no distribution, so the log-prob is not finite and is counted."""
    case = logits_case(vocab=67, lengths=(3,), seed=84, dead=0.0)
    case.leaves["logits"][1] = -math.inf
    out, _ = call_logits(dapo_loss, case, "dapo")
    assert not math.isfinite(float(out.logprobs[1]))
    assert float(out.metrics["nonfinite"]) == 1


def test_plus_infinity_is_counted(backend: str) -> None:
    case = logits_case(vocab=67, lengths=(3,), seed=84, dead=0.0)
    case.leaves["logits"][1, int(case.target_ids[1] + 1) % 67] = math.inf
    out, _ = call_logits(dapo_loss, case, "dapo")
    assert not math.isfinite(float(out.logprobs[1]))
    assert float(out.metrics["nonfinite"]) == 1


@pytest.mark.parametrize("level", ["logits", "linear"])
def test_a_zero_advantage_survives_an_overflowing_ratio(backend: str, level: str) -> None:
    """old log-prob -200 makes exp(delta) infinite; 0 * inf must not reach loss or gradient."""
    make = logits_case if level == "logits" else linear_case
    for dtype in dtypes_of(backend):
        case = make(dtype=dtype, seed=85, dead=0.0)
        case.old_logprobs[4], case.advantages[4] = -200.0, 0.0
        reference = make(dtype=dtype, seed=85, dead=0.0)
        reference.advantages[4] = 0.0
        if level == "logits":
            out, grad = call_logits(dapo_loss, case, "dapo")
            other, other_grad = call_logits(dapo_loss, reference, "dapo")
        else:
            out, grads = call_linear(linear_dapo_loss, case, "dapo")
            other, other_grads = call_linear(linear_dapo_loss, reference, "dapo")
            assert grads["hidden"] is not None
            assert other_grads["hidden"] is not None
            grad, other_grad = grads["hidden"], other_grads["hidden"]
        assert torch.equal(out.loss, other.loss)
        assert torch.equal(grad, other_grad)
        assert not grad[4].any()


def test_tokens_banned_by_the_smallest_number(backend: str) -> None:
    """The other habit besides -inf: masked_fill with torch.finfo(dtype).min."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=131, dtype=dtype, seed=89)
        banned = torch.rand(19, 131, generator=torch.Generator().manual_seed(4)) < 0.6
        banned[torch.arange(19), case.target_ids] = False
        case.leaves["logits"] = case.leaves["logits"].masked_fill(banned, torch.finfo(dtype).min)
        logits = case.fresh()["logits"]
        stats = token_logprobs(logits, case.target_ids, entropy=True)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
        with_inf = case.leaves["logits"].masked_fill(banned, -math.inf).requires_grad_()
        other = token_logprobs(with_inf, case.target_ids, entropy=True)
        (other.logprobs.sum() + other.entropy.sum()).backward()
        assert torch.equal(stats.logprobs, other.logprobs)
        assert torch.equal(stats.entropy, other.entropy)
        assert logits.grad is not None
        assert with_inf.grad is not None
        assert torch.equal(logits.grad, with_inf.grad)


def test_huge_finite_logits(backend: str) -> None:
    """Finite however far from zero: 65504 in float16, 1e8 otherwise, both signs."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        top = min(1e8, torch.finfo(dtype).max)
        logits = torch.tensor([[top, -top, 0.0, top], [-top, -top, -top, -top]], dtype=dtype)
        stats = token_logprobs(logits, torch.tensor([0, 2]), entropy=True)
        assert stats.logprobs.tolist() == pytest.approx([-math.log(2), -math.log(4)], rel=1e-6)
        assert stats.entropy.tolist() == pytest.approx([math.log(2), math.log(4)], rel=1e-6)


ON, OFF = (
    [3, 2100, 4400],
    5,
)  # where the largest logit of a far row stands, once per block of the C++ kernels; elsewhere
# 2^24 and 2^30, beyond which base-2 exponents step by 2 and by 128, lie at 1.2e7 and 7e8; from 2.4e38 on they overflow.
FAR = (3e7, 3e8, 1e9, 3e9, 1e12, 1e29, 3e38)
ROUTES: dict[str, Any] = {
    "copy": (token_logprobs, dapo_loss, {}),
    "inplace": (token_logprobs, dapo_loss, {"inplace_backward": True}),
    "linear": (linear_token_logprobs, linear_dapo_loss, {}),
}


def far_logits(magnitude: float, temperature: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [8, 4500] and targets [8]; where ``dtype`` can, logits / temperature reaches ±``magnitude``."""
    m = (magnitude * temperature.double()).clamp(max=torch.finfo(dtype).max).to(dtype)[:, None]
    x = torch.randn(8, 4500, generator=torch.Generator().manual_seed(91)).mul(temperature[:, None]).to(dtype)
    x[:2, ON] = m[:2]  # ties far above ordinary logits: a target among them, and another
    x[2, :2048] = x[2, 4096:] = -m[2]  # the largest are ordinary, whole blocks far below
    x[3] = -m[3]  # ties everywhere
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    x[4], x[4, ON[1]] = -m[4], m[4]
    x[4, OFF] = (m[4].view(bits) - 1).view(dtype)  # the next smaller number
    x[5], x[5, ON] = -m[5], -m[5] / 2
    x[6, 2048:4096] = -math.inf
    x[6, ON] = m[6]
    x[7], x[7, ON] = -m[7], m[7]  # the target's log-prob may be beyond float32
    return x, torch.tensor([ON[2], OFF, 3000, 17, OFF, ON[1], ON[0], OFF])


@pytest.mark.parametrize("per_token", [False, True], ids=["one_temperature", "temperatures"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("magnitude", FAR)
def test_logits_so_far_apart_that_float32_exponents_are_coarse(
    backend: str, magnitude: float, route: str, per_token: bool
) -> None:
    """Probabilities, entropies and gradients as in float64, by logits as large or by temperatures as small."""
    logprobs_of, loss_of, options = ROUTES[route]
    temperature = 2.0 ** (torch.tensor([-20.0, 0, -20, -4, 0, -20, 0, -20]) if per_token else torch.full((8,), -20.0))
    tau: Any = temperature if per_token else 2.0**-20
    g = torch.Generator().manual_seed(92)
    advantages, d_entropy = torch.randn(8, generator=g) * temperature, torch.randn(8, generator=g) * temperature
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits, ids = far_logits(magnitude, temperature, dtype)
        if route == "linear":  # the head holds the logits, one hidden state picks a row of them: 0 * inf would be NaN
            logits = logits.clamp(min=torch.finfo(dtype).min)
        log_p = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
        p = log_p.exp()
        entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
        picked = log_p[torch.arange(8), ids]

        def operands(logits: Tensor = logits) -> tuple[Tensor, tuple[Tensor, ...]]:
            if route != "linear":
                leaf = logits.clone().requires_grad_()
                return leaf, (leaf * 1.0 if route == "inplace" else leaf,)
            leaf = logits.T.contiguous().requires_grad_()
            return leaf, (torch.eye(8, dtype=logits.dtype), leaf)

        onehot = torch.nn.functional.one_hot(ids, 4500)
        surprise = torch.where(p == 0, 0.0, p * (log_p + entropy[:, None]))

        def check_gradient(
            leaf: Tensor,
            w: Tensor,
            v: Tensor,
            dtype: torch.dtype = dtype,
            per_logprob: Tensor = onehot - p,
            per_entropy: Tensor = -surprise,
        ) -> None:
            """Of Σ w logprob + v entropy."""
            truth = (w[:, None] * per_logprob + v[:, None] * per_entropy) / temperature[:, None]
            assert leaf.grad is not None
            got = (leaf.grad.T if route == "linear" else leaf.grad).double()
            assert bool(((got - truth).abs() <= EPS[dtype] * truth.abs() + 4e-6).all()), dtype

        leaf, args = operands()
        stats = logprobs_of(*args, ids, temperature=tau, entropy=True, **options)
        torch.testing.assert_close(stats.logprobs, picked.float(), rtol=2e-6, atol=2e-6)
        # Up to 2^30 the exponents of all logits are off by as much as 32, which the entropy adds and subtracts again.
        torch.testing.assert_close(stats.entropy, entropy.float(), rtol=4e-6, atol=4e-6)
        (stats.logprobs * advantages + stats.entropy * d_entropy).sum().backward()
        check_gradient(leaf, advantages, d_entropy)
        for coef in (0.0, 2.0**-22):
            leaf, args = operands()
            out = loss_of(*args, ids, None, advantages, temperature=tau, denominator=1.0, entropy_coef=coef, **options)
            torch.testing.assert_close(out.logprobs, picked.float(), rtol=2e-6, atol=2e-6)
            out.loss.backward()
            check_gradient(leaf, -advantages, torch.full((8,), -coef))


def test_subnormal_logits_and_tiny_temperature(backend: str) -> None:
    logits = torch.tensor([[1e-40, 0.0, -1e-40], [0.02, 0.01, 0.0]])
    truth = torch.log_softmax(logits.double() / 1e-3, -1)
    stats = token_logprobs(logits, torch.tensor([0, 1]), temperature=1e-3)
    torch.testing.assert_close(stats.logprobs.double(), torch.stack([truth[0, 0], truth[1, 1]]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("route", ["copy", "inplace", "linear"])
def test_fp16_with_a_loss_scale(backend: str, route: str) -> None:
    """GradScaler's reason to exist: gradients below 2^-24 must survive in float16 when the loss is scaled up.

    A gradient stored in float16 before it is multiplied by grad_output has already been rounded to zero.
    """
    o = Options(clip_low=0.5, clip_high=0.75)
    how: dict[str, Any] = {"denominator": 5e4, "grad_output": 65536.0}
    if route == "linear":
        case = linear_case(257, 8, (9, 10), dtype=torch.float16, seed=87)
        _, grads = call_linear(linear_dapo_loss, case, "ppo", mask=case.mask, **how, **o.keywords())
    else:
        case = logits_case(257, (9, 10), dtype=torch.float16, seed=86, sharpness=1.0)
        _, grad = call_logits(
            dapo_loss, case, "ppo", mask=case.mask, inplace_backward=route == "inplace", **how, **o.keywords()
        )
        grads = {"logits": grad}
    truth, eager = solve(case, o, **how), solve(case, o, dtype=torch.float16, **how)
    for name, got in grads.items():
        assert got is not None
        as_accurate(got, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=3.0)


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "ref_logprobs", "importance_weights"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_nan_in_a_live_tokens_inputs_is_seen(backend: str, inplace: bool, name: str) -> None:
    """Comparisons with NaN are false: a clip written the other way round would quietly drop the token."""
    case = logits_case(vocab=67, lengths=(6,), seed=90, dead=0.0)
    getattr(case, name)[2] = math.nan
    out, grad = call_logits(
        dapo_loss,
        case,
        "ppo",
        inplace_backward=inplace,
        kl_coef=0.1,
        dual_clip=3.0,
        ref_logprobs=case.ref_logprobs,
        importance_weights=case.importance_weights,
    )
    assert math.isnan(out.loss.item())
    assert bool(grad[2].isnan().any())
    assert bool(torch.isfinite(grad[[0, 1, 3, 4, 5]]).all())


def free_bytes() -> int:
    """Memory that Linux says can be had without swapping."""
    with open("/proc/meminfo") as lines:
        table = dict(line.split(":", 1) for line in lines)
    return int(table["MemAvailable"].split()[0]) * 1024


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Row offsets need 64 bits: the last rows of a 2.2e9-element tensor equal the same rows alone."""
    n_tokens, vocab = 2**31 // 65537 + 70, 65537
    need = n_tokens * vocab * 2 * (3 if backend == "cpp" else 8)
    if free_bytes() < need:
        pytest.skip(f"needs {need >> 30} GiB of free memory, {free_bytes() >> 30} GiB available")
    g = torch.Generator().manual_seed(7)
    logits = torch.zeros(n_tokens, vocab, dtype=torch.bfloat16)
    tail: Tensor = torch.randn(64, vocab, generator=g).bfloat16()
    logits[-64:] = tail
    ids = torch.randint(vocab, (n_tokens,), generator=g)
    advantages = torch.randn(n_tokens, generator=g)
    shared: dict[str, Any] = {"denominator": 64.0, "inplace_backward": True}
    logits.requires_grad_()
    out = dapo_loss(logits, ids, None, advantages, **shared)
    out.loss.backward()
    alone = tail.clone().requires_grad_()
    small = dapo_loss(alone, ids[-64:], None, advantages[-64:], **shared)
    small.loss.backward()
    assert torch.equal(out.logprobs[-64:], small.logprobs)
    assert logits.grad is not None
    assert alone.grad is not None
    assert torch.equal(logits.grad[-64:], alone.grad)
    assert float(out.logprobs[0]) == pytest.approx(-math.log(vocab), abs=2e-6)


def test_a_large_case_of_every_kind_at_once() -> None:
    """Smoke at a size where blocking, threads and chunks all engage; backends against each other."""
    case = linear_case(4099, 64, (200, 56, 0, 44), seed=88, bias=True, dead=0.4)
    results = []
    for name in ("torch", "cpp"):
        if name == "cpp":
            pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
        with use_backend(name):
            results.append(
                call_linear(
                    linear_dapo_loss,
                    case,
                    "grpo",
                    mask=case.mask,
                    cu_seqlens=case.cu_seqlens,
                    ref_logprobs=case.ref_logprobs,
                    entropy_coef=0.01,
                )
            )
    (out_a, grads_a), (out_b, grads_b) = results
    assert out_a.loss.item() == pytest.approx(out_b.loss.item(), rel=1e-5)
    torch.testing.assert_close(out_a.logprobs, out_b.logprobs, rtol=0, atol=4e-6)
    for name, grad in grads_a.items():
        torch.testing.assert_close(grad, grads_b[name], rtol=1e-3, atol=1e-8)
