"""A dead token leaves no trace, whatever its inputs hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, call_linear, call_logits, dtypes_of, linear_case, logits_case, pad, unpad
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, policy_loss

OPTIONS: dict[str, Any] = {
    "clip_high": 0.28,
    "dual_clip": 2.0,
    "kl_coef": 0.1,
    "kl_through_ratio": True,
    "entropy_coef": 0.05,
    "aggregate": "seq-mean-token-mean",
}
GARBAGE = (math.nan, math.inf, -math.inf, 1e38, -1e38)
PER_TOKEN = ("old_logprobs", "advantages", "ref_logprobs", "importance_weights")


def poisoned(case: Case, value: float, where: str) -> Case:
    """The same case with `value` in one input (or all) wherever the mask is off."""
    dead = ~case.mask
    copy = Case(**{**case.__dict__, "leaves": dict(case.leaves)})
    for name in PER_TOKEN:
        if where in (name, "all"):
            setattr(copy, name, getattr(case, name).masked_fill(dead, value))
    token_leaf = next(iter(case.leaves))
    if where in (token_leaf, "all"):
        leaf = case.leaves[token_leaf]
        copy.leaves[token_leaf] = leaf.masked_fill(dead[:, None], torch.tensor(value).to(leaf.dtype))
    if where in ("temperature", "all"):
        copy.temperature = torch.as_tensor(case.temperature).masked_fill(dead, value)
    if where in ("target_ids", "all"):
        copy.target_ids = case.target_ids.masked_fill(dead, -100)
    return copy


def run(case: Case, **kwargs: Any) -> tuple[Any, dict[str, Tensor | None]]:
    shared = {
        **OPTIONS,
        "mask": case.mask,
        "cu_seqlens": case.cu_seqlens,
        "ref_logprobs": case.ref_logprobs,
        "importance_weights": case.importance_weights,
        **kwargs,
    }
    if "hidden" in case.leaves:
        return call_linear(linear_dapo_loss, case, "ppo", **shared)
    out, grad = call_logits(dapo_loss, case, "ppo", **shared)
    return out, {"logits": grad}


def same_bits(a: tuple[Any, dict[str, Tensor | None]], b: tuple[Any, dict[str, Tensor | None]]) -> None:
    (out_a, grads_a), (out_b, grads_b) = a, b
    assert torch.equal(out_a.loss, out_b.loss)
    assert torch.equal(out_a.logprobs, out_b.logprobs)
    assert torch.equal(out_a.entropy, out_b.entropy)
    for name, grad in grads_a.items():
        other = grads_b[name]
        assert grad is not None
        assert other is not None
        assert torch.equal(grad, other), name
    assert set(out_a.metrics) == set(out_b.metrics)
    for key in out_a.metrics:
        assert torch.equal(out_a.metrics[key], out_b.metrics[key]), key


@pytest.mark.parametrize("where", ["logits", *PER_TOKEN, "temperature", "target_ids", "all"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_garbage_under_the_mask_logits(backend: str, where: str, inplace: bool) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(
            vocab=67, lengths=(5, 3, 0, 8, 4), dtype=dtype, seed=61, dead=0.5, temperature=torch.full((20,), 0.8)
        )
        clean = run(case, inplace_backward=inplace)
        for value in GARBAGE:
            dirty = run(poisoned(case, value, where), inplace_backward=inplace)
            same_bits(clean, dirty)
        grad = clean[1]["logits"]
        assert grad is not None
        assert not grad[~case.mask].any()
        assert grad[case.mask].any(-1).all()


@pytest.mark.parametrize("where", ["hidden", *PER_TOKEN, "temperature", "target_ids", "all"])
def test_garbage_under_the_mask_linear(backend: str, where: str) -> None:
    """0 * NaN in the head's gradient GEMM is the classic leak: dead rows must never enter it."""
    for dtype in dtypes_of(backend):
        case = linear_case(
            37, 8, (5, 3, 0, 8, 4), dtype=dtype, seed=62, dead=0.5, bias=True, temperature=torch.full((20,), 0.8)
        )
        clean = run(case)
        for value in GARBAGE:
            same_bits(clean, run(poisoned(case, value, where)))
        grad = clean[1]["hidden"]
        assert grad is not None
        assert not grad[~case.mask].any()


@pytest.mark.parametrize("value", GARBAGE)
def test_garbage_under_the_mask_policy(backend: str, value: float) -> None:
    case = logits_case(seed=63, dead=0.5)
    dead = ~case.mask
    results = []
    for dirty in (False, True):

        def fill(x: Tensor, dirty: bool = dirty) -> Tensor:
            return x.masked_fill(dead, value) if dirty else x

        logprobs = fill(case.old_logprobs + 0.1).requires_grad_()
        entropy = fill(case.ref_logprobs.abs()).requires_grad_()
        out = policy_loss(
            logprobs,
            fill(case.old_logprobs),
            fill(case.advantages),
            objective="ppo",
            mask=case.mask,
            cu_seqlens=case.cu_seqlens,
            ref_logprobs=fill(case.ref_logprobs),
            importance_weights=fill(case.importance_weights),
            entropy=entropy,
            **OPTIONS,
        )
        out.loss.backward()
        results.append((out, {"logprobs": logprobs.grad, "entropy": entropy.grad}))
    same_bits(*results)
    for grad in results[1][1].values():
        assert grad is not None
        assert not grad[dead].any()
        assert grad[~dead].all()


@pytest.mark.parametrize("level", ["logits", "linear"])
def test_dead_tokens_logprobs_and_entropy_are_zero(backend: str, level: str) -> None:
    case = logits_case(seed=64, dead=0.5) if level == "logits" else linear_case(seed=64, dead=0.5)
    out, _ = run(poisoned(case, math.nan, "all"))
    assert not out.logprobs[~case.mask].any()
    assert not out.entropy[~case.mask].any()
    assert out.logprobs[case.mask].all()


@pytest.mark.parametrize("kind", ["int64", "uint8", "float32", "bool"])
def test_a_mask_of_zeros_and_ones(backend: str, kind: str) -> None:
    case = logits_case(seed=65)
    mask = case.mask.to(getattr(torch, kind))
    same_bits(run(case), run(case, mask=mask))


def test_no_mask_is_a_mask_of_ones(backend: str) -> None:
    case = logits_case(seed=66)
    same_bits(run(case, mask=None), run(case, mask=torch.ones(19, dtype=torch.bool)))


@pytest.mark.parametrize("level", ["logits", "linear"])
@pytest.mark.parametrize(
    "aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_an_all_dead_mask_gives_zero(backend: str, aggregate: str, level: str) -> None:
    """Loss 0, gradient 0 of the right shape, tokens 0; a rank with nothing to train must still be able to step."""
    make = logits_case if level == "logits" else linear_case
    case = make(seed=67, mask=torch.zeros(19, dtype=torch.bool))
    extra = {"aggregate": aggregate, **({"length_norm": 8.0} if aggregate.endswith("norm") else {})}
    for denominator in (None, 100.0):
        out, grads = run(poisoned(case, math.nan, "all"), denominator=denominator, **extra)
        assert out.loss.item() == 0
        assert all(grad is not None and not grad.any() for grad in grads.values())
        assert all(float(value) == 0 for value in out.metrics.values()), out.metrics


def test_a_sequence_without_live_tokens_is_not_counted(backend: str) -> None:
    """seq-mean divides by sequences that have a live token; empty and fully masked ones change nothing."""
    lengths = (4, 0, 3, 2)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    case = logits_case(vocab=23, lengths=lengths, seed=68, mask=mask)
    keep = torch.tensor([0, 1, 2, 3, 7, 8])
    for aggregate in ("seq-mean-token-mean", "seq-mean-token-sum"):
        out, grads = run(case, aggregate=aggregate)
        alone = Case(**{**case.__dict__, "lengths": (4, 2), "mask": mask[keep]})
        alone.leaves = {"logits": case.leaves["logits"][keep]}
        for name in ("target_ids", *PER_TOKEN):
            setattr(alone, name, getattr(case, name)[keep])
        other, other_grads = run(alone, aggregate=aggregate)
        assert torch.equal(out.loss, other.loss)
        assert grads["logits"] is not None
        assert other_grads["logits"] is not None
        assert torch.equal(grads["logits"][keep], other_grads["logits"])


def test_padding_may_hold_anything(backend: str) -> None:
    """Padded logits straight from a model: NaN and -inf rows, -100 targets, in the last columns and dead rows."""
    lengths, width = (5, 1, 0, 4), 7
    case = logits_case(vocab=23, lengths=lengths, seed=69, dead=0.2)
    clean, grads = run(case)
    for value in GARBAGE:
        logits = pad(case.leaves["logits"], lengths, width, value).requires_grad_()
        out = dapo_loss(
            logits,
            pad(case.target_ids, lengths, width, -100),
            pad(case.old_logprobs, lengths, width, value),
            pad(case.advantages, lengths, width, value),
            objective="ppo",
            mask=pad(case.mask, lengths, width, 0),
            ref_logprobs=pad(case.ref_logprobs, lengths, width, value),
            importance_weights=pad(case.importance_weights, lengths, width, value),
            **OPTIONS,
        )
        out.loss.backward()
        assert grads["logits"] is not None
        assert logits.grad is not None
        torch.testing.assert_close(out.loss, clean.loss, rtol=1e-6, atol=1e-7)
        assert torch.equal(unpad(out.logprobs, lengths), clean.logprobs)
        assert torch.equal(logits.grad, pad(grads["logits"], lengths, width, 0.0))
