"""`dapo_loss` from logits: loss, gradient, log-probs, entropy and metrics against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, Solution, call_logits, dtypes_of, logits_case, solve
from closeness import EPS, as_accurate, elementwise
from oracle import ROWS, Options
from torch import Tensor

from dapo_kernels import dapo_loss

EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")


def check(case: Case, o: Options, out: Any, grad: Tensor, multiple: float = 2.0, **how: Any) -> Solution:
    """Everything `dapo_loss` returned against the oracle run in float64 and, for the bound, as eager."""
    leaf = case.leaves["logits"]
    truth = solve(case, o, **how)
    eager = solve(case, o, dtype=leaf.dtype, **how)
    assert grad.dtype == leaf.dtype
    assert grad.shape == leaf.shape
    assert out.loss.shape == ()
    assert out.loss.dtype == (torch.float64 if leaf.dtype == torch.float64 else torch.float32)
    as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=2.0)
    as_accurate(grad, truth.grads["logits"], eager.grads["logits"], what="gradient", multiple=multiple)
    elementwise(grad, truth.grads["logits"], what="gradient")
    assert float((out.logprobs.double() - truth.logprobs).abs().max()) <= 2e-6
    assert not out.logprobs.requires_grad
    if o.entropy_coef:
        as_accurate(out.entropy, truth.entropy, eager.entropy, what="entropy", scale=8.0)
    for key, value in truth.metrics.items():
        if key != "entropy" or o.entropy_coef:
            assert float(out.metrics[key]) == pytest.approx(value, rel=1e-5, abs=1e-4), key
    return truth


def call(case: Case, o: Options, **kwargs: Any) -> tuple[Any, Tensor]:
    if o.kl_coef:
        kwargs["ref_logprobs"] = case.ref_logprobs
    return call_logits(dapo_loss, case, "ppo", mask=case.mask, cu_seqlens=case.cu_seqlens, **{**o.keywords(), **kwargs})


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("o", [ROWS["dapo"], EVERYTHING], ids=["dapo", "everything"])
def test_every_dtype(backend: str, o: Options, inplace: bool) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=131, lengths=(7, 2, 12), dtype=dtype, seed=21)
        out, grad = call(case, o, inplace_backward=inplace)
        check(case, o, out, grad)


@pytest.mark.parametrize("vocab", [2, 3, 7, 15, 16, 17, 31, 33, 64, 257, 1031, 2047, 2049, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_vocabularies_that_are_multiples_of_nothing(backend: str, vocab: int, dtype: torch.dtype) -> None:
    """Tails of every vector width and block size; an overhanging tile shows as a positive log-prob."""
    case = logits_case(vocab=vocab, lengths=(3, 4), dtype=dtype, seed=vocab)
    out, grad = call(case, EVERYTHING)
    check(case, EVERYTHING, out, grad)
    assert float(out.logprobs.max()) <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_a_real_vocabulary(backend: str, dtype: torch.dtype) -> None:
    case = logits_case(vocab=50257, lengths=(2, 3), dtype=dtype, seed=1, dead=0.0)
    out, grad = call(case, EVERYTHING, inplace_backward=True)
    check(case, EVERYTHING, out, grad)


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 10.0, 40.0])
@pytest.mark.parametrize("vocab", [19, 4099])
def test_flat_and_peaked_logits(backend: str, sharpness: float, vocab: int) -> None:
    """From uniform (entropy log V) to one token with all the mass (entropy 0, gradient by cancellation)."""
    case = logits_case(vocab=vocab, lengths=(6, 5), sharpness=sharpness, seed=3)
    o = Options(clip_high=0.28, entropy_coef=0.05)
    out, grad = call(case, o)
    truth, eager = solve(case, o), solve(case, o, dtype=torch.float32)
    # With probability near 1 the gradient is a difference of numbers at the scale of w = A/tokens.
    scale = float(case.advantages.abs().max() / case.mask.sum())
    as_accurate(grad, truth.grads["logits"], eager.grads["logits"], what="gradient", scale=scale)
    elementwise(grad, truth.grads["logits"], what="gradient", scale=scale)
    # 2e-6 is the bar for log-probs of up to 16; a log-prob of 300 cannot be held nearer than its own rounding.
    size = max(16.0, float(truth.logprobs.abs().max()))
    assert float((out.logprobs.double() - truth.logprobs).abs().max()) <= 2e-6 * size / 16
    as_accurate(out.entropy, truth.entropy, eager.entropy, what="entropy", scale=math.log(vocab))


@pytest.mark.parametrize("offset", [-1e4, 1e4, -3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_logits_far_from_zero(backend: str, offset: float, dtype: torch.dtype) -> None:
    """A common offset cancels. Very negative rows break an online softmax that starts its maximum at 0."""
    case = logits_case(vocab=131, lengths=(4, 4), seed=5)
    shifted = (case.leaves["logits"] + offset).to(dtype)
    case.leaves["logits"] = shifted
    case.old_logprobs = torch.log_softmax(shifted.double(), -1).gather(1, case.target_ids[:, None])[:, 0].float()
    out, grad = call(case, ROWS["dapo"], clip_low=0.9, clip_high=0.9)
    check(case, Options(clip_low=0.9, clip_high=0.9), out, grad, multiple=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_a_spread_of_plus_minus_ten_thousand(backend: str, dtype: torch.dtype) -> None:
    """exp underflows for all but the peak. A target at the bottom has log-prob -2e4 and a finite gradient."""
    logits = torch.full((3, 37), -1e4)
    logits[:, 5] = 1e4
    case = logits_case(vocab=37, lengths=(3,), seed=6, dead=0.0)
    case.leaves["logits"] = logits.to(dtype)
    case.target_ids = torch.tensor([5, 4, 36])
    case.old_logprobs = torch.tensor([0.0, -2e4, -2e4])
    case.advantages = torch.tensor([1.0, -1.0, 1.0])
    o = Options(surrogate="reinforce", entropy_coef=0.1)
    out, grad = call(case, o)
    truth = solve(case, o)
    torch.testing.assert_close(out.logprobs.double(), truth.logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        grad.double(), truth.grads["logits"], rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-7
    )
    assert float(out.entropy.abs().max()) <= 2e-6
    assert float(out.metrics["nonfinite"]) == 0


@pytest.mark.parametrize("temperature", [0.25, 0.7, 3.0])
def test_temperature(backend: str, temperature: float) -> None:
    case = logits_case(vocab=67, temperature=temperature, seed=7)
    out, grad = call(case, EVERYTHING)
    check(case, EVERYTHING, out, grad)


def test_temperature_per_token(backend: str) -> None:
    temperature = torch.linspace(0.3, 2.5, 19)
    case = logits_case(vocab=67, temperature=temperature, seed=8)
    for dtype in dtypes_of(backend):
        case.leaves = {"logits": case.leaves["logits"].to(dtype)}
        out, grad = call(case, EVERYTHING)
        check(case, EVERYTHING, out, grad)
    constant, _ = call(case, EVERYTHING, temperature=torch.full((19,), 0.7))
    scalar, _ = call(case, EVERYTHING, temperature=0.7)
    assert torch.equal(constant.logprobs, scalar.logprobs)


def test_entropy_bonus_alone(backend: str) -> None:
    """Zero advantages leave only -coef * H, whose gradient is exact: coef/D * p (log p + H)."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, dtype=dtype, seed=9)
        case.advantages = torch.zeros_like(case.advantages)
        o = Options(entropy_coef=0.3)
        out, grad = call(case, o)
        check(case, o, out, grad)
        assert float(grad.abs().max()) > 0


@pytest.mark.parametrize("name", ["ppo", "grpo", "reinforce"])
def test_on_policy(backend: str, name: str) -> None:
    case = logits_case(vocab=67, seed=10)
    o = ROWS[name]
    out, grad = call(case, o, old=None)
    truth = solve(case, o, on_policy=True)
    check(case, o, out, grad, on_policy=True)
    assert float(out.metrics["ratio"]) == truth.metrics["tokens"]


def test_entropy_on_request(backend: str) -> None:
    """entropy=True reports it, in the result and in the metrics, and changes neither loss nor gradient."""
    case = logits_case(vocab=67, seed=10)
    for inplace in (False, True):
        plain, grad_plain = call(case, ROWS["dapo"], inplace_backward=inplace)
        asked, grad = call(case, ROWS["dapo"], entropy=True, inplace_backward=inplace)
        truth = solve(case, ROWS["dapo"])
        assert plain.entropy is None
        assert "entropy" not in plain.metrics
        torch.testing.assert_close(asked.entropy.double(), truth.entropy, rtol=0, atol=4e-6)
        assert float(asked.metrics["entropy"]) == pytest.approx(float(truth.entropy.sum()), rel=1e-5)
        assert torch.equal(asked.loss, plain.loss)
        assert torch.equal(grad, grad_plain)


def test_on_policy_equals_ratio_one(backend: str) -> None:
    """old_logprobs=None gives the gradient of old_logprobs = the policy's own log-probs."""
    case = logits_case(vocab=67, seed=10)
    none, grad_none = call(case, ROWS["dapo"], old=None)
    same, grad_same = call(case, ROWS["dapo"], old=none.logprobs)
    assert torch.equal(grad_none, grad_same)
    assert torch.equal(none.loss, same.loss)


def test_importance_weights(backend: str) -> None:
    case = logits_case(vocab=67, seed=11)
    out, grad = call(case, EVERYTHING, importance_weights=case.importance_weights)
    check(case, EVERYTHING, out, grad, weighted=True)


def test_a_constant_logits_tensor_costs_no_graph(backend: str) -> None:
    case = logits_case(seed=12)
    logits = case.leaves["logits"]
    before = logits.clone()
    out = dapo_loss(logits, case.target_ids, case.old_logprobs, case.advantages, mask=case.mask)
    assert not out.loss.requires_grad
    with torch.no_grad():
        leaf = case.fresh()["logits"]
        quiet = dapo_loss(leaf, case.target_ids, case.old_logprobs, case.advantages, mask=case.mask)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.loss, out.loss)
    truth = solve(case, ROWS["dapo"])
    assert out.loss.item() == pytest.approx(truth.loss.item(), abs=1e-6)
    assert torch.equal(logits, before)


def test_inplace_gives_the_same_numbers(backend: str) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=257, dtype=dtype, seed=13)
        kept, grad_kept = call(case, EVERYTHING)
        over, grad_over = call(case, EVERYTHING, inplace_backward=True)
        assert torch.equal(kept.logprobs, over.logprobs)
        assert torch.equal(kept.entropy, over.entropy)
        torch.testing.assert_close(over.loss, kept.loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad_over, grad_kept, rtol=2 * EPS[dtype], atol=1e-7)


def test_without_inplace_the_logits_stay(backend: str) -> None:
    case = logits_case(seed=14)
    leaves = case.fresh()
    out = dapo_loss(leaves["logits"], case.target_ids, case.old_logprobs, case.advantages)
    out.loss.backward()
    assert torch.equal(leaves["logits"].detach(), case.leaves["logits"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_logits_larger_than_the_caches(backend: str, dtype: torch.dtype) -> None:
    """Many megabytes of logits: dead rows are zeros to their last byte, live ones have the bits they have alone."""
    if backend != "cpp":
        pytest.skip("the size at which the C++ kernels store past the caches")
    n, vocab = 37, 640_007 if dtype == torch.bfloat16 else 320_003
    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(n, vocab, generator=generator).to(dtype)
    target_ids = torch.randint(vocab, (n,), generator=generator)
    mask = torch.rand(n, generator=generator) < 0.5

    def gradient(rows: slice) -> Tensor:
        leaf = logits[rows].clone().requires_grad_(True)
        advantages = torch.ones(n)[rows]
        out = dapo_loss(leaf, target_ids[rows], None, advantages, mask=mask[rows], denominator=1, inplace_backward=True)
        return torch.autograd.grad(out.loss, leaf)[0]

    together = gradient(slice(None))
    assert not bool(together[~mask].any())
    for row in mask.nonzero().flatten().tolist():
        assert torch.equal(together[row], gradient(slice(row, row + 1))[0])


@pytest.mark.parametrize("size", ["vocab_1", "one_token", "no_token"])
def test_smallest_sizes(backend: str, size: str) -> None:
    vocab, lengths = {"vocab_1": (1, (3, 2)), "one_token": (11, (1,)), "no_token": (11, (0,))}[size]
    for dtype in dtypes_of(backend):
        for inplace in (False, True):
            case = logits_case(vocab=vocab, lengths=lengths, dtype=dtype, seed=15, dead=0.0)
            out, grad = call(case, EVERYTHING, inplace_backward=inplace)
            truth = solve(case, EVERYTHING)
            assert grad.shape == (sum(lengths), vocab)
            assert bool(torch.isfinite(grad).all())
            assert out.loss.item() == pytest.approx(truth.loss.item(), abs=1e-6)
            torch.testing.assert_close(out.logprobs.double(), truth.logprobs, rtol=0, atol=2e-6)
            assert float(out.metrics["tokens"]) == sum(lengths)
            if size == "vocab_1":
                assert float(grad.abs().max()) <= 1e-6
                assert float(out.entropy.abs().max()) <= 2e-6
