"""`linear_dapo_loss` from hidden states: every gradient, alone and together, whatever the chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LOW_PRECISION, Case, call_linear, dtypes_of, linear_case, logits_of, pad, solve, unpad
from closeness import EPS, as_accurate
from oracle import ROWS, Options
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, linear_token_logprobs

EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")
ROOMY = Options(clip_low=0.5, clip_high=0.75)  # log 0.5 = -0.69, log 1.75 = 0.56


def call(case: Case, o: Options, **kwargs: Any) -> tuple[Any, dict[str, Tensor | None]]:
    if o.kl_coef:
        kwargs["ref_logprobs"] = case.ref_logprobs
    return call_linear(
        linear_dapo_loss, case, "ppo", mask=case.mask, cu_seqlens=case.cu_seqlens, **{**o.keywords(), **kwargs}
    )


def check(case: Case, o: Options, out: Any, grads: dict[str, Tensor | None], **how: Any) -> None:
    """Loss and each gradient.

    With 19 tokens in half precision one rounded logit decides the error, eager's as ours: a single comparison is
    loose. `test_rounding_is_eagers_on_average` is the tight one.
    """
    dtype = case.leaves["hidden"].dtype
    multiple = 2.0 if dtype in (torch.float32, torch.float64) else 6.0
    truth, eager = solve(case, o, **how), solve(case, o, dtype=dtype, **how)
    # One scalar may come out right by luck: what a loss can be asked for is the worst log-prob's error.
    worst = float((eager.logprobs.double() - truth.logprobs).abs().sum().clamp(min=1e-6))
    size = float(case.advantages[case.mask].abs().amax()) if bool(case.mask.any()) else 1.0
    tokens = max(1, int(case.mask.sum()))
    assert abs(out.loss.item() - truth.loss.item()) <= 2 * size * worst / tokens + 1e-6
    as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", multiple=multiple, scale=8.0)
    for name, grad in grads.items():
        if grad is not None:
            assert grad.dtype == case.leaves[name].dtype
            assert grad.shape == case.leaves[name].shape
            as_accurate(grad, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=multiple)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("o", [ROOMY, EVERYTHING], ids=["clip", "everything"])
def test_every_dtype(backend: str, o: Options, softcap: float | None, bias: bool) -> None:
    for dtype in dtypes_of(backend):
        case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=bias, softcap=softcap, seed=31)
        out, grads = call(case, o)
        assert all(grads[name] is not None for name in grads)
        check(case, o, out, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
def test_rounding_is_eagers_on_average(backend: str, softcap: float | None, dtype: torch.dtype) -> None:
    """Root mean square error over 8 problems, as a ratio to eager's on the same: 1 within the noise of 8."""
    ratios: dict[str, list[float]] = {}
    for seed in range(30, 38):
        case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=True, softcap=softcap, seed=seed)
        _, grads = call(case, EVERYTHING)
        truth, eager = solve(case, EVERYTHING), solve(case, EVERYTHING, dtype=dtype)
        for name, grad in grads.items():
            assert grad is not None
            mine = (grad.double() - truth.grads[name]).square().mean()
            theirs = (eager.grads[name].double() - truth.grads[name]).square().mean()
            ratios.setdefault(name, []).append(float((mine / theirs).sqrt().log()))
    for name, logs in ratios.items():
        assert sum(logs) / len(logs) <= 0.47, f"{name}: {2.718 ** (sum(logs) / len(logs)):.2f} of eager's error"


@pytest.mark.parametrize("needs", ["hidden", "weight", "bias", "hidden weight", "weight bias", "hidden bias"])
def test_a_gradient_only_for_what_requires_one(backend: str, needs: str) -> None:
    case = linear_case(67, 12, bias=True, softcap=3.0, seed=32)
    out, grads = call(case, EVERYTHING, needs=needs.split())
    assert {name for name, grad in grads.items() if grad is not None} == set(needs.split())
    check(case, EVERYTHING, out, grads)


@pytest.mark.parametrize("chunk_bytes", [1, 67 * 4, 67 * 4 * 3 + 1, 1 << 30])
def test_chunking_changes_nothing(backend: str, chunk_bytes: int) -> None:
    """One token per chunk, a chunk size that divides nothing, and everything at once."""
    for dtype in dtypes_of(backend):
        case = linear_case(67, 12, (9, 4, 6), dtype=dtype, bias=True, seed=33)
        out, grads = call(case, EVERYTHING, chunk_bytes=chunk_bytes)
        check(case, EVERYTHING, out, grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_many_chunks_do_not_cost_accuracy(backend: str, dtype: torch.dtype) -> None:
    """The head's gradient accumulates in float32: in bfloat16, 256 chunks lose several times eager's error."""
    case = linear_case(29, 8, (256,), dtype=dtype, bias=True, seed=34, dead=0.0)
    _, grads = call(case, ROOMY, chunk_bytes=1)
    truth, eager = solve(case, ROOMY), solve(case, ROOMY, dtype=dtype)
    for name in ("weight", "bias"):
        grad = grads[name]
        assert grad is not None
        as_accurate(grad, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=1.5)


def test_a_head_of_more_than_one_tile(backend: str, restore_threads: None) -> None:
    """Large enough (V=9001, H=128) that the head's gradient is added tile by tile and shared among threads."""
    for dtype in LOW_PRECISION:
        case = linear_case(9001, 128, (13, 11), dtype=dtype, seed=47, dead=0.2)
        truth, eager = solve(case, ROOMY), solve(case, ROOMY, dtype=dtype)
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            _, grads = call(case, ROOMY, chunk_bytes=5 * 9001 * dtype.itemsize)
            for name, grad in grads.items():
                assert grad is not None
                # A GEMM of five rows adds 9001 products in another order than one of 24.
                as_accurate(grad, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=8.0)
            results.append(grads)
        for name, grad in results[0].items():
            torch.testing.assert_close(grad, results[1][name], rtol=max(2 * EPS[dtype], 1e-5), atol=2e-7)


@pytest.mark.parametrize("temperature", [0.6, "per_token"])
def test_temperature_comes_after_the_softcap(backend: str, temperature: Any) -> None:
    if temperature == "per_token":
        temperature = torch.linspace(0.4, 2.0, 19)
    case = linear_case(41, 8, bias=True, softcap=2.0, temperature=temperature, seed=35)
    out, grads = call(case, EVERYTHING)
    check(case, EVERYTHING, out, grads)


def test_equals_the_logits_level(backend: str) -> None:
    """The same numbers as materialised logits through `dapo_loss`: loss, gradient, entropy, every metric."""
    case = linear_case(41, 8, bias=True, seed=36)
    out, grads = call(case, EVERYTHING)
    leaves = case.fresh()
    flat = dapo_loss(
        logits_of(leaves, None),
        case.target_ids,
        case.old_logprobs,
        case.advantages,
        objective="ppo",
        mask=case.mask,
        cu_seqlens=case.cu_seqlens,
        ref_logprobs=case.ref_logprobs,
        **EVERYTHING.keywords(),
    )
    flat.loss.backward()
    torch.testing.assert_close(out.loss, flat.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out.logprobs, flat.logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(out.entropy, flat.entropy, rtol=0, atol=2e-6)
    assert set(out.metrics) == set(flat.metrics)
    for key, value in flat.metrics.items():
        assert float(out.metrics[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key
    for name, grad in grads.items():
        torch.testing.assert_close(grad, leaves[name].grad, rtol=1e-4, atol=1e-7)


def test_on_policy_and_importance_weights(backend: str) -> None:
    case = linear_case(41, 8, seed=37)
    o = Options(kl_coef=0.1, kl_estimator="k2")
    out, grads = call(case, o, old=None, importance_weights=case.importance_weights)
    check(case, o, out, grads, on_policy=True, weighted=True)


@pytest.mark.parametrize("factor", [0.0, -3.0, 1024.0])
def test_grad_output(backend: str, factor: float) -> None:
    case = linear_case(41, 8, bias=True, seed=38)
    _, once = call(case, ROWS["dapo"])
    _, scaled = call(case, ROWS["dapo"], grad_output=factor)
    for name, grad in once.items():
        assert grad is not None
        assert float(grad.abs().max()) > 0
        torch.testing.assert_close(scaled[name], grad * factor, rtol=1e-6, atol=0)


def test_no_graph_without_a_gradient(backend: str) -> None:
    case = linear_case(41, 8, seed=39)
    args = (case.target_ids, case.old_logprobs, case.advantages)
    constant = linear_dapo_loss(case.leaves["hidden"], case.leaves["weight"], *args, mask=case.mask)
    leaves = case.fresh()
    with torch.no_grad():
        quiet = linear_dapo_loss(leaves["hidden"], leaves["weight"], *args, mask=case.mask)
    assert not constant.loss.requires_grad
    assert not quiet.loss.requires_grad
    assert quiet.loss.item() == constant.loss.item()
    assert quiet.loss.item() == pytest.approx(float(solve(case, ROWS["dapo"]).loss), abs=1e-6)


def test_the_inputs_are_left_alone(backend: str) -> None:
    case = linear_case(41, 8, bias=True, seed=40)
    leaves = case.fresh()
    out = linear_dapo_loss(
        leaves["hidden"],
        leaves["weight"],
        case.target_ids,
        case.old_logprobs,
        case.advantages,
        bias=leaves["bias"],
        mask=case.mask,
    )
    out.loss.backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.detach(), case.leaves[name])


def test_padded_equals_packed(backend: str) -> None:
    lengths, width = (5, 1, 9, 4), 10
    case = linear_case(41, 8, lengths, seed=41)
    packed, grads = call(case, EVERYTHING)
    hidden = pad(case.leaves["hidden"], lengths, width, float("nan")).requires_grad_()
    weight = case.leaves["weight"].clone().requires_grad_()
    out = linear_dapo_loss(
        hidden,
        weight,
        pad(case.target_ids, lengths, width, -100),
        pad(case.old_logprobs, lengths, width, float("nan")),
        pad(case.advantages, lengths, width, float("nan")),
        objective="ppo",
        mask=pad(case.mask, lengths, width, 0),
        ref_logprobs=pad(case.ref_logprobs, lengths, width, float("inf")),
        **EVERYTHING.keywords(),
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss, packed.loss, rtol=1e-6, atol=1e-7)
    assert torch.equal(unpad(out.logprobs, lengths), packed.logprobs)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.equal(unpad(hidden.grad, lengths), grads["hidden"])
    assert torch.equal(weight.grad, grads["weight"])
    assert float(hidden.grad.abs().sum()) == pytest.approx(float(grads["hidden"].abs().sum()))


@pytest.mark.parametrize("which", ["no_token", "all_dead", "one_token"])
def test_smallest_batches(backend: str, which: str) -> None:
    lengths = {"no_token": (0,), "all_dead": (4, 3), "one_token": (1,)}[which]
    mask = torch.full((sum(lengths),), which == "one_token")
    for dtype in dtypes_of(backend):
        case = linear_case(41, 8, lengths, dtype=dtype, bias=True, seed=42, mask=mask)
        out, grads = call(case, EVERYTHING)
        check(case, EVERYTHING, out, grads)
        if which != "one_token":
            assert out.loss.item() == 0
            assert all(grad is not None and not grad.any() for grad in grads.values())


def test_a_vocabulary_of_one_and_a_hidden_size_of_one(backend: str) -> None:
    case = linear_case(1, 1, seed=43)
    out, grads = call(case, ROWS["dapo"])
    assert float(out.logprobs.abs().max()) <= 2e-6
    assert all(grad is not None and float(grad.abs().max()) <= 1e-6 for grad in grads.values())
    case = linear_case(5, 1, seed=43)
    check(case, ROOMY, *call(case, ROOMY))


def test_non_contiguous_inputs(backend: str) -> None:
    """A transposed head, a hidden state cut out of a wider one, sliced per-token tensors."""
    case = linear_case(41, 8, bias=True, seed=44)
    plain, grads = call(case, EVERYTHING)
    leaves = {
        "hidden": torch.cat([case.leaves["hidden"], torch.full((19, 3), float("nan"))], 1)[:, :8],
        "weight": case.leaves["weight"].T.contiguous().T,
        "bias": torch.stack([case.leaves["bias"], torch.full((41,), float("nan"))], 1)[:, 0],
    }
    assert not any(leaf.is_contiguous() for leaf in leaves.values())
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, x], 1)[:, 0]

    out = linear_dapo_loss(
        leaves["hidden"],
        leaves["weight"],
        strided(case.target_ids),
        strided(case.old_logprobs),
        strided(case.advantages),
        bias=leaves["bias"],
        objective="ppo",
        mask=strided(case.mask),
        cu_seqlens=case.cu_seqlens,
        ref_logprobs=strided(case.ref_logprobs),
        **EVERYTHING.keywords(),
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=1e-7)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, grads[name], rtol=1e-5, atol=1e-8)


def test_tied_embeddings(backend: str) -> None:
    """The head is also the embedding, as in most small models: both paths add up in one gradient."""
    case = linear_case(41, 8, seed=45)
    ids = torch.arange(19) % 41

    def gradient(fused: bool) -> Tensor:
        weight = case.leaves["weight"].clone().requires_grad_()
        hidden = torch.tanh(weight[ids])
        args = (case.target_ids, case.old_logprobs, case.advantages)
        if fused:
            loss = linear_dapo_loss(hidden, weight, *args, mask=case.mask).loss
        else:
            loss = dapo_loss(hidden @ weight.T, *args, mask=case.mask).loss
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-5, atol=1e-7)


def test_logits_gradients_reach_the_model_behind(backend: str) -> None:
    """`hidden` need not be a leaf: the gradient goes on into what made it."""
    case = linear_case(41, 8, seed=46)
    body = torch.nn.Linear(8, 8)
    grads = []
    for fused in (True, False):
        body.zero_grad()
        hidden = body(case.leaves["hidden"])
        if fused:
            out = linear_dapo_loss(hidden, case.leaves["weight"], case.target_ids, case.old_logprobs, case.advantages)
        else:
            out = dapo_loss(hidden @ case.leaves["weight"].T, case.target_ids, case.old_logprobs, case.advantages)
        out.loss.backward()
        assert body.weight.grad is not None
        grads.append(body.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


# --- a gradient tensor of the caller's ----------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_main_grad_takes_the_weights_gradient(backend: str, dtype: torch.dtype, objective: str) -> None:
    case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=True, seed=31)
    args = (case.target_ids, case.old_logprobs, case.advantages)
    said: dict[str, Any] = {"objective": objective, "mask": case.mask, "cu_seqlens": case.cu_seqlens}
    for chunk_bytes in (None, 5 * 67 * 2):
        plain, other = case.fresh(), case.fresh()
        main_grad = torch.full((67, 12), 0.5)
        for x, extra in ((plain, {}), (other, {"main_grad": main_grad})):
            out = linear_dapo_loss(
                x["hidden"], x["weight"], *args, bias=x["bias"], chunk_bytes=chunk_bytes, **said, **extra
            )
            (3 * out.loss).backward()
        assert other["weight"].grad is None
        assert torch.equal(other["hidden"].grad, plain["hidden"].grad)  # type: ignore[arg-type]
        rounding = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        expected = plain["weight"].grad.float()  # type: ignore[union-attr]
        torch.testing.assert_close(
            main_grad - 0.5, expected, rtol=rounding, atol=rounding * float(expected.abs().max())
        )


def test_many_micro_batches_keep_their_digits_in_main_grad(backend: str) -> None:
    """64 of them: in a bfloat16 ``.grad`` their sum is about 1 % off, in float32 each one's own rounding is left."""
    n, parts = 512, 64
    case = linear_case(101, 16, (n,), dtype=torch.bfloat16, seed=8, mask=torch.ones(n, dtype=torch.bool))
    x = case.fresh()
    args = (case.target_ids, case.old_logprobs, case.advantages)
    truth = torch.zeros(101, 16)  # of the whole batch at once, from the same rounded logits
    linear_dapo_loss(x["hidden"].detach(), x["weight"], *args, main_grad=truth).loss.backward()
    main_grad = torch.zeros(101, 16)
    for extra in ({"main_grad": main_grad}, {}):
        for i in range(parts):
            at = slice(i * n // parts, (i + 1) * n // parts)
            hidden, part = x["hidden"].detach()[at], [t[at] for t in args]
            linear_dapo_loss(hidden, x["weight"], *part, denominator=n, **extra).loss.backward()

    def error(gradient: Tensor) -> float:
        return float((gradient.float() - truth).norm() / truth.norm())

    assert x["weight"].grad is not None
    assert error(main_grad) < 0.3 * error(x["weight"].grad)
    assert error(main_grad) < 4e-3


def test_main_grad_from_log_probs(backend: str) -> None:
    case = linear_case(31, 8, seed=4)
    plain, other, main_grad = case.fresh(), case.fresh(), torch.zeros(31, 8)
    for x, extra in ((plain, {}), (other, {"main_grad": main_grad})):
        stats = linear_token_logprobs(x["hidden"], x["weight"], case.target_ids, entropy=True, **extra)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
    torch.testing.assert_close(main_grad, plain["weight"].grad)
    assert other["weight"].grad is None


def test_float64_stays_float64_under_autocast() -> None:
    """As ``F.linear`` has it."""
    case = linear_case(31, 8, dtype=torch.float64, seed=4)
    x = case.fresh()
    args = (x["hidden"], x["weight"], case.target_ids, case.old_logprobs, case.advantages)
    plain = linear_dapo_loss(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(x["hidden"], x["weight"]).dtype == torch.float64
        under = linear_dapo_loss(*args)
    assert under.logprobs.dtype == torch.float64
    assert torch.equal(under.loss, plain.loss)
