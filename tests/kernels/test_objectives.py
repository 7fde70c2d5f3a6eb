"""Every row of the objectives table, as it is, against its paper's equation. `test_golden.py` and `test_random.py` hold
every function, layout and option against the oracle, which agrees with the papers here.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from against_oracle import LENGTH_NORM, Problem, options
from cases import Case, logits_case, solve
from entries import call, token_values
from oracle import Options, TokenInputs
from oracle_papers import MAX_TOKENS, PAPERS, Flat
from torch import Tensor

from dapo_kernels import OBJECTIVES, dapo_loss, use_backend

LENGTHS = (6, 3, 11, 2)


def paper_case(name: str) -> Case:
    """Where a paper has one advantage per response, each token has its response's. One response has no live token."""
    row = OBJECTIVES[name]
    mask = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(3)) > 0.25
    mask[6:9] = False
    case = logits_case(37, lengths=LENGTHS, seed=31, mask=mask, dtype=torch.float64)
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_is_its_papers_equation(name: str) -> None:
    assert MAX_TOKENS == LENGTH_NORM
    case, (o, keywords) = paper_case(name), options(name, wide=False)
    problem = Problem(case, o)

    def loss_of(x: TokenInputs) -> Tensor:
        given = {"ref_logprobs": case.ref_logprobs.double(), "entropy": x.entropy.detach()}
        return PAPERS[name](Flat(**{**vars(x), **given}, drawn=frozenset(problem.selected)))

    paper = solve(case, Options(), loss_of=loss_of)
    with use_backend("torch"):
        out, grads = problem.call("logits", name, case, "packed", **keywords)
    assert paper.grads["logits"].any()
    for found in (out.loss, problem.truth.loss):
        torch.testing.assert_close(found, paper.loss, rtol=1e-12, atol=1e-13)
    for found in (grads["logits"], problem.truth.grads["logits"]):
        torch.testing.assert_close(found, paper.grads["logits"], rtol=1e-10, atol=1e-15)


def test_a_name_an_objective_and_keywords_mean_the_same_and_dapo_is_the_default(backend: str) -> None:
    case = logits_case(seed=16)
    made = dataclasses.replace(OBJECTIVES["ppo"], clip_high=0.5, dual_clip=2.0)
    runs = [
        call("logits", case, made),
        call("logits", case, "ppo", clip_high=0.5, dual_clip=2.0),
        call("logits", case, dataclasses.replace(made, clip_high=0.3), clip_high=0.5),
    ]
    for out, grads in runs[1:]:
        assert torch.equal(out.loss, runs[0][0].loss)
        assert torch.equal(grads["logits"], runs[0][1]["logits"])
    default = dapo_loss(**case.leaves, **case.tensors("target_ids", "old_logprobs", "advantages", "mask")).loss
    losses = [default, call("logits", case, "dapo")[0].loss, call("logits", case, "ppo")[0].loss, runs[0][0].loss]
    assert torch.equal(*losses[:2])
    assert len({loss.item() for loss in losses}) == 3


def test_rows_are_frozen_and_name_their_source() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OBJECTIVES["dapo"].clip_high = 9.0
    assert all(row.paper for row in OBJECTIVES.values())
