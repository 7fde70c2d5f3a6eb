"""A dead token leaves no trace, to the bit, whatever its inputs hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from against_oracle import as_logprobs, options
from cases import Case, dtypes_of, linear_case, logits_case
from entries import call, poisoned
from oracle import PROMPT_MEAN
from torch import Tensor

from dapo_kernels import OBJECTIVES
from dapo_kernels.objectives.table import AGGREGATES

LENGTHS = (5, 1, 9, 4)
ENTRIES = ("logits", "inplace", "linear", "policy")
GARBAGE = (math.nan, math.inf, -math.inf, 1e38)


def case_of(entry: str, dtype: torch.dtype = torch.float32, mask: Tensor | None = None) -> Case:
    shared: dict[str, Any] = {"dtype": dtype, "seed": 52, "dead": 0.5, "mask": mask}
    shared["temperature"] = torch.full((19,), 0.8)
    if entry == "linear":
        return linear_case(37, 8, LENGTHS, bias=True, **shared)
    case = logits_case(29, LENGTHS, **shared)
    return as_logprobs(case) if entry == "policy" else case


def run(entry: str, case: Case, name: str, denominator: Any = None, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
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
    return call(entry, case, name, weighted=True, with_entropy=True, **keywords)


def assert_same_bits(a: tuple[Any, dict[str, Tensor]], b: tuple[Any, dict[str, Tensor]]) -> None:
    (out, grads), (other, other_grads) = a, b
    found, expected = (
        {"loss": x.loss, "logprobs": x.logprobs, "entropy": x.entropy, **x.metrics, **g}
        for x, g in ((out, grads), (other, other_grads))
    )
    for name, x in found.items():
        assert (x is expected[name] is None) or torch.equal(x, expected[name]), name


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_garbage_under_the_mask(backend: str, name: str, entry: str) -> None:
    """0 * NaN in the head's gradient GEMM is the classic leak: dead rows must never enter it."""
    every_dtype = name == "two_sided" and entry != "policy"
    for dtype in dtypes_of(backend) if every_dtype else (torch.float32,):
        case = case_of(entry, dtype)
        changes: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.05, "kl_through_ratio": name == "two_sided"}
        out, grads = run(entry, case, name, **changes)
        by_token = [x for key, x in grads.items() if key not in ("weight", "bias")]
        assert not any(x[~case.mask].any() for x in (out.logprobs, out.entropy, *by_token) if x is not None)
        assert out.logprobs[case.mask].all()
        for values in (GARBAGE, GARBAGE[::-1]):
            assert_same_bits((out, grads), run(entry, poisoned(case, *values), name, **changes))


def test_a_mask_may_be_of_numbers_or_absent(backend: str) -> None:
    for entry in ENTRIES:
        case = case_of(entry)
        for kind in (torch.int64, torch.uint8, torch.float32):
            assert_same_bits(
                run(entry, case, "dapo"), run(entry, dataclasses.replace(case, mask=case.mask.to(kind)), "dapo")
            )
        ones = case_of(entry, mask=torch.ones(19, dtype=torch.bool))
        assert_same_bits(run(entry, ones, "dapo"), run(entry, dataclasses.replace(ones, mask=None), "dapo"))


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_batch_of_dead_tokens_gives_zero(backend: str, aggregate: str) -> None:
    """A rank with nothing to train must still be able to step."""
    for entry in ENTRIES:
        case = poisoned(case_of(entry, mask=torch.zeros(19, dtype=torch.bool)), math.nan)
        for denominator in (None, 100.0, torch.tensor(0)):  # all ranks' count may be 0 too
            out, grads = run(entry, case, "dapo", denominator, aggregate=aggregate, entropy_coef=0.1)
            assert out.loss.item() == 0
            assert not any(grad.any() for grad in grads.values())
            assert all(float(value) == 0 for value in out.metrics.values()), out.metrics
