"""A dead token leaves no trace, whatever its inputs hold. The padded layouts of the other tests hold NaN there too."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from against_oracle import options
from cases import Case, dtypes_of, linear_case, logits_case
from entries import call
from oracle import PROMPT_MEAN
from torch import Tensor

from dapo_kernels import OBJECTIVES, policy_loss
from dapo_kernels.objectives.table import AGGREGATES

LENGTHS = (5, 1, 9, 4)
ENTRIES = ("logits", "inplace", "linear", "policy")
GARBAGE = (math.nan, math.inf, -math.inf, 1e38)
PER_TOKEN = ("old_logprobs", "advantages", "ref_logprobs", "importance_weights")


def case_of(entry: str, dtype: torch.dtype = torch.float32, mask: Tensor | None = None) -> Case:
    shared: dict[str, Any] = {
        "dtype": dtype,
        "seed": 52,
        "dead": 0.5,
        "mask": mask,
        "temperature": torch.full((19,), 0.8),
    }
    if entry == "linear":
        return linear_case(37, 8, LENGTHS, bias=True, **shared)
    return logits_case(29, LENGTHS, **shared)


def poisoned(case: Case, value: float) -> Case:
    """The same case with `value` in every input wherever the mask is off."""
    dead = ~case.mask
    fields: dict[str, Any] = {name: getattr(case, name).masked_fill(dead, value) for name in PER_TOKEN}
    fields["temperature"] = torch.as_tensor(case.temperature).masked_fill(dead, value)
    fields["target_ids"] = case.target_ids.masked_fill(dead, -100)
    leaves = dict(case.leaves)
    for name in ("logits", "hidden"):
        if name in leaves:
            leaves[name] = leaves[name].masked_fill(dead[:, None], torch.tensor(value).to(leaves[name].dtype))
    return dataclasses.replace(case, **fields, leaves=leaves)


def run(
    entry: str, case: Case, name: str, denominator: float | None = None, **changes: Any
) -> tuple[Any, dict[str, Tensor]]:
    o, keywords = options(name, **changes)
    keywords["denominator"] = denominator
    if o.needs_reference:
        keywords["ref_logprobs"] = case.ref_logprobs
    if o.clip_cov is not None:
        keywords["generator"] = torch.Generator().manual_seed(0)
    if o.aggregate == PROMPT_MEAN:
        keywords["group_ids"] = torch.tensor([0, 1, 0, 1])
    if entry != "policy":
        keywords["entropy"] = True
    with_entropy = entry == "policy" and bool(o.entropy_coef or o.top_entropy)
    return call(entry, case, name, weighted=True, with_entropy=with_entropy, **keywords)


def assert_same_bits(a: tuple[Any, dict[str, Tensor]], b: tuple[Any, dict[str, Tensor]]) -> None:
    (out, grads), (other, other_grads) = a, b
    assert torch.equal(out.loss, other.loss)
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name
    for name, x in (("logprobs", out.logprobs), ("entropy", out.entropy)):
        if x is not None:
            assert torch.equal(x, getattr(other, name)), name
    for name, metric in out.metrics.items():
        assert torch.equal(metric, other.metrics[name]), name


def assert_dead_tokens_are_zero(case: Case, run: tuple[Any, dict[str, Tensor]]) -> None:
    out, grads = run
    per_token = [out.logprobs, out.entropy, *(x for name, x in grads.items() if name not in ("weight", "bias"))]
    for x in per_token:
        assert x is None or not x[~case.mask].any()
    assert out.logprobs[case.mask].all()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_garbage_under_the_mask(backend: str, name: str, entry: str) -> None:
    """0 * NaN in the head's gradient GEMM is the classic leak: dead rows must never enter it."""
    case = case_of(entry)
    clean = run(entry, case, name, kl_coef=0.1, entropy_coef=0.05)
    assert_dead_tokens_are_zero(case, clean)
    for value in GARBAGE:
        if entry == "policy":  # of a caller's log-probs and entropies the others are shown below
            value_case = dataclasses.replace(poisoned(case, value), leaves=case.leaves, temperature=case.temperature)
            value_case.target_ids = case.target_ids
        else:
            value_case = poisoned(case, value)
        assert_same_bits(clean, run(entry, value_case, name, kl_coef=0.1, entropy_coef=0.05))


@pytest.mark.parametrize("entry", ["logits", "inplace", "linear"])
def test_garbage_in_every_dtype(backend: str, entry: str) -> None:
    for dtype in dtypes_of(backend):
        case = case_of(entry, dtype)
        clean = run(entry, case, "two_sided", kl_through_ratio=True, entropy_coef=0.05)
        for value in GARBAGE:
            dirty = run(entry, poisoned(case, value), "two_sided", kl_through_ratio=True, entropy_coef=0.05)
            assert_same_bits(clean, dirty)


@pytest.mark.parametrize("value", GARBAGE)
def test_garbage_in_logprobs_and_entropies(backend: str, value: float) -> None:
    case, results = case_of("logits"), []
    for fill in (-1.0, value):
        leaves = [x.masked_fill(~case.mask, fill).requires_grad_() for x in (case.ref_logprobs, -case.old_logprobs)]
        given = {"mask": case.mask, "entropy": leaves[1], "entropy_coef": 0.1}
        out = policy_loss(leaves[0], case.old_logprobs, case.advantages, objective="ppo", **given)
        out.loss.backward()
        results.append((out, {"logprobs": leaves[0].grad, "entropy": leaves[1].grad}))
    assert_same_bits(*results)  # type: ignore[arg-type]
    assert_dead_tokens_are_zero(case, results[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.float32], ids=str)
def test_a_mask_of_zeros_and_ones(backend: str, kind: torch.dtype) -> None:
    case = case_of("logits")
    assert_same_bits(
        call("logits", case, "dapo"), call("logits", dataclasses.replace(case, mask=case.mask.to(kind)), "dapo")
    )


def test_no_mask_is_a_mask_of_ones(backend: str) -> None:
    for entry in ENTRIES:
        case = case_of(entry, mask=torch.ones(19, dtype=torch.bool))
        assert_same_bits(run(entry, case, "dapo"), run(entry, dataclasses.replace(case, mask=None), "dapo"))


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_batch_of_dead_tokens_gives_zero(backend: str, aggregate: str) -> None:
    """A rank with nothing to train must still be able to step."""
    for entry in ENTRIES:
        case = case_of(entry, mask=torch.zeros(19, dtype=torch.bool))
        if entry != "policy":
            case = poisoned(case, math.nan)
        for denominator in (None, 100.0):
            out, grads = run(entry, case, "dapo", denominator, aggregate=aggregate, entropy_coef=0.1)
            assert out.loss.item() == 0
            assert not any(grad.any() for grad in grads.values())
            assert all(float(value) == 0 for value in out.metrics.values()), out.metrics
