"""Every row of the objectives table, as it is, against its paper's equation: at every function and in both layouts, in
values, gradients and metrics. `test_golden.py` and `test_random.py` have other options.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from against_oracle import LENGTH_NORM, Problem, as_logprobs, check_call, options
from cases import Case, linear_case, logits_case, solve
from entries import call, token_values
from oracle import Options, TokenInputs
from oracle_papers import MAX_TOKENS, PAPERS, Flat
from torch import Tensor

from dapo_kernels import OBJECTIVES, Objective, dapo_loss, use_backend

LENGTHS = (6, 3, 11, 2)
ENTRIES = ("logits", "inplace", "linear", "policy")
LAYOUTS = ("packed", "padded")


def paper_case(name: str, make: Any = logits_case, dtype: torch.dtype = torch.float32) -> Case:
    """Where a paper has one advantage per response, each token has its response's. One response has no live token."""
    row = OBJECTIVES[name]
    mask = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(3)) > 0.25
    mask[6:9] = False
    case = make(37, lengths=LENGTHS, seed=31, mask=mask, dtype=dtype)
    if row.ratio in ("sequence", "sequence_clipped") or row.off_policy_mask is not None:
        case.advantages = torch.tensor([1.3, 0.4, -0.7, 0.9]).repeat_interleave(torch.tensor(LENGTHS))
    if row.ratio == "sequence_token" or row.vespo is not None:  # ratios near 1, or the whole batch is clipped
        shift = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4))
        now, shift = token_values(case)[0], shift * (0.2 if row.vespo else 2e-3)
        case.old_logprobs = now + torch.where(now + shift > 0, -shift, shift)  # no log-prob is above 0
    if row.off_policy_mask is not None:  # the third response, A < 0, has become improbable
        case.old_logprobs[9:20] += 0.6
    if str(row.surrogate).startswith("dppo"):  # probabilities that can change
        case.old_logprobs = (case.old_logprobs + 2.0).clamp(max=-0.01)
    return case


def solve_paper(name: str, case: Case, drawn: list[int], dtype: torch.dtype = torch.float64) -> Any:
    def loss_of(x: TokenInputs) -> Tensor:
        reference = case.ref_logprobs.to(x.logprobs)
        per_token = (x.logprobs, x.old, x.advantages, reference)
        return PAPERS[name](Flat(*per_token, x.live, list(x.spans), x.entropy.detach(), frozenset(drawn)))

    return solve(case, Options(), dtype=dtype, loss_of=loss_of)


@cache
def paper_problem(name: str, kind: str) -> tuple[Case, Problem, Any]:
    """A case, its solution by the oracle, and by the paper's equation."""
    assert MAX_TOKENS == LENGTH_NORM
    case = paper_case(name, linear_case if kind == "linear" else logits_case)
    leaves = as_logprobs(case) if kind == "policy" else case
    problem = Problem(leaves, options(name, wide=False)[0])
    paper = solve_paper(name, leaves, problem.selected)
    problem.truth.loss, problem.truth.grads = paper.loss, paper.grads
    problem.eager = solve_paper(name, leaves, problem.selected, torch.float32)
    return case, problem, paper


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_is_its_papers_equation(backend: str, name: str) -> None:
    for entry in ENTRIES:
        case, problem, paper = paper_problem(name, "logits" if entry == "inplace" else entry)
        assert any(bool(grad.any()) for grad in paper.grads.values())
        for layout in LAYOUTS:
            check_call(entry, problem, case, name, layout, options(name, wide=False)[1], multiple=2.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_float64_it_is_the_papers_equation_to_rounding(name: str) -> None:
    case = paper_case(name, dtype=torch.float64)
    problem = Problem(case, options(name, wide=False)[0])
    paper = solve_paper(name, case, problem.selected)
    with use_backend("torch"):
        out, grads = problem.call("logits", name, case, "packed", **options(name, wide=False)[1])
    torch.testing.assert_close(out.loss, paper.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grads["logits"], paper.grads["logits"], rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(problem.truth.loss, paper.loss, rtol=1e-12, atol=1e-13)


def test_a_name_an_objective_and_keywords_mean_the_same_and_dapo_is_the_default(backend: str) -> None:
    case = logits_case(seed=15)
    made = dataclasses.replace(OBJECTIVES["ppo"], clip_high=0.5, dual_clip=2.0)
    runs = [
        call("logits", case, made),
        call("logits", case, "ppo", clip_high=0.5, dual_clip=2.0),
        call("logits", case, dataclasses.replace(made, clip_high=0.3), clip_high=0.5),
    ]
    for out, grads in runs[1:]:
        assert torch.equal(out.loss, runs[0][0].loss)
        assert torch.equal(grads["logits"], runs[0][1]["logits"])
    assert not torch.equal(runs[0][0].loss, call("logits", case, "ppo")[0].loss)
    case = logits_case(seed=16)
    default = dapo_loss(**case.leaves, **case.tensors("target_ids", "old_logprobs", "advantages", "mask")).loss
    assert torch.equal(default, call("logits", case, "dapo")[0].loss)
    assert not torch.equal(default, call("logits", case, "ppo")[0].loss)


def test_rows_are_frozen_and_name_their_source() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OBJECTIVES["dapo"].clip_high = 9.0
    assert all(isinstance(row, Objective) and row.paper for row in OBJECTIVES.values())
