"""The rows beyond the first five, each against its paper's equation in float64 autograd (oracle_papers.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cases import Case, linear_case, logits_case
from closeness import as_accurate, elementwise
from entries import call, token_values
from oracle import Flat
from oracle_family import (
    FAMILY,
    Family,
    Rows,
    batch_selection,
    case_rows,
    covariances,
    family_solve,
    highest,
    share_down,
)
from oracle_papers import (
    cispo_paper,
    clip_cov_paper,
    dppo_paper,
    dro_paper,
    gmpo_paper,
    gspo_paper,
    gspo_token_paper,
    kl_cov_paper,
    lite_ppo_paper,
    luspo_paper,
    opsm_paper,
    sapo_paper,
    spo_paper,
    top_entropy_paper,
    two_sided_paper,
    vespo_paper,
)
from torch import Tensor

from dapo_kernels import OBJECTIVES, use_backend

LENGTHS = (6, 3, 11, 2)


# --- one paper at a time ----------------------------------------------------------------------------------


def flat_of(case: Case, rows: Rows) -> Flat:
    x = rows.inputs
    assert x.old_logprobs is not None
    return Flat(x.logprobs, x.old_logprobs, x.advantages, case.ref_logprobs.to(x.logprobs), rows.live, case.spans)


def kl_cov_of(case: Case, rows: Rows) -> Tensor:
    x = rows.inputs
    scores = covariances(x.logprobs.detach(), x.advantages, rows.live)
    return kl_cov_paper(flat_of(case, rows), highest(scores, share_down(rows.live, 2e-4)))


def top_entropy_of(case: Case, rows: Rows) -> Tensor:
    assert rows.inputs.entropy is not None
    return top_entropy_paper(flat_of(case, rows), rows.inputs.entropy.detach())


PAPERS: dict[str, Callable[[Case, Rows], Tensor]] = {
    "gspo": lambda case, rows: gspo_paper(flat_of(case, rows)),
    "gspo_token": lambda case, rows: gspo_token_paper(flat_of(case, rows)),
    "cispo": lambda case, rows: cispo_paper(flat_of(case, rows)),
    "lite_ppo": lambda case, rows: lite_ppo_paper(flat_of(case, rows)),
    "sapo": lambda case, rows: sapo_paper(flat_of(case, rows)),
    "kl_cov": kl_cov_of,
    "top_entropy": top_entropy_of,
    "spo": lambda case, rows: spo_paper(flat_of(case, rows)),
    "two_sided": lambda case, rows: two_sided_paper(flat_of(case, rows)),
    "gmpo": lambda case, rows: gmpo_paper(flat_of(case, rows)),
    "luspo": lambda case, rows: luspo_paper(flat_of(case, rows)),
    "vespo": lambda case, rows: vespo_paper(flat_of(case, rows)),
    "dppo_tv": lambda case, rows: dppo_paper(flat_of(case, rows), "tv", 0.2),
    "dppo_kl": lambda case, rows: dppo_paper(flat_of(case, rows), "kl", 0.05),
    "opsm": lambda case, rows: opsm_paper(flat_of(case, rows)),
    "dro": lambda case, rows: dro_paper(flat_of(case, rows)),
}
BY_SEQUENCE = ("gspo", "gmpo", "luspo", "opsm")  # one advantage for each
SEQUENCE_ADVANTAGES = torch.tensor([1.3, 0.4, -0.7, 0.9])


def paper_case(name: str, *, linear: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """Those by sequence have one advantage for each; the others one per token. One sequence has no live token."""
    mask = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(3)) > 0.25
    mask[6:9] = False
    make: Callable[..., Case] = linear_case if linear else logits_case
    case = make(37, lengths=LENGTHS, seed=31, mask=mask, dtype=dtype)
    if name in BY_SEQUENCE:
        case.advantages = SEQUENCE_ADVANTAGES.repeat_interleave(torch.tensor(LENGTHS))
    if name in ("gspo_token", "vespo"):  # ratios near the trust region, or the whole batch is clipped
        shift = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4))
        now, shift = token_values(case)[0], shift * (2e-3 if name == "gspo_token" else 0.2)
        case.old_logprobs = now + torch.where(now + shift > 0, -shift, shift)  # no log-prob is above 0
    if name == "opsm":  # the third sequence, A < 0, has become improbable
        case.old_logprobs[9:20] += 0.6
    if name.startswith("dppo"):  # probabilities that can change
        case.old_logprobs = (case.old_logprobs + 2.0).clamp(max=-0.01)
    return case


def reference(case: Case, name: str) -> dict[str, Tensor]:
    return {"ref_logprobs": case.ref_logprobs} if FAMILY[name].needs_reference else {}


def paper_checks(name: str, case: Case, entry: str, layout: str) -> None:
    solve = PAPERS[name]
    truth = family_solve(case, Family(), loss_of=lambda rows: solve(case, rows))
    eager = family_solve(case, Family(), dtype=torch.float32, loss_of=lambda rows: solve(case, rows))
    advantages = SEQUENCE_ADVANTAGES if name in BY_SEQUENCE else None
    out, grads = call(entry, case, name, layout=layout, advantages=advantages, **reference(case, name))
    as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=1.0)
    assert any(bool(g.any()) for g in grads.values())
    for key, grad in grads.items():
        as_accurate(grad, truth.grads[key], eager.grads[key], what=f"{key} gradient")
        if key == "logits":
            elementwise(grad, truth.grads[key], what=key)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", PAPERS)
def test_a_row_is_its_papers_equation(backend: str, name: str, layout: str) -> None:
    case = paper_case(name)
    for entry in ("logits", "inplace"):
        paper_checks(name, case, entry, layout)
    paper_checks(name, paper_case(name, linear=True), "linear", layout)


@pytest.mark.parametrize("name", PAPERS)
def test_the_float64_reference_is_the_papers_equation_to_rounding(name: str) -> None:
    case = paper_case(name, dtype=torch.float64)
    truth = family_solve(case, Family(), loss_of=lambda rows: PAPERS[name](case, rows))
    with use_backend("torch"):
        out, grads = call("logits", case, name, **reference(case, name))
    torch.testing.assert_close(out.loss, truth.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grads["logits"], truth.grads["logits"], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("entry", ["logits", "inplace", "linear"])
def test_clip_cov_drops_one_candidate_of_the_paper(backend: str, entry: str) -> None:
    """2e-4 of some twenty tokens is one token, drawn among those of covariance within (1, 5) that PPO does not clip."""
    make: Callable[..., Case] = linear_case if entry == "linear" else logits_case
    case = make(37, lengths=(9, 14, 7), seed=5, dead=0.2)
    o = FAMILY["clip_cov"]
    rows = case_rows(case, o, torch.float64)
    candidates = batch_selection(rows.inputs, rows.live, case.spans, o)
    assert len(candidates) >= 2
    seen = set()
    for seed in range(8):
        out, grads = call(entry, case, "clip_cov", generator=torch.Generator().manual_seed(seed))
        matches = []
        for t in candidates:
            truth, eager = (
                family_solve(case, o, dtype=d, loss_of=lambda r, t=t: clip_cov_paper(flat_of(case, r), {t}))  # type: ignore[misc]
                for d in (torch.float64, torch.float32)
            )
            if abs(out.loss.item() - truth.loss.item()) < 2e-6:
                matches.append(t)
                for key, grad in grads.items():
                    as_accurate(grad, truth.grads[key], eager.grads[key], what=key)
        assert len(matches) == 1
        seen |= set(matches)
    assert len(seen) >= 2, "eight generators drew the same token"


# The fields the papers print, and what each row must not have.
PRINTED: dict[str, dict[str, object]] = {
    "gspo": {"surrogate": "clip", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"surrogate": "clip", "ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "lite_ppo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2},
    "sapo": {"surrogate": "sapo", "sapo_tau": (1.0, 1.05)},
    "clip_cov": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "clip_cov": (2e-4, 1.0, 5.0)},
    "kl_cov": {"surrogate": "clip", "clip_high": math.inf, "kl_cov": (2e-4, 1.0)},
    "top_entropy": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.28, "top_entropy": 0.2},
    "spo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "max_old_prob": 0.9},
    "two_sided": {"surrogate": "clip", "dual_clip": 4.0, "kl_coef": 0.001},
    "gmpo": {"surrogate": "clip", "ratio": "sequence_clipped"},
    "luspo": {"surrogate": "clip", "ratio": "sequence", "clip_low": 2e-3, "clip_high": 2.5e-3},
    "vespo": {"surrogate": "reinforce", "vespo": (2.0, 3.0, 3.0, 2.0)},
    "dppo_tv": {"surrogate": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2},
    "dppo_kl": {"surrogate": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05},
    "opsm": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "off_policy_mask": 0.5},
    "dro": {"surrogate": "reinforce", "kl_coef": 0.05, "kl_estimator": "k2", "kl_to": "old"},
}
SUMS = {name: "seq-mean-token-mean" for name in ("gspo", "gspo_token", "sapo", "two_sided", "gmpo", "opsm")}
SUMS["luspo"] = "seq-mean-token-sum"
OFF = {"ratio": "token", "kl_coef": 0.0, "entropy_coef": 0.0, "dual_clip": None, "top_entropy": None}
OFF |= {"clip_cov": None, "kl_cov": None, "max_old_prob": None, "vespo": None, "off_policy_mask": None}


@pytest.mark.parametrize("name", PRINTED)
def test_a_row_has_the_papers_constants(name: str) -> None:
    row, said = OBJECTIVES[name], PRINTED[name]
    expected = {**OFF, "aggregate": SUMS.get(name, "token-mean"), **said}
    assert {field: getattr(row, field) for field in expected} == expected
    assert "arXiv" in row.paper


def test_the_table_is_complete() -> None:
    assert set(OBJECTIVES) == set(FAMILY)
