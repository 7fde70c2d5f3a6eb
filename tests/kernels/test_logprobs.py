"""`token_logprobs` and `linear_token_logprobs`: values, entropy, and the gradient of any function of the two."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from cases import Case, dtypes_of, linear_case, logits_case, pad, rows_of, unpad
from closeness import as_accurate, elementwise
from oracle import Options
from torch import Tensor

from dapo_kernels import linear_token_logprobs, token_logprobs, use_backend

SHARES = {"both": (1.0, 1.0), "logprobs": (1.0, 0.0), "entropy": (0.0, 1.0)}


def weighted_sum(logprobs: Tensor, entropy: Tensor, use: str) -> Tensor:
    """The scalar that is differentiated: sum(a logp + b H)."""
    g = torch.Generator().manual_seed(99)
    a, b = (share * torch.randn(len(logprobs), generator=g).to(logprobs.dtype) for share in SHARES[use])
    return (a * logprobs).sum() + (b * entropy).sum()


def solve(case: Case, dtype: torch.dtype, use: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, entropies and gradients by the oracle's rows, leaves in `dtype`."""
    leaves, x = rows_of(case, Options(), dtype, use_mask=False)
    assert x.entropy is not None
    weighted_sum(x.logprobs, x.entropy, use).backward()
    return (
        x.logprobs.detach(),
        x.entropy.detach(),
        {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None},
    )


def run(case: Case, leaves: dict[str, Tensor], **options: Any) -> Any:
    options = {"temperature": case.temperature, "entropy": True, **options}
    if "logits" in leaves:
        return token_logprobs(leaves["logits"], case.target_ids, **options)
    head = {"bias": leaves.get("bias"), "softcap": case.softcap}
    return linear_token_logprobs(leaves["hidden"], leaves["weight"], case.target_ids, **head, **options)


def check(case: Case, use: str = "both", **options: Any) -> dict[str, Tensor]:
    dtype = next(iter(case.leaves.values())).dtype
    truth, eager = solve(case, torch.float64, use), solve(case, dtype, use)
    leaves = case.fresh()
    stats = run(case, leaves, **options)
    # A head in half precision rounds each logit; one of them decides the error, eager's as ours.
    multiple = 6.0 if "hidden" in leaves and dtype.itemsize == 2 else 2.0
    of = {"multiple": multiple, "scale": 8.0}
    as_accurate(stats.logprobs, truth[0], eager[0], what="log-probs", **of)
    as_accurate(stats.entropy, truth[1], eager[1], what="entropy", **of)
    weighted_sum(stats.logprobs, stats.entropy, use).backward()
    grads = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        grads[name] = leaf.grad
        as_accurate(leaf.grad, truth[2][name], eager[2][name], what=f"{name} gradient", multiple=multiple)
        if name == "logits":
            elementwise(leaf.grad, truth[2][name], what="gradient")
    return grads


@pytest.mark.parametrize("use", SHARES)
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_from_logits(backend: str, inplace: bool, use: str) -> None:
    for dtype in dtypes_of(backend):
        tau = torch.linspace(0.6, 2.0, 19)
        check(logits_case(131, dtype=dtype, temperature=tau, seed=51), use, inplace_backward=inplace)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("use", SHARES)
def test_from_hidden_states(backend: str, use: str, softcap: float | None, bias: bool) -> None:
    for dtype in dtypes_of(backend):
        tau: Any = 0.8 if bias else torch.linspace(0.6, 1.3, 19)
        check(linear_case(67, 12, dtype=dtype, bias=bias, softcap=softcap, temperature=tau, seed=53), use)


@pytest.mark.parametrize("vocab", [257, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_accuracy_bar(backend: str, vocab: int, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded logits: 2e-6 absolute for log-probs down to about -16."""
    g = torch.Generator().manual_seed(vocab)
    for sharpness in (0.3, 2.0):
        logits = (torch.randn(8, vocab, generator=g) * sharpness).to(dtype)
        ids = torch.randint(vocab, (8,), generator=g)
        truth, eager = (torch.log_softmax(logits.to(d), -1) for d in (torch.float64, torch.float32))
        h, eager_h = (-(x.exp() * x).sum(-1) for x in (truth, eager))
        for entropy in (False, True):
            stats = token_logprobs(logits, ids, entropy=entropy)
            assert stats.logprobs.dtype == torch.float32
            picked = truth.gather(1, ids[:, None])[:, 0]
            assert float((stats.logprobs.double() - picked).abs().max()) <= 2e-6
        as_accurate(stats.entropy, h, eager_h, what="entropy", scale=math.log(vocab))


@pytest.mark.parametrize("vocab", [1, 2, 131, 4099])
def test_no_positive_logprob_and_no_negative_entropy(backend: str, vocab: int) -> None:
    """A token with all the mass has log-prob 0 and not 3e-8: log(1 - exp(logp)) of a positive one is NaN."""
    g = torch.Generator().manual_seed(vocab)
    for dtype in dtypes_of(backend):
        for scale in (0.0, 3.0, 60.0, 1e4):
            logits = (torch.randn(64, vocab, generator=g) * scale).to(dtype)
            stats = token_logprobs(logits, logits.argmax(-1), entropy=True, temperature=0.77)
            assert float(stats.logprobs.max()) <= 0
            assert float(stats.entropy.min()) >= 0


@pytest.mark.parametrize("make", [logits_case, linear_case])
def test_padded_is_packed(backend: str, make: Any) -> None:
    lengths, width = (5, 1, 9, 4), 9
    case = make(37, lengths=lengths, temperature=0.7, seed=56)
    flat = run(case, case.leaves)
    token_leaf = next(iter(case.leaves))
    leaves = {**case.leaves, token_leaf: pad(case.leaves[token_leaf], lengths, width, 0.0)}
    padded = run(dataclasses.replace(case, target_ids=pad(case.target_ids, lengths, width, 0)), leaves)
    for got, expected in zip(padded, flat, strict=True):
        assert got.shape == (4, 9)
        assert torch.equal(unpad(got, lengths), expected)


def test_banned_tokens(backend: str) -> None:
    """By -inf (grammar, top-k): no NaN in the entropy, an exact zero in the gradient. torch.finfo(dtype).min does the
    same."""
    for dtype in dtypes_of(backend):
        case = logits_case(131, dtype=dtype, seed=58)
        banned = torch.rand(19, 131, generator=torch.Generator().manual_seed(1)) < 0.6
        banned[3] = True  # a row with a single possible token
        banned[:, :64] |= (case.target_ids >= 64)[:, None]  # whole leading blocks
        banned[torch.arange(19), case.target_ids] = False
        logits = case.leaves["logits"]
        case.leaves["logits"] = logits.masked_fill(banned, -math.inf)
        grad = check(case)["logits"]
        assert not grad[banned].any()
        leaf = logits.masked_fill(banned, torch.finfo(dtype).min).requires_grad_()
        stats = run(case, {"logits": leaf})
        weighted_sum(stats.logprobs, stats.entropy, "both").backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, grad)


def test_gradcheck_in_float64() -> None:
    """Numerical differentiation, no oracle: both outputs, both functions."""
    g = torch.Generator().manual_seed(3)
    logits, hidden, weight, bias = (
        torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 6), (4, 3), (6, 3), (6,))
    )
    ids = torch.tensor([0, 5, 2, 2])

    def from_logits(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(token_logprobs(x, ids, entropy=True, temperature=0.7))

    def from_hidden(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_token_logprobs(h, w, ids, bias=b, softcap=2.0, entropy=True))

    with use_backend("torch"):
        assert torch.autograd.gradcheck(from_logits, (logits,))
        assert torch.autograd.gradcheck(from_hidden, (hidden, weight, bias))
