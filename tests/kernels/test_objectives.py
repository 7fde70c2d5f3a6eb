"""Every row of the table against its paper's equation, spelled longhand in float64 autograd (oracle.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from cases import Case, call_linear, call_logits, linear_case, logits_case, logits_of
from closeness import as_accurate, elementwise
from oracle import (
    Flat,
    dapo_paper,
    dr_grpo_paper,
    grpo_paper,
    ppo_paper,
    reinforce_paper,
    row_log_softmax,
)
from torch import Tensor

from dapo_kernels import OBJECTIVES, Objective, dapo_loss, linear_dapo_loss, policy_loss

LENGTH_NORM = 12.0
PAPERS: dict[str, Callable[[Flat], Tensor]] = {
    "ppo": ppo_paper,
    "grpo": grpo_paper,
    "dapo": dapo_paper,
    "dr_grpo": lambda x: dr_grpo_paper(x, max_tokens=LENGTH_NORM),
    "reinforce": reinforce_paper,
}
EXTRA = {"dr_grpo": {"length_norm": LENGTH_NORM}}


def extra_inputs(name: str, case: Case) -> dict[str, object]:
    """What a row needs beyond the common arguments."""
    return {**EXTRA.get(name, {}), **({"ref_logprobs": case.ref_logprobs} if name == "grpo" else {})}


def paper_solution(name: str, case: Case, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The paper's loss and its gradients, every step in `dtype`."""
    leaves = {key: leaf.detach().to(dtype, copy=True).requires_grad_() for key, leaf in case.leaves.items()}
    logits = logits_of(leaves, case.softcap)
    logprobs = torch.stack([row_log_softmax(z, 1.0)[y] for z, y in zip(logits, case.target_ids, strict=True)])
    live = [bool(m) for m in case.mask.tolist()]
    flat = Flat(
        logprobs,
        case.old_logprobs.to(dtype),
        case.advantages.to(dtype),
        case.ref_logprobs.to(dtype),
        live,
        case.spans,
    )
    loss = PAPERS[name](flat)
    loss.backward()
    return loss.detach(), {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("name", PAPERS)
def test_logits_level_is_the_papers_equation(backend: str, name: str) -> None:
    case = logits_case(vocab=37, lengths=(6, 3, 11, 2), seed=11)
    truth, grads = paper_solution(name, case, torch.float64)
    eager, eager_grads = paper_solution(name, case, torch.float32)
    out, grad = call_logits(
        dapo_loss, case, name, mask=case.mask, cu_seqlens=case.cu_seqlens, **extra_inputs(name, case)
    )
    as_accurate(out.loss, truth, eager, what="loss", scale=1.0)
    as_accurate(grad, grads["logits"], eager_grads["logits"], what="logits gradient")
    elementwise(grad, grads["logits"], what="logits gradient")


@pytest.mark.parametrize("name", PAPERS)
def test_from_hidden_states_is_the_papers_equation(backend: str, name: str) -> None:
    case = linear_case(vocab=37, hidden_size=9, lengths=(6, 3, 11, 2), seed=12)
    truth, grads = paper_solution(name, case, torch.float64)
    eager, eager_grads = paper_solution(name, case, torch.float32)
    out, got = call_linear(
        linear_dapo_loss, case, name, mask=case.mask, cu_seqlens=case.cu_seqlens, **extra_inputs(name, case)
    )
    as_accurate(out.loss, truth, eager, what="loss", scale=1.0)
    for key in ("hidden", "weight"):
        as_accurate(got[key], grads[key], eager_grads[key], what=f"{key} gradient")


@pytest.mark.parametrize("name", PAPERS)
def test_float64_reference_is_the_papers_equation_to_rounding(name: str) -> None:
    from dapo_kernels import use_backend

    case = logits_case(vocab=37, lengths=(6, 3, 11, 2), seed=13, dtype=torch.float64)
    truth, grads = paper_solution(name, case, torch.float64)
    with use_backend("torch"):
        out, grad = call_logits(
            dapo_loss, case, name, mask=case.mask, cu_seqlens=case.cu_seqlens, **extra_inputs(name, case)
        )
    torch.testing.assert_close(out.loss, truth, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad, grads["logits"], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("name", PAPERS)
def test_from_logprobs_is_the_papers_equation(backend: str, name: str) -> None:
    case = logits_case(vocab=37, lengths=(6, 3, 11, 2), seed=14)
    logits = case.leaves["logits"].double()
    picked = torch.log_softmax(logits, -1).gather(1, case.target_ids[:, None])[:, 0].float()
    new = picked.clone().requires_grad_()
    out = policy_loss(
        new,
        case.old_logprobs,
        case.advantages,
        objective=name,
        mask=case.mask,
        cu_seqlens=case.cu_seqlens,
        **extra_inputs(name, case),
    )
    out.loss.backward()
    solutions = []
    for dtype in (torch.float64, torch.float32):
        leaf = picked.to(dtype, copy=True).requires_grad_()
        flat = Flat(
            leaf,
            case.old_logprobs.to(dtype),
            case.advantages.to(dtype),
            case.ref_logprobs.to(dtype),
            case.mask.tolist(),
            case.spans,
        )
        loss = PAPERS[name](flat)
        loss.backward()
        solutions.append((loss.detach(), leaf.grad))
    (truth, grad), (eager, eager_grad) = solutions
    as_accurate(out.loss, truth, eager, what="loss", scale=1.0)
    as_accurate(new.grad, grad, eager_grad, what="log-prob gradient")
    assert torch.equal(new.grad[~case.mask], torch.zeros_like(new.grad[~case.mask]))


# The fields the papers print. A row that drifts from its paper fails here by name.
PRINTED: dict[str, dict[str, object]] = {
    "ppo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "aggregate": "token-mean", "kl_coef": 0.0},
    "grpo": {
        "surrogate": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregate": "seq-mean-token-mean",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
        "kl_through_ratio": False,
    },
    "dapo": {
        "surrogate": "clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregate": "token-mean",
        "kl_coef": 0.0,
        "dual_clip": None,
        "entropy_coef": 0.0,
    },
    "dr_grpo": {
        "surrogate": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregate": "seq-mean-token-sum-norm",
        "kl_coef": 0.0,
    },
    "reinforce": {"surrogate": "reinforce", "aggregate": "token-mean", "kl_coef": 0.0},
}


@pytest.mark.parametrize("name", PRINTED)
def test_row_has_the_papers_constants(name: str) -> None:
    row = OBJECTIVES[name]
    assert isinstance(row, Objective)
    assert {field: getattr(row, field) for field in PRINTED[name]} == PRINTED[name]


def test_rows_are_frozen() -> None:
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        OBJECTIVES["dapo"].clip_high = 9.0  # type: ignore[misc]


def test_an_objective_a_name_and_keywords_say_the_same(backend: str) -> None:
    case = logits_case(seed=15)
    made = dataclasses.replace(OBJECTIVES["ppo"], clip_high=0.5, dual_clip=2.0)
    shared = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
    by_object, grad_object = call_logits(dapo_loss, case, made, **shared)
    by_keyword, grad_keyword = call_logits(dapo_loss, case, "ppo", clip_high=0.5, dual_clip=2.0, **shared)
    mixed, grad_mixed = call_logits(dapo_loss, case, dataclasses.replace(made, clip_high=0.3), clip_high=0.5, **shared)
    plain, _ = call_logits(dapo_loss, case, "ppo", **shared)
    assert torch.equal(by_object.loss, by_keyword.loss)
    assert torch.equal(grad_object, grad_keyword)
    assert torch.equal(by_object.loss, mixed.loss)
    assert torch.equal(grad_object, grad_mixed)
    assert not torch.equal(by_object.loss, plain.loss)


def test_dapo_is_the_default(backend: str) -> None:
    case = logits_case(seed=16)
    logits = case.fresh()["logits"]
    out = dapo_loss(logits, case.target_ids, case.old_logprobs, case.advantages, mask=case.mask)
    named, _ = call_logits(dapo_loss, case, "dapo", mask=case.mask)
    ppo, _ = call_logits(dapo_loss, case, "ppo", mask=case.mask)
    assert torch.equal(out.loss, named.loss)
    assert not torch.equal(out.loss, ppo.loss)
