"""Every row with every option, at every entry point and layout, against the longhand oracle."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case
from closeness import as_accurate
from entries import LOGITS_ENTRIES, call, token_values
from oracle import TokenInputs
from oracle_family import (
    FAMILY,
    Family,
    batch_selection,
    case_rows,
    family_loss,
    family_solve,
    selection_mask,
    share_down,
)
from test_family_papers import LENGTHS, paper_case
from torch import Tensor

from dapo_kernels import policy_loss, use_backend

UNLIKE = [name for name in FAMILY if name not in ("lite_ppo", "two_sided", "luspo")]  # those differ by numbers
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


# --- every option -----------------------------------------------------------------------------------------

# Shares that pick several tokens of a small batch, and clip ranges that some sequences keep.
WIDE: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov": (0.2, 0.05, 3.0)},
    "kl_cov": {"kl_cov": (0.25, 0.7)},
    "top_entropy": {"top_entropy": 0.4},
    "spo": {"max_old_prob": 0.4},
    "gspo": {"clip_low": 0.05, "clip_high": 0.3},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.3},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.3},
    "luspo": {"clip_low": 0.05, "clip_high": 0.3},
    "vespo": {"vespo": (0.5, 0.1, 0.3, 0.2)},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.03, "dual_clip": 2.0},
    "dppo_kl": {"clip_low": 0.01, "clip_high": 0.02, "dual_clip": 2.0},
    "opsm": {"off_policy_mask": 0.05},
}


def options(name: str, **changes: Any) -> tuple[Family, dict[str, Any]]:
    """A row with wide shares and the changes: for the oracle, and as keywords of the call."""
    norm = {"length_norm": 12.0} if changes.get("aggregate", FAMILY[name].aggregate).endswith("norm") else {}
    plain = {"length_norm": None} if not norm else {}
    said = {**WIDE.get(name, {}), **norm, **changes}
    return dataclasses.replace(FAMILY[name], **plain, **said), {**plain, **said}


def policy_solve(case: Case, o: Family, dtype: torch.dtype, selected: set[int], weighted: bool, **kw: Any) -> Any:
    """The oracle from log-probs and entropies as leaves."""
    logprobs, entropy = (x.to(dtype, copy=True).requires_grad_() for x in token_values(case))
    x = TokenInputs(
        logprobs,
        case.advantages.to(dtype),
        case.old_logprobs.to(dtype),
        case.ref_logprobs.to(dtype) if o.kl_coef else None,
        case.importance_weights.to(dtype) if weighted else None,
        entropy,
    )
    loss, metrics = family_loss(x, case.mask.tolist(), case.spans, o, kw.get("denominator"), selected)
    loss.backward()
    grads = {"logprobs": logprobs.grad, "entropy": entropy.grad}
    return loss.detach(), {k: torch.zeros_like(logprobs) if g is None else g for k, g in grads.items()}, metrics


def check(entry: str, case: Case, name: str, *, layout: str = "packed", weighted: bool = False, **changes: Any) -> None:
    """One call against the oracle: loss, every gradient, every metric. A random selection is handed in."""
    denominator = changes.pop("denominator", None)
    o, keywords = options(name, **changes)
    rows = case_rows(case, o, torch.float64)
    picked = batch_selection(rows.inputs, rows.live, case.spans, o)
    extra: dict[str, Any] = {"ref_logprobs": case.ref_logprobs} if o.needs_reference else {}
    if o.clip_cov is not None:
        picked = set(sorted(picked)[: share_down(rows.live, o.clip_cov[0])])
        assert picked
        extra["selection"] = selection_mask(case, picked)
    if entry == "policy" and (o.entropy_coef or o.top_entropy):
        extra["with_entropy"] = True
    out, grads = call(entry, case, name, layout=layout, weighted=weighted, denominator=denominator, **extra, **keywords)
    if entry == "policy":
        truth, truth_grads, metrics = policy_solve(case, o, torch.float64, picked, weighted, denominator=denominator)
        eager, eager_grads, _ = policy_solve(case, o, torch.float32, picked, weighted, denominator=denominator)
    else:
        kw: dict[str, Any] = {"selected": picked, "weighted": weighted, "denominator": denominator}
        exact, near = family_solve(case, o, **kw), family_solve(case, o, dtype=torch.float32, **kw)
        truth, truth_grads, metrics = exact.loss, exact.grads, exact.metrics
        eager, eager_grads = near.loss, near.grads
    as_accurate(out.loss, truth, eager, what=f"{entry} loss", scale=max(1.0, abs(float(truth))))
    for key, grad in grads.items():
        as_accurate(grad, truth_grads[key], eager_grads[key], what=f"{entry} {key} gradient", multiple=3.0)
    for key, value in metrics.items():
        if key == "entropy" and out.entropy is None:
            continue
        assert float(out.metrics[key]) == pytest.approx(value, rel=1e-5, abs=5e-5), key


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", UNLIKE)
def test_a_row_with_kl_entropy_weights_and_each_aggregate(backend: str, name: str, aggregate: str) -> None:
    """All entry points; the layout alternates with the aggregate so that each row sees both."""
    changes = {"aggregate": aggregate, "kl_coef": 0.1, "entropy_coef": 0.05}
    layout = ("packed", "padded")[AGGREGATES.index(aggregate) % 2]
    case = logits_case(29, lengths=(5, 1, 9, 4), seed=41)
    for entry in LOGITS_ENTRIES:
        check(entry, case, name, layout=layout, weighted=True, **changes)
    check("linear", linear_case(29, lengths=(5, 1, 9, 4), seed=45), name, layout=layout, weighted=True, **changes)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", UNLIKE)
def test_a_row_alone(backend: str, name: str, layout: str) -> None:
    """Without KL, entropy and weights other branches of the kernels run; a denominator replaces the count."""
    case = logits_case(29, lengths=(5, 1, 9, 4), seed=43, temperature=0.7)
    for entry in LOGITS_ENTRIES:
        check(entry, case, name, layout=layout, kl_coef=0.0, denominator=6.5)
    check("linear", linear_case(29, lengths=(5, 1, 9, 4), seed=44, bias=True), name, layout=layout, kl_coef=0.0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gspo", {"dual_clip": 1.1}),
        ("gspo_token", {"dual_clip": 1.1}),
        ("gspo", {"top_entropy": 0.5}),
        ("gspo", {"clip_cov": (0.2, -2.0, 3.0)}),
        ("gspo_token", {"kl_cov": (0.3, 0.5)}),
        ("gspo", {"max_old_prob": 0.4}),
        ("cispo", {"top_entropy": 0.5}),
        ("cispo", {"clip_low": 0.2, "clip_high": 0.3, "clip_cov": (0.2, -2.0, 3.0)}),
        ("cispo", {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.1}),
        ("cispo", {"kl_coef": 0.2, "kl_through_ratio": True}),
        ("sapo", {"ratio": "sequence"}),
        ("sapo", {"ratio": "sequence_token"}),
        ("sapo", {"kl_cov": (0.3, 0.5), "sapo_tau": (2.0, 0.5)}),
        ("sapo", {"kl_coef": 0.2, "kl_through_ratio": True}),
        ("kl_cov", {"max_old_prob": 0.4, "kl_coef": 0.2, "kl_estimator": "k2"}),
        ("top_entropy", {"max_old_prob": 0.4, "entropy_coef": 0.1, "kl_coef": 0.2}),
        ("reinforce", {"top_entropy": 0.5}),
        ("spo", {"kl_coef": 0.2, "kl_through_ratio": True, "entropy_coef": 0.1}),
        ("ppo", {"kl_coef": 0.2, "kl_to": "old", "kl_through_ratio": True}),
        ("gmpo", {"clip_cov": (0.2, -2.0, 3.0)}),
        ("gmpo", {"off_policy_mask": 0.05, "kl_coef": 0.2, "kl_to": "old"}),
        ("dppo_tv", {"top_entropy": 0.5, "vespo": (0.5, 0.1, 0.3, 0.2)}),
        ("dppo_kl", {"clip_cov": (0.2, -2.0, 3.0)}),
        ("vespo", {"off_policy_mask": 0.05, "top_entropy": 0.5}),
        ("sapo", {"ratio": "sequence", "off_policy_mask": 0.05}),
    ],
    ids=lambda v: v if isinstance(v, str) else ",".join(v),
)
def test_options_of_one_row_on_another(backend: str, name: str, changes: dict[str, Any]) -> None:
    case = logits_case(29, lengths=(5, 1, 9, 4), seed=45)
    for entry in LOGITS_ENTRIES:
        check(entry, case, name, weighted=True, **changes)


@pytest.mark.parametrize("name", [n for n in FAMILY if n not in ("spo", "clip_cov")])
def test_on_policy(backend: str, name: str) -> None:
    """Without old log-probs the ratio is 1 at every level and carries its gradient."""
    case = logits_case(29, lengths=(5, 1, 9, 4), seed=46)
    o, keywords = options(name)
    kw: dict[str, Any] = {"on_policy": True}
    extra = {"ref_logprobs": case.ref_logprobs} if o.needs_reference else {}
    truth, eager = family_solve(case, o, **kw), family_solve(case, o, dtype=torch.float32, **kw)
    for entry in ("logits", "inplace"):
        out, grads = call(entry, case, name, **kw, **extra, **keywords)
        as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=1.0)
        as_accurate(grads["logits"], truth.grads["logits"], eager.grads["logits"], what="gradient", multiple=3.0)
        assert float(out.metrics["ratio_max"]) == 1.0
        assert float(out.metrics["approx_kl"]) == 0.0


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "sapo", "cispo", "kl_cov", "gmpo", "luspo", "dro"])
def test_float64_gradients_by_finite_differences(name: str) -> None:
    """Independent of both autograds; where a value is detached, an identity with a row that has none stands in."""
    case = logits_case(7, lengths=(3, 4), seed=47, dead=0.2)
    _, keywords = options(name)
    x = {k: getattr(case, k).double() for k in ("old_logprobs", "advantages")}
    start = token_values(case)[0].double()

    def loss(logprobs: Tensor) -> Tensor:
        bounds = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
        return policy_loss(logprobs, x["old_logprobs"], x["advantages"], objective=name, **bounds, **keywords).loss

    if name in ("gspo_token", "cispo"):
        # Where all ratios are 1, GSPO-token is GSPO and CISPO is REINFORCE in value and slope.
        other = "gspo" if name == "gspo_token" else "reinforce"
        x["old_logprobs"] = start.clone()
        x["advantages"] = torch.tensor([1.5, -0.5], dtype=torch.float64).repeat_interleave(torch.tensor([3, 4]))
        with use_backend("torch"):
            slopes = []
            for objective in (name, other):
                leaf = start.clone().requires_grad_()
                sums = {"aggregate": "token-mean"}
                policy_loss(
                    leaf, x["old_logprobs"], x["advantages"], objective=objective,
                    mask=case.mask, cu_seqlens=case.cu_seqlens, **sums,
                ).loss.backward()  # fmt: skip
                slopes.append(leaf.grad)
        torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=1e-15)
        return
    with use_backend("torch"):
        assert torch.autograd.gradcheck(loss, (start.requires_grad_(),), eps=1e-6, atol=1e-7)


# --- what the definitions imply ---------------------------------------------------------------------------


def grads_of(name: str, case: Case, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, grads = call("logits", case, name, **kwargs)
    return out.loss, grads["logits"]


def test_gspo_token_with_one_advantage_per_sequence_is_gspo(backend: str) -> None:
    """The paper's remark below eq. 14."""
    case = paper_case("gspo_token")
    advantages = torch.tensor([1.3, 0.4, -0.7, 0.9])
    loss, grad = grads_of("gspo", case, advantages=advantages)
    loss_token, grad_token = grads_of("gspo_token", case, advantages=advantages)
    torch.testing.assert_close(loss, loss_token, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, grad_token, rtol=1e-5, atol=1e-8)


def test_a_sequence_ratio_of_one_token_is_its_own(backend: str) -> None:
    case = logits_case(23, lengths=(1,) * 9, seed=48)
    shared = {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token-mean"}
    loss, grad = grads_of("ppo", case)
    for name in ("gspo", "gspo_token"):
        same, same_grad = grads_of(name, case, **shared)
        torch.testing.assert_close(same, loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(same_grad, grad, rtol=1e-5, atol=1e-8)


def test_a_clipped_sequence_has_no_gradient_and_an_unclipped_one_has_it_everywhere(backend: str) -> None:
    """GSPO clips whole responses; a token's own ratio has no say."""
    case = logits_case(23, lengths=(4, 4), seed=49, dead=0.0)
    now = token_values(case)[0]
    # First sequence: mean log-ratio 0.2, A > 0: clipped. Second: one wild token, mean 0.
    delta = torch.tensor([0.8, -0.4, 0.2, 0.2, 2.0, -2.0, 0.0, 0.0])
    case.old_logprobs = now - delta
    out, grads = call("logits", case, "gspo", advantages=torch.tensor([1.0, 1.0]))
    assert not grads["logits"][:4].any()
    assert bool((grads["logits"][4:].abs().amax(-1) > 0).all())
    assert float(out.metrics["clip_high"]) == 4
    assert float(out.metrics["ratio"]) == pytest.approx(4 * math.exp(0.2) + 4, rel=1e-5)
    assert float(out.metrics["ratio_max"]) == pytest.approx(math.exp(0.2), rel=1e-5)
    assert float(out.metrics["approx_kl"]) == pytest.approx(-0.8, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "same_as", "changes"),
    [
        ("top_entropy", "dapo", {"top_entropy": 1.0}),
        ("spo", "ppo", {"max_old_prob": 1.0}),
        ("kl_cov", "ppo", {"kl_cov": (0.5, 0.0), "clip_low": 0.2, "clip_high": 0.2}),
        ("clip_cov", "ppo", {"clip_cov": (0.5, 1e6, 1e7)}),
        ("lite_ppo", "ppo", {}),
    ],
)
def test_a_selection_that_changes_nothing(backend: str, name: str, same_as: str, changes: dict[str, Any]) -> None:
    case = logits_case(23, lengths=LENGTHS, seed=50)
    loss, grad = grads_of(same_as, case)
    same, same_grad = grads_of(name, case, **changes)
    torch.testing.assert_close(same, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(same_grad, grad, rtol=1e-5, atol=1e-8)


def test_unselected_tokens_still_count(backend: str) -> None:
    """Doubling the live tokens by confident ones halves the loss of top_entropy and spo."""
    case = logits_case(23, lengths=(8,), seed=51, dead=0.0)
    case.old_logprobs[4:] = -1e-3
    out, grads = call("logits", case, "spo", max_old_prob=0.9)
    alone, _ = call("logits", case, "ppo", denominator=8.0)
    keep = case.old_logprobs <= math.log(0.9)
    assert keep.tolist()[4:] == [False] * 4
    assert not grads["logits"][~keep].any()
    half = logits_case(23, lengths=(8,), seed=51, dead=0.0)
    half.old_logprobs, half.mask = case.old_logprobs, keep
    masked, masked_grads = call("logits", half, "ppo", denominator=8.0)
    torch.testing.assert_close(out.loss, masked.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grads["logits"], masked_grads["logits"], rtol=1e-6, atol=1e-9)
    assert float(out.metrics["tokens"]) == float(alone.metrics["tokens"]) == 8


@pytest.mark.parametrize("name", [n for n in FAMILY if n not in ("ppo", "lite_ppo", "dapo", "reinforce", "dr_grpo")])
def test_dead_tokens_leave_no_trace(backend: str, name: str) -> None:
    """NaN, infinities and huge numbers in everything a dead token has: the same bits as with ordinary values."""
    o, keywords = options(name, kl_coef=0.1, entropy_coef=0.05)
    case = logits_case(29, lengths=(5, 1, 9, 4), seed=52, temperature=0.9)
    generator = {"generator": torch.Generator().manual_seed(0)} if o.clip_cov else {}
    for entry in LOGITS_ENTRIES:
        entropy = {"with_entropy": True} if entry == "policy" else {}
        results = []
        for value in (None, math.nan, -math.inf, 1e38):
            dirty = dataclasses.replace(case, leaves=dict(case.leaves))
            if value is not None:
                for field in ("old_logprobs", "advantages", "ref_logprobs", "importance_weights"):
                    setattr(dirty, field, getattr(case, field).masked_fill(~case.mask, value))
                dirty.leaves["logits"] = case.leaves["logits"].masked_fill(~case.mask[:, None], value)
            if generator:
                generator["generator"].manual_seed(0)
            reference = {"ref_logprobs": dirty.ref_logprobs} if o.needs_reference else {}
            kw = {**generator, **entropy, **keywords, **reference}
            results.append(call(entry, dirty, name, weighted=True, **kw))
        (clean, clean_grads), *others = results
        for out, grads in others:
            assert torch.equal(out.loss, clean.loss), entry
            for key, grad in grads.items():
                assert torch.equal(grad, clean_grads[key]), key
            for key, metric in out.metrics.items():
                assert torch.equal(metric, clean.metrics[key]), key


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "luspo", "opsm"])
def test_sequences_in_micro_batches_add_up(backend: str, name: str) -> None:
    case = logits_case(29, lengths=LENGTHS, seed=53)
    _, keywords = options(name)
    whole, grads = call("logits", case, name, **keywords)
    total, parts = 0.0, []
    live_sequences = sum(bool(case.mask[a:b].any()) for a, b in case.spans)
    for i, (a, b) in enumerate(case.spans):
        fields = ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs", "importance_weights")
        part = dataclasses.replace(
            case,
            **{f: getattr(case, f)[a:b] for f in fields},
            lengths=(LENGTHS[i],),
            leaves={"logits": case.leaves["logits"][a:b]},
        )
        out, grad = call("logits", part, name, denominator=float(live_sequences), **keywords)
        total += out.loss.item()
        parts.append(grad["logits"])
    assert total == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat(parts), grads["logits"], rtol=1e-5, atol=1e-9)
