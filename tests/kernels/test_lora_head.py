"""LoRA factors of the head: the loss and gradients of weight + scale · b · a, which is never made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LORA_SCALE, Case, call_linear, linear_case, solve
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

V, H, R = 67, 12, 3
EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")
FACTORS = ("hidden", "lora_a", "lora_b")


def factors(leaves: dict[str, Tensor]) -> LoraFactors:
    return LoraFactors(leaves["lora_a"], leaves["lora_b"], LORA_SCALE)


def merged(case: Case) -> Case:
    """The dense head of the same logits."""
    leaves = {name: x for name, x in case.leaves.items() if not name.startswith("lora")}
    leaves["weight"] = leaves["weight"] + LORA_SCALE * case.leaves["lora_b"] @ case.leaves["lora_a"]
    return replace(case, leaves=leaves)


def call(case: Case, **how: Any) -> tuple[Any, dict[str, Any]]:
    how |= {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "ref_logprobs": case.ref_logprobs}
    return call_linear(linear_dapo_loss, case, "ppo", **how, **EVERYTHING.keywords())


def same_as_dense(case: Case, grads: dict[str, Any], dense: dict[str, Any]) -> None:
    """The factors' gradients from that of the dense head, dW: s·Bᵀ·dW and s·dW·Aᵀ."""
    expected = {
        "hidden": dense["hidden"],
        "weight": dense["weight"],
        "lora_a": LORA_SCALE * case.leaves["lora_b"].T @ dense["weight"],
        "lora_b": LORA_SCALE * dense["weight"] @ case.leaves["lora_a"].T,
    }
    for name, grad in expected.items():
        torch.testing.assert_close(
            grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("needs", [FACTORS, ("hidden", "weight", "bias", "lora_a", "lora_b"), ("lora_a",), ("lora_b",)])
def test_against_float64(backend: str, needs: tuple[str, ...], softcap: float | None) -> None:
    for dtype in (torch.float64, torch.float32) if backend == "torch" else (torch.float32,):
        case = linear_case(V, H, (7, 2, 12), dtype=dtype, bias=True, softcap=softcap, seed=71, rank=R)
        truth, eager = solve(case, EVERYTHING), solve(case, EVERYTHING, dtype=dtype)
        for chunk_bytes in (None, 5 * V * dtype.itemsize):
            out, grads = call(case, needs=needs, chunk_bytes=chunk_bytes)
            as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", scale=8.0)
            assert {name for name, grad in grads.items() if grad is not None} == set(needs)
            for name in needs:
                as_accurate(grads[name], truth.grads[name], eager.grads[name], what=f"{name}, {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_rounding_is_eagers_on_average(backend: str, dtype: torch.dtype) -> None:
    """Root mean square error over 8 problems, as a ratio to eager's on the same."""
    ratios: dict[str, list[float]] = {}
    for seed in range(30, 38):
        case = linear_case(V, H, (7, 2, 12), dtype=dtype, bias=True, softcap=2.0, seed=seed, rank=R)
        truth, eager = solve(case, EVERYTHING), solve(case, EVERYTHING, dtype=dtype)
        for name, grad in call(case, chunk_bytes=5 * V * 2)[1].items():
            assert grad.dtype == dtype
            mine, theirs = ((x.double() - truth.grads[name]).norm() for x in (grad, eager.grads[name]))
            ratios.setdefault(name, []).append(float((mine / theirs).log()))
    for name, logs in ratios.items():
        assert sum(logs) / len(logs) <= 0.47, f"{name}: {2.718 ** (sum(logs) / len(logs)):.2f} of eager's error"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_as_with_the_dense_head(backend: str, objective: str) -> None:
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


def test_log_probs_and_preferences(backend: str) -> None:
    case = linear_case(V, H, seed=73, rank=R)

    def run(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
        x = case.fresh()
        head = {"lora": factors(x)} if "lora_a" in x else {}
        stats = linear_token_logprobs(x["hidden"], x["weight"], case.target_ids, entropy=True, mask=case.mask, **head)
        pairs = linear_preference_loss(
            x["hidden"], x["weight"], case.target_ids, case.ref_logprobs, cu_seqlens=case.cu_seqlens, **head
        )
        (stats.logprobs.sum() + 2 * stats.entropy.sum() + 30 * pairs.loss).backward()
        return [*stats, pairs.loss], {name: leaf.grad for name, leaf in x.items()}

    (expected, dense), (got, grads) = run(merged(case)), run(case)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    same_as_dense(case, grads, dense)


def test_nothing_of_v_by_h_is_made(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen head: neither the product of the factors nor a gradient of it."""
    made: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            views = func.is_view or func._schema.is_mutable
            made.extend(tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor) and not views)
            return out

    plain = engine.linear_loss.run

    def watched(*arguments: Any) -> Any:
        with Shapes():
            return plain(*arguments)

    monkeypatch.setattr(engine.linear_loss, "run", watched)
    call_linear(linear_dapo_loss, linear_case(V, H, seed=74, rank=R), "dapo", needs=FACTORS)
    assert (R, H) in made
    assert not {(V, H), (H, V)} & set(made)


def test_a_padded_head(backend: str) -> None:
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


def test_float32_logits_main_grad_and_autocast(backend: str) -> None:
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


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_compiled(backend: str, objective: str) -> None:
    case = linear_case(V, H, seed=77, rank=R)

    def loss(hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        tokens = (case.target_ids, case.old_logprobs, case.advantages)
        how = {"objective": objective, "cu_seqlens": case.cu_seqlens}
        return linear_dapo_loss(hidden, weight, *tokens, lora=LoraFactors(a, b, LORA_SCALE), **how).loss

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = case.fresh()
        run(*leaves.values()).mul(3).backward()
        results.append([x.grad for x in leaves.values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_refusals() -> None:
    case = linear_case(V, H, seed=78, rank=R)
    a, b = case.leaves["lora_a"], case.leaves["lora_b"]
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, r"lora .*tuple", (a, b, 1.0)),
        (TypeError, r"lora\.a .*list", LoraFactors([], b)),  # type: ignore[arg-type]
        (ValueError, r"lora\.a .*H=12.*\[3, 11\]", LoraFactors(a[:, 1:], b)),
        (ValueError, r"lora\.b .*\[67, 3\].*\[67, 2\]", LoraFactors(a, b[:, 1:])),
        (ValueError, r"lora\.b .*\[67, 3\].*\[3, 67\]", LoraFactors(a, b.T)),
        (ValueError, r"lora\.scale .*nan", LoraFactors(a, b, math.nan)),
        (ValueError, r"lora\.b .*meta", LoraFactors(a, b.to("meta"))),
        (TypeError, r"lora\.a .*torch\.float32", LoraFactors(a.double(), b)),
    ]
    x = case.leaves
    for kind, message, lora in wrong:
        for call in (
            lambda lora: linear_dapo_loss(
                x["hidden"], x["weight"], case.target_ids, case.old_logprobs, case.advantages, lora=lora
            ),
            lambda lora: linear_token_logprobs(x["hidden"], x["weight"], case.target_ids, lora=lora),
        ):
            with pytest.raises(kind, match=message):
                call(lora)
