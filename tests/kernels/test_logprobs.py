"""`token_logprobs` and `linear_token_logprobs`: values, entropy, and the gradient of any function of the two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, dtypes_of, linear_case, logits_case, logits_of, pad, unpad
from closeness import as_accurate, elementwise
from oracle import row_entropy, row_log_softmax
from torch import Tensor

from dapo_kernels import linear_token_logprobs, token_logprobs, use_backend


def coefficients(n_tokens: int) -> tuple[Tensor, Tensor]:
    """What multiplies the log-probs and the entropies in the scalar that is differentiated."""
    g = torch.Generator().manual_seed(99)
    return torch.randn(n_tokens, generator=g), torch.randn(n_tokens, generator=g)


def solve(case: Case, dtype: torch.dtype, use: str = "both") -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, entropies and the gradients of sum(a logp + b H), leaves in `dtype`, row by row."""
    math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {name: leaf.detach().to(dtype, copy=True).requires_grad_() for name, leaf in case.leaves.items()}
    logits = logits_of(leaves, case.softcap).to(math_dtype)
    n_tokens = len(logits)
    temperature = torch.as_tensor(case.temperature, dtype=math_dtype).expand(n_tokens)
    logprobs = torch.stack([row_log_softmax(logits[t], temperature[t])[case.target_ids[t]] for t in range(n_tokens)])
    entropy = torch.stack([row_entropy(logits[t], temperature[t]) for t in range(n_tokens)])
    a, b = (c.to(math_dtype) for c in coefficients(n_tokens))
    scalar = torch.zeros((), dtype=math_dtype)
    if use in ("both", "logprobs"):
        scalar = scalar + (a * logprobs).sum()
    if use in ("both", "entropy"):
        scalar = scalar + (b * entropy).sum()
    scalar.backward()
    return logprobs.detach(), entropy.detach(), {n: x.grad for n, x in leaves.items() if x.grad is not None}


def backward(stats: Any, use: str = "both") -> None:
    a, b = coefficients(stats.logprobs.numel())
    a, b = a.reshape(stats.logprobs.shape), b.reshape(stats.logprobs.shape)
    scalar = torch.zeros(())
    if use in ("both", "logprobs"):
        scalar = scalar + (a * stats.logprobs).sum()
    if use in ("both", "entropy"):
        scalar = scalar + (b * stats.entropy).sum()
    scalar.backward()


@pytest.mark.parametrize("use", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_logits_level(backend: str, inplace: bool, use: str) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=131, dtype=dtype, seed=51)
        truth = solve(case, torch.float64, use)
        eager = solve(case, dtype, use)
        logits = case.fresh()["logits"]
        stats = token_logprobs(logits, case.target_ids, entropy=True, inplace_backward=inplace)
        as_accurate(stats.logprobs, truth[0], eager[0], what="log-probs", scale=8.0)
        as_accurate(stats.entropy, truth[1], eager[1], what="entropy", scale=8.0)
        backward(stats, use)
        assert logits.grad is not None
        assert logits.grad.dtype == dtype
        as_accurate(logits.grad, truth[2]["logits"], eager[2]["logits"], what="gradient")
        elementwise(logits.grad, truth[2]["logits"], what="gradient")


def test_without_entropy(backend: str) -> None:
    case = logits_case(vocab=131, seed=52)
    logits = case.fresh()["logits"]
    stats = token_logprobs(logits, case.target_ids)
    assert stats.entropy is None
    (stats.logprobs * coefficients(19)[0]).sum().backward()
    truth = solve(case, torch.float64, "logprobs")
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), truth[2]["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("use", ["both", "logprobs", "entropy"])
def test_from_hidden_states(backend: str, use: str, softcap: float | None, bias: bool) -> None:
    for dtype in dtypes_of(backend):
        case = linear_case(67, 12, dtype=dtype, bias=bias, softcap=softcap, temperature=0.8, seed=53)
        truth, eager = solve(case, torch.float64, use), solve(case, dtype, use)
        leaves = case.fresh()
        stats = linear_token_logprobs(
            leaves["hidden"],
            leaves["weight"],
            case.target_ids,
            bias=leaves.get("bias"),
            softcap=softcap,
            temperature=0.8,
            entropy=True,
        )
        multiple = 2.0 if dtype in (torch.float32, torch.float64) else 6.0
        as_accurate(stats.logprobs, truth[0], eager[0], what="log-probs", multiple=multiple, scale=8.0)
        as_accurate(stats.entropy, truth[1], eager[1], what="entropy", multiple=multiple, scale=8.0)
        backward(stats, use)
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert leaf.grad.dtype == dtype
            as_accurate(leaf.grad, truth[2][name], eager[2][name], what=f"{name} gradient", multiple=multiple)


@pytest.mark.parametrize("needs", ["hidden", "weight", "bias"])
def test_from_hidden_states_every_gradient_alone(backend: str, needs: str) -> None:
    case = linear_case(67, 12, bias=True, seed=54)
    truth, eager = solve(case, torch.float64), solve(case, torch.float32)
    leaves = case.fresh()
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == needs)
    stats = linear_token_logprobs(
        leaves["hidden"], leaves["weight"], case.target_ids, bias=leaves["bias"], entropy=True
    )
    backward(stats)
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [needs]
    grad = leaves[needs].grad
    assert grad is not None
    as_accurate(grad, truth[2][needs], eager[2][needs], what=needs)


@pytest.mark.parametrize("vocab", [2, 7, 257, 1031, 4099, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logp", "logp+H"])
def test_accuracy_bar(backend: str, vocab: int, dtype: torch.dtype, entropy: bool) -> None:
    """Against float64 on the same rounded logits: 2e-6 absolute for log-probs down to about -16."""
    g = torch.Generator().manual_seed(vocab)
    for sharpness in (0.3, 2.0):
        logits = (torch.randn(8, vocab, generator=g) * sharpness).to(dtype)
        target_ids = torch.randint(vocab, (8,), generator=g)
        truth = torch.log_softmax(logits.double(), -1)
        eager = torch.log_softmax(logits.float(), -1)
        stats = token_logprobs(logits, target_ids, entropy=entropy)
        assert stats.logprobs.dtype == torch.float32
        picked = truth.gather(1, target_ids[:, None])[:, 0]
        assert float((stats.logprobs.double() - picked).abs().max()) <= 2e-6
        if entropy:
            h, eager_h = -(truth.exp() * truth).sum(-1), -(eager.exp() * eager).sum(-1)
            as_accurate(stats.entropy, h, eager_h, what="entropy", scale=math.log(vocab))


def test_every_target_position(backend: str) -> None:
    """Each id of a row in turn, first and last included; exponentials of the log-probs sum to one."""
    vocab = 53
    row = logits_case(vocab=vocab, lengths=(1,), seed=55).leaves["logits"]
    stats = token_logprobs(row.expand(vocab, vocab), torch.arange(vocab))
    truth = torch.log_softmax(row.double(), -1)[0]
    torch.testing.assert_close(stats.logprobs.double(), truth, rtol=0, atol=1e-6)
    assert float(stats.logprobs.double().exp().sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("vocab", [1, 2, 7, 131, 4099])
def test_no_positive_logprob_and_no_negative_entropy(backend: str, vocab: int) -> None:
    """A token with all the mass has log-prob 0 and not 3e-8: log(1 - exp(logp)) of a positive one is NaN."""
    g = torch.Generator().manual_seed(vocab)
    for dtype in dtypes_of(backend):
        for scale in (0.0, 3.0, 60.0, 1e4):
            logits = (torch.randn(64, vocab, generator=g) * scale).to(dtype)
            stats = token_logprobs(logits, logits.argmax(-1), entropy=True, temperature=0.77)
            assert float(stats.logprobs.max()) <= 0
            assert float(stats.entropy.min()) >= 0


def test_padded_layout(backend: str) -> None:
    lengths, width = (5, 1, 9, 4), 9
    case = logits_case(vocab=37, lengths=lengths, seed=56)
    flat = token_logprobs(case.leaves["logits"], case.target_ids, entropy=True, temperature=0.7)
    padded = token_logprobs(
        pad(case.leaves["logits"], lengths, width, 0.0),
        pad(case.target_ids, lengths, width, 0),
        entropy=True,
        temperature=0.7,
    )
    assert padded.logprobs.shape == padded.entropy.shape == (4, 9)
    assert torch.equal(unpad(padded.logprobs, lengths), flat.logprobs)
    assert torch.equal(unpad(padded.entropy, lengths), flat.entropy)


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "linear"])
def test_temperature_per_token(backend: str, linear: bool) -> None:
    temperature = torch.linspace(0.3, 2.5, 19)
    case = (linear_case if linear else logits_case)(41, seed=57, temperature=temperature)
    truth, eager = solve(case, torch.float64), solve(case, torch.float32)
    leaves = case.fresh()
    if linear:
        stats = linear_token_logprobs(
            leaves["hidden"], leaves["weight"], case.target_ids, temperature=temperature, entropy=True
        )
    else:
        stats = token_logprobs(leaves["logits"], case.target_ids, temperature=temperature, entropy=True)
    backward(stats)
    as_accurate(stats.logprobs, truth[0], eager[0], what="log-probs", scale=8.0)
    as_accurate(stats.entropy, truth[1], eager[1], what="entropy", scale=8.0)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        as_accurate(leaf.grad, truth[2][name], eager[2][name], what=f"{name} gradient")


def test_one_and_no_token(backend: str) -> None:
    for n_tokens in (0, 1):
        logits = torch.randn(n_tokens, 5, requires_grad=True)
        stats = token_logprobs(logits, torch.zeros(n_tokens, dtype=torch.int64), entropy=True)
        assert stats.logprobs.shape == stats.entropy.shape == (n_tokens,)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
        assert logits.grad is not None
        assert logits.grad.shape == (n_tokens, 5)
        hidden = torch.randn(n_tokens, 3, requires_grad=True)
        weight = torch.randn(5, 3, requires_grad=True)
        stats = linear_token_logprobs(hidden, weight, torch.zeros(n_tokens, dtype=torch.int64), entropy=True)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
        assert hidden.grad is not None
        assert hidden.grad.shape == (n_tokens, 3)
        assert weight.grad is not None
        assert bool(torch.isfinite(weight.grad).all())


def test_minus_infinity_away_from_the_target(backend: str) -> None:
    """Banned tokens (grammar, top-k) have p = 0: no NaN in the entropy, an exact zero in the gradient."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=131, dtype=dtype, seed=58)
        banned = torch.rand(19, 131, generator=torch.Generator().manual_seed(1)) < 0.6
        banned[torch.arange(19), case.target_ids] = False
        banned[3] = True
        banned[3, case.target_ids[3]] = False  # a row with a single possible token
        case.leaves["logits"] = case.leaves["logits"].masked_fill(banned, -math.inf)
        truth, eager = solve(case, torch.float64), solve(case, dtype)
        logits = case.fresh()["logits"]
        stats = token_logprobs(logits, case.target_ids, entropy=True)
        as_accurate(stats.logprobs, truth[0], eager[0], what="log-probs", scale=8.0)
        as_accurate(stats.entropy, truth[1], eager[1], what="entropy", scale=8.0)
        backward(stats)
        assert logits.grad is not None
        as_accurate(logits.grad, truth[2]["logits"], eager[2]["logits"], what="gradient")
        assert not logits.grad[banned].any()


def test_minus_infinity_at_the_target(backend: str) -> None:
    """An impossible token has log-prob -inf; the gradient of its log-prob, onehot - p, is finite."""
    case = logits_case(vocab=23, lengths=(3,), seed=59)
    case.leaves["logits"][1, int(case.target_ids[1])] = -math.inf
    logits = case.fresh()["logits"]
    stats = token_logprobs(logits, case.target_ids, entropy=True)
    assert stats.logprobs[1] == -math.inf
    assert bool(torch.isfinite(stats.logprobs[[0, 2]]).all())
    assert bool(torch.isfinite(stats.entropy).all())
    stats.logprobs.sum().backward()
    expected = -torch.softmax(case.leaves["logits"].double(), -1)
    expected[torch.arange(3), case.target_ids] += 1
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradcheck_in_float64() -> None:
    """Numerical differentiation, no oracle: both outputs, both entry points."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 5, 2, 2])
    with use_backend("torch"):
        assert torch.autograd.gradcheck(
            lambda x: tuple(token_logprobs(x, ids, entropy=True, temperature=0.7)), (logits,), fast_mode=False
        )
        assert torch.autograd.gradcheck(
            lambda h, w, b: tuple(linear_token_logprobs(h, w, ids, bias=b, softcap=2.0, entropy=True)),
            (hidden, weight, bias),
        )
