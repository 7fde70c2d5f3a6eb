"""Float8 heads: the loss and gradients of the numbers that float8 makes of hidden states and weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, call_linear, linear_case, solve
from closeness import as_accurate
from no_device import NoWaiting
from oracle import Options
from torch import Tensor

from dapo_kernels import (
    OBJECTIVES,
    SamplingMask,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_preference_loss,
    linear_token_logprobs,
)
from dapo_kernels.backends import float8
from dapo_kernels.engine.chunks import row_stride
from dapo_kernels.engine.gradients import GradientSum
from dapo_kernels.engine.hidden import logits_of
from dapo_kernels.records import Head, Needs, Quantized

V, H = 67, 48
FLOAT8 = torch.float8_e4m3fn
EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")


def case_of(**how: Any) -> Case:
    how["temperature"] = 0.6 + torch.rand(19, generator=torch.Generator().manual_seed(0))
    return linear_case(V, H, **how)


def rounded(x: Tensor) -> Tensor:
    return float8.dequantized(float8.quantize(x), torch.float32)


def as_quantized(case: Case, **weight: Tensor) -> Case:
    """The numbers that the head computes with."""
    leaves = {name: rounded(x) if name in ("hidden", "weight") else x for name, x in case.leaves.items()}
    return replace(case, leaves={**leaves, **weight})


def stored(case: Case, scale: Tensor) -> Case:
    """Its head in float8 with the checkpoint's ``scale``: of all, or by row."""
    return replace(case, leaves={**case.leaves, "weight": (case.leaves["weight"] / scale).to(FLOAT8)})


def call(case: Case, objective: str = "ppo", **how: Any) -> tuple[Any, dict[str, Any]]:
    how = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, **how}
    if how.get("kl_coef") or OBJECTIVES[objective].needs_reference:
        how["ref_logprobs"] = case.ref_logprobs
    return call_linear(linear_dapo_loss, case, objective, **how)


def same(got: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


# --- rounding ---------------------------------------------------------------------------------------------


def test_rounding() -> None:
    x = torch.randn(200, H) * torch.logspace(-30, 30, 200)[:, None]
    x[7] = 0
    got = float8.quantize(x)
    largest = x.abs().amax(1, keepdim=True)
    torch.testing.assert_close(got.scale, (largest / 448).clamp(min=2.0**-126), rtol=1e-6, atol=0)
    assert torch.equal(got.values.float().abs().amax(1), 448.0 * x.any(1))
    # Half a step of 2⁻³, or of the smallest number, 2⁻⁹.
    error = (rounded(x) - x).abs()
    assert (error <= (2.0**-4 * x.abs()).maximum(2.0**-10 * got.scale) * 1.0001).all()
    assert (error.amax(1, keepdim=True) > 2.0**-7 * largest)[x.any(1)].all(), "and no finer"
    x[3, 4], x[5, 6] = math.nan, math.inf
    assert rounded(x).isnan().all(1).nonzero().flatten().tolist() == [3, 5]


def test_a_large_weight_is_rounded_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_TILE_BYTES", 4 * H * 10)
    x = torch.randn(V, H).bfloat16()
    for tiled, whole in zip(float8.quantized_weight(x), float8.quantize(x), strict=True):
        assert torch.equal(tiled, whole)


# --- loss and gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
def test_against_float64(backend: str, softcap: float | None) -> None:
    case = case_of(bias=True, softcap=softcap, seed=81, rank=3)
    case.leaves["hidden"] = rounded(case.leaves["hidden"])  # which the adapter takes as they are
    exact = as_quantized(case)
    truth, eager = solve(exact, EVERYTHING), solve(exact, EVERYTHING, dtype=torch.float32)
    for chunk_bytes in (None, 5 * V * 4):
        out, grads = call(case, float8=True, chunk_bytes=chunk_bytes, **EVERYTHING.keywords())
        as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", scale=8.0)
        for name, grad in truth.grads.items():
            as_accurate(grads[name], grad, eager.grads[name], what=name)


@pytest.mark.parametrize("by_row", [False, True], ids=["one_scale", "by_row"])
def test_a_head_stored_in_float8(backend: str, by_row: bool) -> None:
    """Of any scale, which need not be a power of two; nothing of it requires a gradient."""
    case = case_of(bias=True, seed=82)
    scale = case.leaves["weight"].abs().amax(1 if by_row else (0, 1), keepdim=True) / 448
    given = stored(case, scale)
    exact = as_quantized(case, weight=given.leaves["weight"].double() * scale.double())
    truth, eager = solve(exact, EVERYTHING), solve(exact, EVERYTHING, dtype=torch.float32)
    for weight_scale in (scale, scale.flatten()) if by_row else (scale, scale.flatten(), scale.squeeze()):
        how = {"weight_scale": weight_scale, "needs": ("hidden", "bias"), "chunk_bytes": 5 * V * 4}
        out, grads = call(given, **how, **EVERYTHING.keywords())
        as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", scale=8.0)
        for name in ("hidden", "bias"):
            as_accurate(grads[name], truth.grads[name], eager.grads[name], what=name)
        assert grads["weight"] is None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_as_with_those_numbers(backend: str, objective: str) -> None:
    case = case_of(seed=83)
    given: dict[str, Any] = {}
    if OBJECTIVES[objective].aggregate == "seq-mean-token-sum-norm":
        given["length_norm"] = 9
    dice = torch.Generator()
    whole, expected = call(as_quantized(case), objective, generator=dice.manual_seed(1), **given)
    out, grads = call(case, objective, float8=True, generator=dice.manual_seed(1), **given)
    torch.testing.assert_close(out.loss, whole.loss, rtol=1e-5, atol=1e-6)
    same(grads, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_rounding_of_gradients_is_eagers_on_average(backend: str, dtype: torch.dtype) -> None:
    """Root mean square error over 8 problems, as a ratio to eager's on the same numbers."""
    ratios: dict[str, list[float]] = {}
    for seed in range(30, 38):
        case = case_of(dtype=dtype, bias=True, softcap=2.0, seed=seed)
        exact = as_quantized(case)
        truth, eager = solve(exact, EVERYTHING), solve(exact, EVERYTHING, dtype=dtype)
        for name, grad in call(case, float8=True, chunk_bytes=5 * V * 2, **EVERYTHING.keywords())[1].items():
            assert grad.dtype == dtype
            mine, theirs = ((x.double() - truth.grads[name]).norm() for x in (grad, eager.grads[name]))
            ratios.setdefault(name, []).append(float((mine / theirs).log()))
    for name, logs in ratios.items():
        assert sum(logs) / len(logs) <= 0.47, f"{name}: {2.718 ** (sum(logs) / len(logs)):.2f} of eager's error"


def test_dead_tokens_and_zeros(backend: str) -> None:
    case = case_of(seed=84)
    dead, first = (~case.mask).nonzero().flatten(), int(case.mask.nonzero()[0])
    case.leaves["hidden"][first] = 0
    expected, grads = call(case, "dapo", float8=True)
    assert abs(float(expected.logprobs[first]) + math.log(V)) < 1e-6
    case.leaves["hidden"][dead[::2]], case.leaves["hidden"][dead[1::2]] = math.nan, math.inf
    out, poisoned = call(case, "dapo", float8=True)
    assert torch.equal(out.logprobs, expected.logprobs)
    for name, grad in grads.items():
        assert torch.equal(poisoned[name], grad), name
    case.leaves["hidden"][first, 0] = math.inf
    assert call(case, "dapo", float8=True)[0].logprobs[first].isnan(), "an infinite state shows itself"


def test_other_options(backend: str) -> None:
    """As with the head of those numbers."""
    case = case_of(bias=True, seed=85)
    case.target_ids = case.target_ids.clamp(max=V - 8)
    lists = SamplingMask.of_lists([[int(t), V - 1, 3] for t in case.target_ids])
    options: list[dict[str, Any]] = [{}, {"valid_vocab": V - 7}, {"sampling_mask": lists}]
    for how in options:
        whole, expected = call(as_quantized(case), "dapo", **how)
        out, grads = call(case, "dapo", float8=True, **how)
        torch.testing.assert_close(out.logprobs, whole.logprobs, rtol=1e-5, atol=1e-5)
        same(grads, expected)
        main_grad = torch.zeros(V, H)
        assert call(case, "dapo", float8=True, main_grad=main_grad, **how)[1]["weight"] is None
        same({"main_grad": main_grad}, {"main_grad": expected["weight"]})


def test_float32_logits_and_autocast(backend: str) -> None:
    case = case_of(dtype=torch.bfloat16, seed=86)
    truth = solve(as_quantized(case), Options())
    out, _ = call(case, float8=True, float32_logits=True)
    torch.testing.assert_close(out.logprobs.double(), truth.logprobs, rtol=0, atol=1e-5)
    plain, _ = call(case, float8=True)
    wide = replace(case, leaves={name: x.float() for name, x in case.leaves.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(wide, float8=True)[0].logprobs, plain.logprobs)
        given = stored(wide, torch.tensor(2.0**-6))
        assert call(given, weight_scale=torch.tensor(2.0**-6), needs=("hidden",))[0].logprobs.isfinite().all()


def test_log_probs_preferences_and_distillation(backend: str) -> None:
    case = case_of(seed=87)

    def run(case: Case, **head: Any) -> tuple[list[Tensor], dict[str, Any]]:
        x = case.fresh()
        both, ids = (x["hidden"], x["weight"]), case.target_ids
        stats = linear_token_logprobs(*both, ids, entropy=True, mask=case.mask, **head)
        pairs = linear_preference_loss(*both, ids, case.ref_logprobs, cu_seqlens=case.cu_seqlens, **head)
        teacher = (case.leaves["hidden"].flip(0), case.leaves["weight"].flip(0))
        distance = linear_distillation_loss(*both, *(rounded(x) for x in teacher), mask=case.mask, **head)
        (stats.logprobs.sum() + 2 * stats.entropy.sum() + 30 * pairs.loss + distance.loss).backward()
        return [*stats, pairs.loss, distance.loss], {name: leaf.grad for name, leaf in x.items()}

    (expected, dense), (got, grads) = run(as_quantized(case)), run(case, float8=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    same(grads, dense, atol=1e-5)


def test_compiled() -> None:
    """Rounded in the call, with four GEMMs; stored, with three."""
    case = case_of(seed=88)
    frozen = stored(case, torch.tensor(0.01)).leaves["weight"]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        tokens = (case.target_ids, case.old_logprobs, case.advantages)
        how: dict[str, Any] = {"objective": "gspo", "cu_seqlens": case.cu_seqlens, "float8": True}
        trained = linear_dapo_loss(hidden, weight, *tokens, **how).loss
        return trained + linear_dapo_loss(hidden, frozen, *tokens, weight_scale=torch.tensor(0.01)).loss

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = case.fresh()
        run(*leaves.values()).mul(3).backward()
        results.append([x.grad for x in leaves.values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# --- a GPU's call, on tensors without values --------------------------------------------------------------


@pytest.mark.parametrize("vocab", [64, 67])
def test_the_scaled_product_of_a_gpu(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    """Meta tensors have torch check layouts and sizes as of CUDA tensors."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    product = torch._scaled_mm

    def watched(*operands: Tensor, **how: Any) -> Tensor:
        calls.append((operands, how))
        out = how.pop("out")  # with it the operator has no meta kernel
        assert product(*operands, **how).shape == out.shape
        assert out.is_contiguous(), "which compute capability 8.9 takes it for"
        return out

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    hidden, weight, bias = torch.empty(9, H, **how), torch.empty(vocab, H, **how), torch.empty(vocab, **how)
    logits = torch.empty(9, row_stride(vocab), **how)[:, :vocab]
    with NoWaiting():
        head = Head(hidden, weight, bias, None, False, None, None, 1.0, *float8.quantized_weight(weight))
        logits_of(head, slice(0, 9), logits)
        total = GradientSum(head, vocab, Needs(True, True, True), 1, None, False)  # type: ignore[arg-type]
        total.add(logits, hidden, slice(0, 9))
    ((x, w, x_scale, w_scale), named), *others = calls
    assert not others
    assert x.dtype == w.dtype == FLOAT8
    assert (x.shape, x.stride()) == ((9, H), (H, 1)), "by rows"
    assert (w.shape, w.stride()) == ((H, 64), (1, H)), "by columns, of a multiple of 16"
    assert (x_scale.shape, w_scale.shape) == ((9, 1), (1, 64))
    assert named == {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    results = total.results()
    assert [tuple(g.shape) for g in results[:3] if g is not None] == [(9, H), (vocab, H), (vocab,)]


def test_what_a_gpu_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_kernels.head import _check_float8_device
    from dapo_kernels.layout import layout_of

    hidden = torch.empty(9, 24)
    layout = layout_of("linear_dapo_loss", "hidden", hidden)
    for capability, message in (((8, 0), r"compute capability 8\.9, here is .* 8\.0"), ((9, 0), "multiple of 16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, is_=capability: is_)
        with pytest.raises(ValueError, match=message):
            _check_float8_device(layout, hidden)


def test_the_emulation_is_torchs_own_product() -> None:
    """Which a CPU has in float32 for tests: not for its speed."""
    x, w = (float8.quantize(torch.randn(n, H)) for n in (9, V))
    out = torch.empty(9, V)
    float8.float8_logits(float8.dequantized(x, torch.float32), Quantized(*w), out)
    theirs = torch._scaled_mm(x.values, w.values.t(), x.scale, w.scale.t(), out_dtype=torch.float32)
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    case = case_of(seed=89)
    x, one = case.leaves, torch.tensor(1.0)
    w8 = stored(case, one).leaves["weight"]
    wide, mixed = {n: t.double() for n, t in x.items()}, {**x, "weight": x["weight"].to(torch.float8_e5m2)}
    frozen = {**x, "weight": w8}
    wrong: list[tuple[type[Exception], str, dict[str, Tensor], dict[str, Any]]] = [
        (TypeError, "float8 must be True or False", x, {"float8": 1}),
        (
            TypeError,
            r"weight_scale must be a tensor \[V, 1\] or of one number, which .* needs, got NoneType",
            frozen,
            {},
        ),
        (
            ValueError,
            r"weight_scale must be .*\[67, 1\], or one, got .*\[66\]",
            frozen,
            {"weight_scale": torch.ones(66)},
        ),
        (ValueError, "weight_scale must be floats", frozen, {"weight_scale": torch.ones(V, dtype=torch.int64)}),
        (ValueError, "weight_scale must be on cpu", frozen, {"weight_scale": one.to("meta")}),
        (ValueError, "weight_scale has no use: weight is in torch.float32", x, {"weight_scale": one}),
        (ValueError, "have no gradient", {**x, "weight": w8.clone().requires_grad_()}, {"weight_scale": one}),
        (TypeError, "weight must have the dtype of hidden, .*e5m2", mixed, {"weight_scale": one}),
        (TypeError, "takes hidden in bfloat16, float16 or float32, got torch.float64", wide, {"float8": True}),
        (ValueError, "main_grad has no use", frozen, {"weight_scale": one, "main_grad": torch.zeros(V, H)}),
    ]
    for kind, message, leaves, how in wrong:
        for function, rest in ((linear_dapo_loss, (case.old_logprobs, case.advantages)), (linear_token_logprobs, ())):
            with pytest.raises(kind, match=message):
                function(leaves["hidden"], leaves["weight"], case.target_ids, *rest, **how)  # type: ignore[operator]
