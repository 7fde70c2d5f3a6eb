"""From hidden states: rounding, which gradients there are, LoRA factors, ``main_grad``; what follows from the head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_oracle import Problem
from cases import HEAD, LOW_PRECISION, Case, call_linear, dtypes_of, linear_case, solve
from closeness import EPS, as_accurate
from oracle import Options
from torch import Tensor

from dapo_kernels import LoraFactors, linear_dapo_loss, linear_distillation_loss, linear_token_logprobs, use_backend
from dapo_kernels.records import Head, HeadOptions, Plan
from dapo_kernels.sharding import _describe

V, H, R, LENGTHS = 67, 12, 3, (7, 2, 12)
EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")
ROOMY = Options(clip_low=0.5, clip_high=0.75)  # log 0.5 = -0.69, log 1.75 = 0.56
NEEDS = [("hidden",), ("weight",), ("bias",), ("lora_a",), ("lora_b",), ("hidden", "weight"), ("weight", "bias")]
NEEDS += [("hidden", "lora_a", "lora_b"), ("hidden", *HEAD)]


def run(case: Case, o: Options, **how: Any) -> tuple[Any, dict[str, Any]]:
    given = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, **o.keywords(), **how}
    if o.needs_reference:
        given["ref_logprobs"] = case.ref_logprobs
    return call_linear(linear_dapo_loss, case, "ppo", **given)


def check(case: Case, o: Options, results: tuple[Any, dict[str, Any]], multiple: float = 2.0) -> None:
    """Log-probs and each gradient."""
    (out, grads), dtype = results, case.leaves["hidden"].dtype
    problem = Problem(case, o, dtype=dtype)
    truth, eager = problem.truth, problem.eager
    as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", multiple=multiple, scale=8.0)
    for name, grad in grads.items():
        if grad is not None:
            assert grad.dtype == dtype
            as_accurate(grad, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=multiple)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("needs", NEEDS, ids="-".join)
def test_a_gradient_only_for_what_requires_one(backend: str, needs: tuple[str, ...], softcap: float | None) -> None:
    for dtype in dtypes_of(backend)[:-2]:
        case = linear_case(V, H, LENGTHS, dtype=dtype, bias=True, softcap=softcap, seed=71, rank=R)
        for rows in (None, 5, 11):  # in one chunk, in several, in two
            chunk_bytes = rows and rows * V * dtype.itemsize
            out, grads = run(case, EVERYTHING, needs=needs, chunk_bytes=chunk_bytes)
            assert {name for name, grad in grads.items() if grad is not None} == set(needs)
            check(case, EVERYTHING, (out, grads))


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_rounding_is_eagers_on_average(backend: str, dtype: torch.dtype) -> None:
    """As a ratio to eager's, without and with factors and chunks: 1 within the noise of 5 problems each."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for seed in range(30, 40):
        of_half = {"rank": R} if seed % 2 else {}
        case = linear_case(V, H, LENGTHS, dtype=dtype, bias=True, softcap=2.0, seed=seed, **of_half)
        _, grads = run(case, EVERYTHING, chunk_bytes=5 * V * 2 if seed % 2 else None)
        problem = Problem(case, EVERYTHING, dtype=dtype)
        for name, grad in grads.items():
            assert grad.dtype == dtype
            mine, theirs = ((x.double() - problem.truth.grads[name]).norm() for x in (grad, problem.eager.grads[name]))
            ratios.setdefault((name, seed % 2), []).append(float((mine / theirs).log()))
    for of, logs in ratios.items():
        assert sum(logs) / len(logs) <= 0.47, f"{of}: {math.exp(sum(logs) / len(logs)):.2f} of eager's error"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_many_chunks_do_not_cost_accuracy(backend: str, dtype: torch.dtype) -> None:
    """The head's gradient accumulates in float32: in bfloat16, 256 chunks lose several times eager's error."""
    case = linear_case(29, 8, (256,), dtype=dtype, bias=True, seed=34, dead=0.0)
    _, grads = run(case, ROOMY, chunk_bytes=1)
    problem = Problem(case, ROOMY, dtype=dtype)
    for name in ("weight", "bias"):
        as_accurate(grads[name], problem.truth.grads[name], problem.eager.grads[name], what=name, multiple=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_head_of_more_than_one_tile(backend: str, restore_threads: None, dtype: torch.dtype) -> None:
    """Large enough (V=9001, H=128) that the head's gradient is added tile by tile and shared among threads."""
    if backend == "torch":
        pytest.skip("has neither tiles nor threads of its own")
    case = linear_case(9001, 128, (13, 11), dtype=dtype, seed=47, dead=0.2)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run(case, ROOMY, chunk_bytes=5 * 9001 * dtype.itemsize))
    # A GEMM of five rows adds 9001 products in another order than one of 24.
    check(case, ROOMY, results[0], multiple=8.0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=max(2 * EPS[dtype], 1e-5), atol=2e-7)


def test_float64_stays_float64_under_autocast() -> None:
    """As ``F.linear`` has it."""
    case = linear_case(31, 8, dtype=torch.float64, seed=4)
    args = (*case.leaves.values(), case.target_ids, case.old_logprobs, case.advantages)
    plain = linear_dapo_loss(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = linear_dapo_loss(*args)
    assert under.logprobs.dtype == torch.float64
    assert torch.equal(under.loss, plain.loss)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_autocast_does_not_convert_a_quantized_head(dtype: torch.dtype) -> None:
    """Without its scales the numbers of such a head mean nothing. ``F.linear`` refuses it, too."""
    case = linear_case(31, 8, seed=4, bias=True)
    hidden, weight, bias = case.leaves.values()
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    calls = (
        lambda: linear_dapo_loss(hidden, weight.to(dtype), *tokens),
        lambda: linear_dapo_loss(hidden, weight, *tokens, bias=bias.to(dtype)),
        lambda: linear_distillation_loss(hidden, weight, hidden, weight.to(dtype)),
    )
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=f"{dtype}: convert") as caught:
            call()
        assert "autocast" not in str(caught.value)


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_an_outlier_channel_does_not_overflow_float16(objective: str) -> None:
    """Hidden states of 70 in one channel, as language models have, over a long response: the sum before the loss is
    scaled back is a power of two larger than the gradient itself."""
    n = 65536
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 4, generator=g).half()
    hidden[:, 0] = 70.0
    weight = (0.01 * torch.randn(19, 4, generator=g)).half()
    targets, bounds = torch.randint(3, (n,), generator=g), torch.tensor([0, n], dtype=torch.int32)

    def gradients(hidden: Tensor, weight: Tensor, **how: int) -> tuple[Tensor, ...]:
        leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        advantages = torch.full((n,), 8.0)
        out = linear_dapo_loss(*leaves, targets, None, advantages, objective=objective, cu_seqlens=bounds, **how)
        return torch.autograd.grad(out.loss, leaves)

    with use_backend("torch"):
        expected = gradients(hidden.double(), weight.double())
    assert float(expected[1].abs().max()) > 100
    for chunk_bytes in (19 * 2 * n, 19 * 2 * n // 7):
        got = gradients(hidden, weight, chunk_bytes=chunk_bytes)
        assert all(x.dtype == torch.float16 for x in got)
        torch.testing.assert_close(got[1].double(), expected[1], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("objective", ["dapo", "gspo", None])
def test_main_grad_takes_the_weights_gradient(backend: str, objective: str | None) -> None:
    """Of a loss, and of log-probs (None)."""
    for dtype in LOW_PRECISION:
        case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=True, seed=31)
        loss: dict[str, Any] = {"objective": objective, "mask": case.mask, "cu_seqlens": case.cu_seqlens}
        for chunk_bytes in (None, 5 * 67 * 2):
            plain, other, main_grad = case.fresh(), case.fresh(), torch.full((67, 12), 0.5)
            for x, extra in ((plain, {}), (other, {"main_grad": main_grad})):
                given = {"target_ids": case.target_ids, "chunk_bytes": chunk_bytes, **x, **extra}
                if objective is None:
                    stats = linear_token_logprobs(**given, entropy=True)
                    (stats.logprobs.sum() + stats.entropy.sum()).backward()
                else:
                    per_token = case.tensors("old_logprobs", "advantages")
                    (3 * linear_dapo_loss(**given, **per_token, **loss).loss).backward()
            assert other["weight"].grad is None
            assert torch.equal(other["hidden"].grad, plain["hidden"].grad)
            expected, rounding = plain["weight"].grad.float(), max(2 * EPS[dtype], 1e-6)
            atol = rounding * float(expected.abs().max())
            torch.testing.assert_close(main_grad - 0.5, expected, rtol=rounding, atol=atol)


# --- the fields of a head -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", HeadOptions.__annotations__)
def test_every_option_is_checked(name: str) -> None:
    case = linear_case(11, 4, seed=1)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    with pytest.raises((TypeError, ValueError), match=f"linear_dapo_loss: .*{name}"):
        linear_dapo_loss(case.leaves["hidden"], case.leaves["weight"], *tokens, **{name: "x"})


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
    torch.testing.assert_close(main_grad, grads["weight"].float(), rtol=2e-2, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = call_linear(linear_dapo_loss, wide, "ppo")
    assert torch.equal(cast.logprobs, rounded.logprobs)


A, B = torch.zeros(R, H), torch.zeros(V, R)


@pytest.mark.parametrize(
    ("kind", "named", "lora"),
    [
        (TypeError, r"lora .*tuple", (A, B, 1.0)),
        (TypeError, r"lora\.a .*list", LoraFactors([], B)),
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
