"""The divergence of the policy from a reference, both from hidden states: value and every gradient."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MATH_DTYPE, Case, dtypes_of, linear_case, logits_of, pad
from closeness import as_accurate
from entries import lora_of
from torch import Tensor

from dapo_kernels import linear_distillation_loss

V, H, K, LENGTHS = 61, 12, 8, (7, 2, 12)
BETAS = (0.0, 0.2, 0.5, 1.0)
EVERYTHING = ("hidden", "weight", "bias", "lora_a", "lora_b")


def pair(dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Case, Case]:
    """A policy and its reference, of another width and another soft cap."""
    policy = linear_case(V, H, LENGTHS, dtype=dtype, seed=81, **how)
    ref = linear_case(V, K, LENGTHS, dtype=dtype, seed=82, bias=True, softcap=5.0, temperature=policy.temperature)
    return policy, ref


def call(policy: Case, ref: Case, *, needs: tuple[str, ...] = EVERYTHING, **how: Any) -> tuple[Any, dict[str, Any]]:
    x = policy.fresh()
    for name, leaf in x.items():
        leaf.requires_grad_(name in needs)
    head = {"bias": x.get("bias"), "softcap": policy.softcap, "temperature": policy.temperature, "lora": lora_of(x)}
    of_ref = {"ref_bias": ref.leaves["bias"], "ref_softcap": ref.softcap}
    states = (x["hidden"], x["weight"], ref.leaves["hidden"], ref.leaves["weight"])
    out = linear_distillation_loss(*states, **{"mask": policy.mask, **head, **of_ref, **how})
    if out.loss.requires_grad:
        (3 * out.loss).backward()
    return out, {name: leaf.grad for name, leaf in x.items()}


def true_divergence(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Of rows of probabilities: KL(q‖p) at 0, KL(p‖q) at 1, both from the mixture between."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a / b).log(), 0.0).sum(-1)

    if beta in (0, 1):
        return kl(q, p) if beta == 0 else kl(p, q)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def solve(policy: Case, ref: Case, beta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, the divergence of every token and the gradients of 3 · loss, spelled out, by autograd."""
    x = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in policy.leaves.items()}
    y = {name: leaf.to(dtype) for name, leaf in ref.leaves.items()}
    tau = torch.as_tensor(policy.temperature, dtype=MATH_DTYPE[dtype]).reshape(-1, 1)
    p, q = (
        torch.softmax(logits_of(leaves, case.softcap).to(MATH_DTYPE[dtype]) / tau, -1)
        for leaves, case in ((x, policy), (y, ref))
    )
    divergence = true_divergence(p, q, beta)
    divergence = torch.where(policy.mask, divergence, 0.0)
    loss = divergence.sum() / policy.mask.sum()
    (3 * loss).backward()
    return loss.detach(), divergence.detach(), {name: leaf.grad for name, leaf in x.items() if leaf.grad is not None}


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("beta", BETAS)
def test_every_dtype(backend: str, beta: float, softcap: float | None) -> None:
    temperature = torch.linspace(0.6, 1.7, sum(LENGTHS))
    for dtype in dtypes_of(backend):
        policy, ref = pair(dtype, bias=True, softcap=softcap, temperature=temperature, rank=3)
        (loss, divergence, truth), (_, near, eager) = (solve(policy, ref, beta, x) for x in (torch.float64, dtype))
        rtol = 1e-5 if dtype in (torch.float32, torch.float64) else 0.03
        multiple = 4.0 if dtype == torch.float64 else 6.0  # eager float32 errs by less on some processors
        for chunk_bytes in (None, 5 * V * 2 * dtype.itemsize):
            out, grads = call(policy, ref, beta=beta, chunk_bytes=chunk_bytes)
            as_accurate(out.divergence, divergence, near, what="divergence", multiple=multiple, scale=8.0)
            torch.testing.assert_close(out.loss.double(), loss, rtol=rtol, atol=1e-6)
            for name, grad in grads.items():
                assert grad.dtype == dtype
                as_accurate(grad, truth[name], eager[name], what=f"{name}, {dtype}", multiple=multiple)


@pytest.mark.parametrize("beta", BETAS)
def test_garbage_under_the_mask_leaves_no_trace(backend: str, beta: float) -> None:
    policy, ref = pair()
    clean, grads = call(policy, ref, beta=beta)
    for case in (policy, ref):
        case.leaves["hidden"] = case.leaves["hidden"].masked_fill(~policy.mask[:, None], math.nan)
    temperature = torch.where(policy.mask, 1.0, -1.0)
    out, others = call(policy, ref, beta=beta, temperature=temperature)
    assert torch.equal(out.divergence, clean.divergence)
    assert not out.divergence[~policy.mask].any()
    for name, grad in grads.items():
        assert torch.equal(others[name], grad), name


def test_only_what_requires_a_gradient_gets_one(backend: str) -> None:
    policy, ref = pair(bias=True, rank=3)
    for needs in (("hidden",), ("weight",), ("lora_a", "lora_b"), ()):
        out, grads = call(policy, ref, needs=needs)
        assert {name for name, grad in grads.items() if grad is not None} == set(needs)
        assert out.loss.requires_grad == bool(needs)


def test_layouts_denominators_and_what_is_reported(backend: str) -> None:
    policy, ref = pair()
    packed, grads = call(policy, ref)
    assert packed.loss.item() == pytest.approx(float(packed.divergence.sum() / policy.mask.sum()), rel=1e-6)
    width = 15
    states = [pad(case.leaves["hidden"], LENGTHS, width, math.nan) for case in (policy, ref)]
    hidden = states[0].requires_grad_()
    mask = pad(policy.mask, LENGTHS, width, 0).bool()
    how = {"mask": mask, "ref_bias": ref.leaves["bias"], "ref_softcap": ref.softcap}
    out = linear_distillation_loss(hidden, policy.leaves["weight"], states[1], ref.leaves["weight"], **how)
    (3 * out.loss).backward()
    assert out.divergence.shape == mask.shape
    assert torch.equal(out.divergence[mask], packed.divergence[policy.mask])
    torch.testing.assert_close(hidden.grad[mask], grads["hidden"][policy.mask])
    half, _ = call(policy, ref, denominator=2 * int(policy.mask.sum()))
    assert half.loss.item() == pytest.approx(packed.loss.item() / 2)
    _, nothing = call(policy, ref, mask=torch.zeros_like(policy.mask))
    assert not any(grad.any() for grad in nothing.values())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gap", [1.0, 84.0, 95.0, 104.0, 300.0])
def test_a_token_that_only_one_can_choose(backend: str, gap: float, beta: float) -> None:
    """It costs infinity where the divergence is infinite, down to a probability that float32 rounds to 0. Equal
    distributions cost nothing, also where both have a probability of 0.
    """
    likely, never = torch.tensor([[0.0, 1.0, -gap]]), torch.tensor([[0.0, 1.0, -math.inf]])
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.ones(1, 1, dtype=dtype)
        for policy, ref in itertools.product((likely.to(dtype), never.to(dtype)), repeat=2):
            weight = policy.T.contiguous().requires_grad_()
            out = linear_distillation_loss(hidden, weight, hidden, ref.T, beta=beta)
            out.loss.backward()
            truth = true_divergence(*(torch.softmax(x.double(), -1) for x in (policy, ref)), beta).squeeze()
            torch.testing.assert_close(out.loss.detach(), truth.float(), rtol=1e-5, atol=1e-6)
            assert out.divergence.item() == out.loss.item()
            assert bool(weight.grad.isfinite().all()) == (bool(truth.isfinite()) or beta == 0)
            if policy is ref:
                assert float(weight.grad.abs().max()) < 1e-6


def test_padded_heads_and_main_grad(backend: str) -> None:
    policy, ref = pair(bias=True)
    expected, truth = call(policy, ref)
    padded = []
    for case, more in ((policy, 3), (ref, 5)):
        leaves = dict(case.leaves)
        for name in ("weight", "bias"):
            leaves[name] = torch.cat([leaves[name], torch.full((more, *leaves[name].shape[1:]), math.nan)])
        padded.append(replace(case, leaves=leaves))
    main_grad = torch.ones(V + 3, H)
    out, grads = call(*padded, valid_vocab=V, main_grad=main_grad)
    torch.testing.assert_close(out.divergence, expected.divergence)
    torch.testing.assert_close(main_grad[:V] - 1, truth["weight"], rtol=1e-5, atol=1e-6)
    assert grads["weight"] is None
    assert (main_grad[V:] == 1).all()
    torch.testing.assert_close(grads["hidden"], truth["hidden"])


def test_the_reference_may_have_another_dtype(backend: str) -> None:
    policy, ref = pair()
    rounded = replace(ref, leaves={name: x.bfloat16() for name, x in ref.leaves.items()})
    truth, _ = call(policy, replace(ref, leaves={name: x.float() for name, x in rounded.leaves.items()}))
    out, _ = call(policy, rounded, float32_logits=True)
    torch.testing.assert_close(out.divergence, truth.divergence, rtol=1e-4, atol=1e-5)


X, Y = torch.zeros(21, H), torch.zeros(21, K)


@pytest.mark.parametrize(
    ("kind", "named", "change"),
    [
        (ValueError, r"beta .*1\.5", {"beta": 1.5}),
        (ValueError, r"beta .*'jsd'", {"beta": "jsd"}),
        (ValueError, r"ref_weight .*V=61", {"ref_weight": torch.zeros(60, K)}),
        (ValueError, r"valid_vocab .*V=60", {"ref_weight": torch.zeros(60, K), "valid_vocab": 61}),
        (ValueError, r"hidden .*\[T\]=\[21\]", {"ref_hidden": Y[1:]}),
        (ValueError, r"weight .*H=8", {"ref_weight": torch.zeros(V, H)}),
        (TypeError, r"'group'", {"group": None}),
        (TypeError, r"'objective'", {"objective": "dapo"}),
        (ValueError, r"temperature", {"temperature": torch.zeros(21)}),
    ],
)
def test_arguments_that_do_not_fit(kind: type[Exception], named: str, change: dict[str, Any]) -> None:
    given = {"hidden": X, "weight": torch.zeros(V, H), "ref_hidden": Y, "ref_weight": torch.zeros(V, K)}
    with pytest.raises(kind, match=named):
        linear_distillation_loss(**{**given, **change})


def test_a_second_backward_is_refused() -> None:
    out = linear_distillation_loss(X.clone().requires_grad_(), torch.ones(V, H), Y, torch.ones(V, K))
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_distillation_loss"):
        out.loss.backward()
