"""The weight of a token in the loss: every aggregate, an explicit denominator, batches that add up however cut."""

from __future__ import annotations

import itertools
import warnings
from math import nan
from typing import Any

import pytest
import torch
from against_oracle import LENGTH_NORM, options
from cases import HEAD, Case, linear_case, logits_case, page_code, part_of
from entries import call
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import PROMPT_MEAN
from test_random import FIXED
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, policy_loss
from dapo_kernels.objectives.table import AGGREGATES

LENGTHS = (5, 1, 0, 9, 4, 3)
GROUPS = [7, -2, 7, 40, 7, -2]  # any integers, in any order


def keywords(aggregate: str) -> dict[str, Any]:
    return {"aggregate": aggregate, "length_norm": LENGTH_NORM if aggregate.endswith("norm") else None}


def case_of(entry: str, seed: int) -> Case:
    return (linear_case if entry == "linear" else logits_case)(23, lengths=LENGTHS, seed=seed)


def counts(case: Case) -> tuple[Tensor, int]:
    """The live tokens of each sequence's group, and the number of prompts with one; counted one by one."""
    live = [int(case.mask[a:b].sum()) for a, b in case.spans]
    totals = [sum(n for n, other in zip(live, GROUPS, strict=True) if other == group) for group in GROUPS]
    return torch.tensor(totals), len({group for group, n in zip(GROUPS, live, strict=True) if n})


@pytest.mark.parametrize("entry", ["logits", "linear", "policy"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@given(
    objective=st.sampled_from(["dapo", "gspo", "gspo_token", "gmpo", "vespo", "opsm"]),
    order=st.permutations(range(len(LENGTHS))),
    cuts=st.sets(st.integers(1, len(LENGTHS) - 1)),
    with_ids=st.booleans(),
)
@settings(FIXED, max_examples=6)
def test_micro_batches_add_up(
    backend: str, aggregate: str, entry: str, objective: str, order: list[int], cuts: set[int], with_ids: bool
) -> None:
    """With the global count as denominator any split, in any order, gives the whole batch's loss and gradients."""
    case = case_of(entry, seed=74)
    _, wide = options(objective)
    shared = {**wide, **keywords(aggregate)}
    of_groups = {"group_ids": torch.tensor(GROUPS)} if aggregate == PROMPT_MEAN else {}
    whole, expected = call(entry, case, objective, **shared, **of_groups)
    tokens, prompts = counts(case)
    sequences = sum(bool(case.mask[a:b].any()) for a, b in case.spans)
    count = {"token-mean": int(case.mask.sum()), PROMPT_MEAN: prompts}.get(aggregate, sequences)
    added, total = {name: torch.zeros_like(grad) for name, grad in expected.items()}, 0.0
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(order)], strict=True):
        part, places = part_of(case, order[start:stop])
        of_groups_here = {name: ids[order[start:stop]] for name, ids in of_groups.items() if with_ids}
        if aggregate == PROMPT_MEAN:  # group_ids may be missing then
            of_groups_here["group_tokens"] = tokens[order[start:stop]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a part may have as many tokens as the batch has sequences
            out, grads = call(entry, part, objective, denominator=count, **shared, **of_groups_here)
        total += out.loss.item()
        for name, grad in grads.items():
            added[name][slice(None) if name in HEAD else places] += grad
    assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6)
    for name, grad in expected.items():
        assert float((added[name] - grad).norm()) <= 2e-6 * float(grad.norm()) + 1e-9


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_tokens_as_the_denominator_of_something_else_are_warned_of(aggregate: str) -> None:
    """Seen where it is the count of this very call; every other number may be one of sequences or prompts."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    ids = {"group_ids": torch.tensor([0, 1, 0])} if aggregate == PROMPT_MEAN else {}

    def warned(denominator: Any, live: Tensor = mask) -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            shared = {"mask": live, "denominator": denominator, **ids, **keywords(aggregate)}
            policy_loss(torch.full((3, 3), -1.0), None, torch.ones(3), **shared)
        assert all("denominator" in str(w.message) and aggregate in str(w.message) for w in seen)
        return len(seen)

    assert warned(mask.sum()) == warned(5) == warned(5.0) == (aggregate != "token-mean")
    one_token_each = torch.eye(3)
    assert warned(2) == warned(mask.sum() + 1) == warned(one_token_each.sum(), one_token_each) == 0


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_batch_of_dead_tokens_gives_zero(backend: str, aggregate: str) -> None:
    """A rank with nothing to train must still be able to step, also where all ranks' count is 0."""
    ids = {"group_ids": torch.tensor(GROUPS)} if aggregate == PROMPT_MEAN else {}
    for entry, denominator in itertools.product(("logits", "inplace", "linear", "policy"), (0, torch.tensor(0))):
        case = case_of(entry, seed=10)
        case.mask[:] = False
        out, grads = call(entry, case, "dapo", denominator=denominator, **ids, **keywords(aggregate))
        assert out.loss.item() == 0
        assert not any(grad.any() for grad in grads.values())


# --- a mean over prompts ----------------------------------------------------------------------------------


def test_tokens_of_groups_and_the_number_of_prompts(backend: str) -> None:
    """Either is counted where it is not given, also in a compiled graph. A group without a live token does not count,
    whatever its tokens are given as."""
    case, ids = case_of("logits", seed=7), torch.tensor(GROUPS)
    case.mask[slice(*case.spans[3])] = False  # all of group 40
    whole, expected = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids)
    tokens, prompts = counts(case)
    for known in ({"denominator": torch.tensor(float(prompts))}, {"group_tokens": tokens.where(tokens > 0, nan)}):
        out, grads = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids, **known)
        assert out.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
        torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-9)
    given: dict[str, Any] = case.tensors("target_ids", "old_logprobs", "advantages", "mask", "cu_seqlens")
    given |= {"aggregate": PROMPT_MEAN, "group_ids": ids, "group_tokens": tokens}
    run = torch.compile(dapo_loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(case.leaves["logits"], **given).loss, whole.loss)


def test_the_code_of_the_page() -> None:
    """docs/objectives.md, as it stands there."""
    case, ids = case_of("linear", seed=13), torch.tensor(GROUPS)
    whole, _ = call("linear", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids)
    tokens, prompts = counts(case)
    names: dict[str, Any] = {"linear_dapo_loss": linear_dapo_loss, **case.leaves, "global_prompts": prompts}
    names |= case.tensors("target_ids", "old_logprobs", "advantages", "mask", "cu_seqlens")
    names |= {"group_ids": ids, "group_tokens": tokens}
    exec(page_code("prompt means"), names)
    assert names["out"].loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
