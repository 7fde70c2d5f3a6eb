"""What follows from the fields of a head; and LoRA factors: the loss of weight + scale · b · a, which is never made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LORA_SCALE, Case, call_linear, dtypes_of, linear_case, solve
from closeness import as_accurate
from oracle import Options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapo_kernels import (
    OBJECTIVES,
    LoraFactors,
    linear_dapo_loss,
    linear_preference_loss,
    linear_token_logprobs,
)
from dapo_kernels.engine import hidden as engine
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Head, HeadOptions, Needs, Plan, RowRequest, Tokens
from dapo_kernels.sharding import _describe

V, H, R = 67, 12, 3
EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")
FACTORS = ("hidden", "lora_a", "lora_b")


def test_what_ranks_must_have_alike() -> None:
    """Everything but a rank's own rows and what is noted as its own."""
    rows, r = torch.randn(5, 4), 2
    head = Head(rows, rows, rows[:, 0], 30.0, False, rows[:r], rows[:, :r], 1.0)
    plan = Plan(8, False, rows, "cpp", 5)
    changed: list[Head | Plan] = [head._replace(**{name: None}) for name in Head._fields]
    changed += [head._replace(hidden=rows.double()), head._replace(lora_b=rows[:, :1]), head._replace(softcap=20.0)]
    changed += [plan._replace(**{name: None}) for name in ("chunk_bytes", "host_sync", "backend", "valid")]
    for other in changed:
        assert _describe(other) != _describe(head if isinstance(other, Head) else plan)
    fewer = {name: getattr(head, name)[:3] for name in ("hidden", "weight", "bias", "lora_b")}
    assert _describe(head._replace(**fewer)) == _describe(head)
    own = plan._replace(main_grad=None, group="tp", columns=torch.ones(2), partial_hidden=True)
    assert _describe(own) == _describe(plan)


def test_fields_are_read_by_name_and_padding_is_cut_off_what_lies_by_vocabulary() -> None:
    rows = torch.randn(5, 4)
    cut = Head(rows, rows, rows[:, 0], None, False, rows, rows, 1.0).first(3)
    lengths = {name: len(x) for name, x in cut._asdict().items() if isinstance(x, Tensor)}
    assert lengths == {"hidden": 5, "lora_a": 5, "weight": 3, "bias": 3, "lora_b": 3}
    flags = [name == "lora_b" for name in Head._fields]
    assert Needs.of([*flags, True]) == Needs(False, False, False, lora_b=True)


@pytest.mark.parametrize("name", HeadOptions.__annotations__)
def test_every_option_is_checked(name: str) -> None:
    case = linear_case(11, 4, seed=1)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    with pytest.raises((TypeError, ValueError), match=f"linear_dapo_loss: .*{name}"):
        linear_dapo_loss(case.leaves["hidden"], case.leaves["weight"], *tokens, **{name: "x"})  # type: ignore[misc]


# --- LoRA factors -----------------------------------------------------------------------------------------


def merged(case: Case) -> Case:
    """The dense head of the same logits."""
    leaves = {name: x for name, x in case.leaves.items() if not name.startswith("lora")}
    leaves["weight"] = leaves["weight"] + LORA_SCALE * case.leaves["lora_b"] @ case.leaves["lora_a"]
    return replace(case, leaves=leaves)


def same_as_dense(case: Case, grads: dict[str, Any], dense: dict[str, Any]) -> None:
    """The factors' gradients from that of the dense head, dW: s·Bᵀ·dW and s·dW·Aᵀ."""
    expected = {
        "hidden": dense["hidden"],
        "weight": dense["weight"],
        "lora_a": LORA_SCALE * case.leaves["lora_b"].T @ dense["weight"],
        "lora_b": LORA_SCALE * dense["weight"] @ case.leaves["lora_a"].T,
    }
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def with_everything(case: Case, **how: Any) -> tuple[Any, dict[str, Any]]:
    how |= {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "ref_logprobs": case.ref_logprobs}
    return call_linear(linear_dapo_loss, case, "ppo", **how, **EVERYTHING.keywords())


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("needs", [FACTORS, ("hidden", "weight", "bias", "lora_a", "lora_b"), ("lora_a",), ("lora_b",)])
def test_factors_against_float64(backend: str, needs: tuple[str, ...], softcap: float | None) -> None:
    for dtype in dtypes_of(backend)[:-2]:
        case = linear_case(V, H, (7, 2, 12), dtype=dtype, bias=True, softcap=softcap, seed=71, rank=R)
        truth, eager = solve(case, EVERYTHING), solve(case, EVERYTHING, dtype=dtype)
        for chunk_bytes in (None, 5 * V * dtype.itemsize):
            out, grads = with_everything(case, needs=needs, chunk_bytes=chunk_bytes)
            as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", scale=8.0)
            assert {name for name, grad in grads.items() if grad is not None} == set(needs)
            for name in needs:
                as_accurate(grads[name], truth.grads[name], eager.grads[name], what=f"{name}, {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_rounding_of_factors_is_eagers_on_average(backend: str, dtype: torch.dtype) -> None:
    """Root mean square error over five problems, as a ratio to eager's on the same."""
    ratios: dict[str, list[float]] = {}
    for seed in range(30, 35):
        case = linear_case(V, H, (7, 2, 12), dtype=dtype, bias=True, softcap=2.0, seed=seed, rank=R)
        truth, eager = solve(case, EVERYTHING), solve(case, EVERYTHING, dtype=dtype)
        for name, grad in with_everything(case, chunk_bytes=5 * V * 2)[1].items():
            assert grad.dtype == dtype
            mine, theirs = ((x.double() - truth.grads[name]).norm() for x in (grad, eager.grads[name]))
            ratios.setdefault(name, []).append(float((mine / theirs).log()))
    for name, logs in ratios.items():
        assert sum(logs) / len(logs) <= 0.47, f"{name}: {math.exp(sum(logs) / len(logs)):.2f} of eager's error"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_as_with_the_dense_head(objective: str) -> None:
    case = linear_case(V, H, seed=72, rank=R)
    given: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "temperature": 0.8}
    if OBJECTIVES[objective].needs_reference:
        given["ref_logprobs"] = case.ref_logprobs
    if OBJECTIVES[objective].aggregate == "seq-mean-token-sum-norm":
        given["length_norm"] = 9
    dice = torch.Generator()
    whole, dense = call_linear(linear_dapo_loss, merged(case), objective, generator=dice.manual_seed(1), **given)
    out, grads = call_linear(linear_dapo_loss, case, objective, generator=dice.manual_seed(1), **given)
    torch.testing.assert_close(out.loss, whole.loss, rtol=1e-5, atol=1e-6)
    same_as_dense(case, grads, dense)


def test_log_probs_and_preferences_of_factors() -> None:
    case = linear_case(V, H, seed=73, rank=R)

    def run(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
        x = case.fresh()
        head = {"lora": LoraFactors(x["lora_a"], x["lora_b"], LORA_SCALE)} if "lora_a" in x else {}
        given: Any = (x["hidden"], x["weight"], case.target_ids)
        stats = linear_token_logprobs(*given, entropy=True, mask=case.mask, **head)
        pairs = linear_preference_loss(*given, case.ref_logprobs, cu_seqlens=case.cu_seqlens, **head)
        (stats.logprobs.sum() + 2 * stats.entropy.sum() + 30 * pairs.loss).backward()
        return [*stats, pairs.loss], {name: leaf.grad for name, leaf in x.items()}

    (expected, dense), (got, grads) = run(merged(case)), run(case)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    same_as_dense(case, grads, dense)


def test_nothing_of_v_by_h_is_made() -> None:
    """With a frozen head: neither the product of the factors nor a gradient of it."""
    made: set[tuple[int, ...]] = set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not func.is_view and not func._schema.is_mutable:
                made.update(tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    case = linear_case(V, H, seed=74, rank=R)
    x = case.leaves
    head = Head(x["hidden"], x["weight"], lora_a=x["lora_a"], lora_b=x["lora_b"], lora_scale=LORA_SCALE)
    tokens = Tokens(case.mask, case.mask.float(), case.advantages, case.old_logprobs, None, None)
    request, scalars = RowRequest(case.target_ids, case.mask, 1.0, None, False), ObjectiveScalars.of(OBJECTIVES["dapo"])
    needs, plan = Needs(True, False, False, True, True), Plan(None, None, None, "torch")
    with torch.no_grad(), Shapes():
        engine.linear_loss.run(head, request, tokens, scalars, needs, plan)
    assert (R, H) in made
    assert not {(V, H), (H, V)} & made


def test_factors_of_a_padded_head() -> None:
    case = linear_case(V, H, bias=True, seed=75, rank=R)
    leaves = dict(case.leaves)
    for name in ("weight", "bias", "lora_b"):
        x = leaves[name]
        leaves[name] = torch.cat([x, torch.full((5, *x.shape[1:]), math.nan)])
    _, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    _, grads = call_linear(linear_dapo_loss, replace(case, leaves=leaves), "dapo", mask=case.mask, valid_vocab=V)
    for name, grad in expected.items():
        got = grads[name]
        assert got is not None
        assert grad is not None
        torch.testing.assert_close(got[: len(grad)], grad, rtol=1e-5, atol=1e-6)
        assert not got[len(grad) :].any()


def test_factors_with_float32_logits_main_grad_and_autocast(backend: str) -> None:
    case = linear_case(V, H, dtype=torch.bfloat16, seed=76, rank=R)
    wide = replace(case, leaves={name: x.float() for name, x in case.leaves.items()})
    truth = solve(wide, Options(), use_mask=False)
    # What is left of rounding is that of h · aᵀ, three entries of 2⁻⁹.
    out, _ = call_linear(linear_dapo_loss, case, "ppo", float32_logits=True)
    torch.testing.assert_close(out.logprobs.double(), truth.logprobs, rtol=0, atol=0.05)
    rounded, grads = call_linear(linear_dapo_loss, case, "ppo")
    assert (out.logprobs - truth.logprobs).square().mean() < (rounded.logprobs - truth.logprobs).square().mean()
    main_grad = torch.zeros(V, H)
    _, others = call_linear(linear_dapo_loss, case, "ppo", main_grad=main_grad)
    assert others["weight"] is None
    torch.testing.assert_close(main_grad, grads["weight"].float(), rtol=2e-2, atol=1e-3)  # type: ignore[union-attr]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = call_linear(linear_dapo_loss, wide, "ppo")
    assert torch.equal(cast.logprobs, rounded.logprobs)


A, B = torch.zeros(R, H), torch.zeros(V, R)


@pytest.mark.parametrize(
    ("kind", "named", "lora"),
    [
        (TypeError, r"lora .*tuple", (A, B, 1.0)),
        (TypeError, r"lora\.a .*list", LoraFactors([], B)),  # type: ignore[arg-type]
        (ValueError, r"lora\.a .*H=12.*\[3, 11\]", LoraFactors(A[:, 1:], B)),
        (ValueError, r"lora\.b .*\[67, 3\].*\[67, 2\]", LoraFactors(A, B[:, 1:])),
        (ValueError, r"lora\.b .*\[67, 3\].*\[3, 67\]", LoraFactors(A, B.T)),
        (ValueError, r"lora\.scale .*nan", LoraFactors(A, B, math.nan)),
        (ValueError, r"lora\.b .*meta", LoraFactors(A, B.to("meta"))),
        (TypeError, r"lora\.a .*torch\.float32", LoraFactors(A.double(), B)),
    ],
)
def test_factors_that_do_not_fit(kind: type[Exception], named: str, lora: Any) -> None:
    case = linear_case(V, H, seed=78)
    given: Any = (case.leaves["hidden"], case.leaves["weight"], case.target_ids)
    with pytest.raises(kind, match=named):
        linear_dapo_loss(*given, case.old_logprobs, case.advantages, lora=lora)
    with pytest.raises(kind, match=named):
        linear_token_logprobs(*given, lora=lora)
