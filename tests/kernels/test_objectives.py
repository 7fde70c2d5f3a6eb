"""Every row of the objectives table, at every function and in both layouts, in values, gradients and metrics: with its
own constants against its paper's equation, with other options against the oracle.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from against_oracle import LENGTH_NORM, Problem, as_logprobs, check_call, options
from cases import Case, linear_case, logits_case, solve
from closeness import elementwise
from entries import call, token_values
from oracle import PROMPT_MEAN, Options, TokenInputs
from oracle_papers import MAX_TOKENS, PAPERS, Flat
from torch import Tensor

from dapo_kernels import OBJECTIVES, Objective, dapo_loss, use_backend
from dapo_kernels.objectives.table import AGGREGATES

LENGTHS = (6, 3, 11, 2)
ENTRIES = ("logits", "inplace", "linear", "policy")
LAYOUTS = ("packed", "padded")
GROUPS = (7, -2, 7, 40)
# How every row is called besides its paper's constants. Each row sees another aggregate with everything at once.
HOW: dict[str, dict[str, Any]] = {
    "alone": {"kl_coef": 0.0, "denominator": 6.5},
    "everything": {"kl_coef": 0.1, "entropy_coef": 0.05, "weighted": True},
    "on-policy": {"on_policy": True},
}


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
        assert x.entropy is not None
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


@cache
def problem_with(name: str, how: str, kind: str) -> tuple[Case, Problem, dict[str, Any]]:
    changes = dict(HOW[how])
    if how == "everything":
        changes["aggregate"] = AGGREGATES[list(OBJECTIVES).index(name) % len(AGGREGATES)]
    arguments = {key: changes.pop(key) for key in ("weighted", "on_policy", "denominator") if key in changes}
    o, keywords = options(name, **changes)
    if o.aggregate == PROMPT_MEAN:
        arguments["groups"] = GROUPS
    if kind == "linear":
        case = linear_case(29, lengths=(5, 1, 9, 4), seed=45, bias=how == "alone")
    else:
        case = logits_case(29, lengths=(5, 1, 9, 4), seed=43, temperature=0.7)
    return case, Problem(as_logprobs(case) if kind == "policy" else case, o, **arguments), keywords


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_with_other_options(backend: str, name: str, how: str) -> None:
    if how == "on-policy" and OBJECTIVES[name].max_old_prob is not None:
        pytest.skip("max_old_prob needs old log-probs")
    for entry in ENTRIES:
        case, problem, keywords = problem_with(name, how, "logits" if entry == "inplace" else entry)
        for layout in LAYOUTS:
            check_call(entry, problem, case, name, layout, keywords)


def test_small_elements_of_a_gradient_are_right_too(backend: str) -> None:
    """The largest of a softmax's gradient stands at the target; this looks at the other V-1."""
    case, _, paper = paper_problem("dapo", "logits")
    _, grads = call("logits", case, "dapo")
    elementwise(grads["logits"], paper.grads["logits"], what="gradient")


def test_a_name_an_objective_and_keywords_mean_the_same(backend: str) -> None:
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


def test_dapo_is_the_default() -> None:
    case = logits_case(seed=16)
    out = dapo_loss(case.leaves["logits"], case.target_ids, case.old_logprobs, case.advantages, mask=case.mask)
    assert torch.equal(out.loss, call("logits", case, "dapo")[0].loss)
    assert not torch.equal(out.loss, call("logits", case, "ppo")[0].loss)


def test_rows_are_frozen_and_name_their_source() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OBJECTIVES["dapo"].clip_high = 9.0  # type: ignore[misc]
    assert all(isinstance(row, Objective) and row.paper for row in OBJECTIVES.values())
