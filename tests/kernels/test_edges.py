"""Rows at the extremes: impossible and banned targets, NaN, loss scales; sizes beyond caches and 2^31."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import LOW_PRECISION, dtypes_of, linear_case, logits_case, solve
from closeness import as_accurate, elementwise
from entries import call
from oracle import Options
from torch import Tensor

from dapo_kernels import OBJECTIVES, dapo_loss, token_logprobs


@pytest.mark.parametrize("vocab", [257, 50257])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_accuracy_bar(backend: str, vocab: int, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded logits: 2e-6 absolute for log-probs down to about -16."""
    g = torch.Generator().manual_seed(vocab)
    for sharpness in (0.3, 2.0, 20.0):
        logits = (torch.randn(8, vocab, generator=g) * sharpness).to(dtype)
        ids = torch.randint(vocab, (8,), generator=g)
        rows = [logits.to(to, copy=True).requires_grad_() for to in (torch.float64, torch.float32)]
        truth, eager = (torch.log_softmax(x, -1) for x in rows)
        h, eager_h = (-(x.exp() * x).sum(-1) for x in (truth, eager))
        picked = truth.gather(1, ids[:, None])[:, 0]
        for entropy in (False, True):
            leaf = logits.clone().requires_grad_()
            stats = token_logprobs(leaf, ids, entropy=entropy)
            bar = 2e-6 * max(1.0, float(picked.abs().max()) / 16)
            assert float((stats.logprobs.double() - picked).abs().max()) <= bar
        as_accurate(stats.entropy, h, eager_h, what="entropy", scale=math.log(vocab))
        (picked.sum() + h.sum()).backward()
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
        elementwise(leaf.grad, rows[0].grad, what="gradient", scale=1.0)


def test_only_in_place_changes_the_logits(backend: str) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=257, dtype=dtype, seed=13)
        leaf = case.fresh()["logits"]
        dapo_loss(leaf, case.target_ids, case.old_logprobs, case.advantages).loss.backward()
        assert torch.equal(leaf.detach(), case.leaves["logits"])


@pytest.mark.parametrize("inplace", [True, False], ids=["in_place", "new_gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_logits_larger_than_the_caches(backend: str, dtype: torch.dtype, inplace: bool) -> None:
    """Many megabytes of logits: dead rows are zeros to their last byte, live ones have the bits they have alone."""
    if backend != "cpp":
        pytest.skip("the size at which the C++ kernels store past the caches")
    n, vocab = 37, 640_007 if dtype == torch.bfloat16 else 320_003
    g = torch.Generator().manual_seed(21)
    logits = torch.rand(n, vocab, generator=g).to(dtype)
    target_ids, mask = torch.randint(vocab, (n,), generator=g), torch.arange(n) % 5 == 1
    given: dict[str, Any] = {"denominator": 1, "inplace_backward": inplace}

    def gradient(rows: slice) -> Tensor:
        leaf = logits[rows].clone().requires_grad_(True)
        out = dapo_loss(leaf, target_ids[rows], None, torch.ones(n)[rows], mask=mask[rows], **given)
        return torch.autograd.grad(out.loss, leaf)[0]

    together = gradient(slice(None))
    assert not bool(together[~mask].any())
    for row in mask.nonzero().flatten().tolist():
        assert torch.equal(together[row], gradient(slice(row, row + 1))[0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_impossible_target(backend: str, advantage: float) -> None:
    """log-prob -inf: ratio 0, so A > 0 loses nothing and A < 0 is clipped low; counted, and no NaN anywhere."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, lengths=(4,), dtype=dtype, seed=82, dead=0.0)
        case.leaves["logits"][2, int(case.target_ids[2])] = -math.inf
        case.old_logprobs, case.advantages = torch.full((4,), -3.0), torch.full((4,), advantage)
        clip = {"clip_low": 0.2, "clip_high": 9.0}
        out, grads = call("logits", case, "ppo", **clip)
        assert out.logprobs[2] == -math.inf
        assert float(out.metrics["nonfinite"]) == 1
        assert bool(torch.isfinite(grads["logits"]).all())
        assert not grads["logits"][2].any()
        assert out.loss.item() == pytest.approx(solve(case, Options(**clip)).loss.item(), rel=1e-4, abs=1e-6)
        stats = token_logprobs(case.leaves["logits"], case.target_ids, entropy=True)
        assert bool(torch.isfinite(stats.entropy).all())
    for name, row in OBJECTIVES.items():
        if row.kl_coef == 0:  # a KL estimate would be infinite
            for on_policy in (False, name != "spo"):
                how = {"length_norm": 9.0} if name == "dr_grpo" else {}
                out, grads = call("logits", case, name, on_policy=on_policy, **how)
                assert not bool(out.loss.isnan())
                assert bool(torch.isfinite(grads["logits"]).all())
                # Without old log-probs the ratio is 1 by definition, not exp(-inf + inf).
                assert not on_policy or float(out.metrics["ratio"]) == 4


@pytest.mark.parametrize(
    "spoil", ["a NaN", "all -inf", "a +inf", *("advantages", "old_logprobs", "ref_logprobs", "importance_weights")]
)
@pytest.mark.parametrize("entry", ["logits", "inplace"])
def test_what_is_no_number_in_a_live_row_is_seen(backend: str, entry: str, spoil: str) -> None:
    """Loss and metrics show it, the other rows' numbers stay right. Comparisons with NaN are false: a clip written the
    other way round would quietly drop the token."""
    case = logits_case(vocab=67, lengths=(6,), seed=83, dead=0.0)
    given: dict[str, Any] = {"weighted": True, "kl_coef": 0.1, "dual_clip": 3.0}
    clean, clean_grads = call(entry, case, "ppo", ref_logprobs=case.ref_logprobs, **given)
    row = case.leaves["logits"][3]
    if spoil == "a NaN":
        row[20] = math.nan
    elif spoil == "all -inf":
        row[:] = -math.inf
    elif spoil == "a +inf":
        row[int(case.target_ids[3] + 1) % 67] = math.inf
    else:
        getattr(case, spoil)[3] = math.nan
    out, grads = call(entry, case, "ppo", ref_logprobs=case.ref_logprobs, **given)
    others = torch.tensor([0, 1, 2, 4, 5])
    assert not math.isfinite(out.loss.item()) or spoil == "a +inf"
    assert float(out.metrics["nonfinite"]) == (" " in spoil)
    assert torch.equal(out.logprobs[others], clean.logprobs[others])
    assert torch.equal(grads["logits"][others], clean_grads["logits"][others])
    if spoil == "a NaN" or " " not in spoil:
        assert math.isnan(out.loss.item())
        assert bool(grads["logits"][3].isnan().any())


@pytest.mark.parametrize("entry", ["logits", "inplace"])
def test_a_nan_of_any_bits_reaches_every_logit(backend: str, entry: str) -> None:
    """Rounding to bfloat16 by integer arithmetic turns a NaN whose bits are all ones into -0."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, lengths=(2,), dtype=dtype, seed=86, dead=0.0)
        case.advantages[1] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]
        assert bool(call(entry, case, "dapo")[1]["logits"][1].isnan().all())


@pytest.mark.parametrize("vocab", [64, 67])
def test_logits_near_the_smallest_number(backend: str, vocab: int) -> None:
    """A fill of finfo.min, which masks what cannot be sampled, in the whole row or but for one logit."""
    logits = torch.full((2, vocab), torch.finfo(torch.float32).min)
    logits[1, 5] = -2e38
    stats = token_logprobs(logits, torch.tensor([3, 5]), entropy=True)
    assert stats.logprobs.tolist() == pytest.approx([-math.log(vocab), 0.0])
    assert stats.entropy.tolist() == pytest.approx([math.log(vocab), 0.0])


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 66])
def test_nan_is_found_at_every_position(backend: str, at: int) -> None:
    """SIMD maximum instructions drop a NaN operand by position: each lane and the tail must pass it on."""
    logits = torch.zeros(1, 67)
    logits[0, at] = math.nan
    stats = token_logprobs(logits, torch.tensor([5]), entropy=True)
    assert math.isnan(float(stats.logprobs))
    assert math.isnan(float(stats.entropy))


@pytest.mark.parametrize("entry", ["logits", "inplace", "linear"])
def test_fp16_with_a_loss_scale(backend: str, entry: str) -> None:
    """A gradient stored in float16 before it is multiplied by grad_output has been rounded to zero."""
    o = Options(clip_low=0.5, clip_high=0.75)
    how: dict[str, Any] = {"denominator": 5e4, "grad_output": 65536.0}
    if entry == "linear":
        case = linear_case(257, 8, (9, 10), dtype=torch.float16, seed=87)
    else:
        case = logits_case(257, (9, 10), dtype=torch.float16, seed=86, sharpness=1.0)
    truth, eager = solve(case, o, **how), solve(case, o, dtype=torch.float16, **how)
    for chunk_bytes in ({"chunk_bytes": 3 * 257 * 2}, {}) if entry == "linear" else ({},):
        _, grads = call(entry, case, "ppo", **how, **o.keywords(), **chunk_bytes)
        for name, got in grads.items():
            as_accurate(got, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=3.0)
            assert not bool(((got == 0) & (truth.grads[name].abs() > 1e-3)).any())


@pytest.mark.parametrize("large", ["", "ratio", "advantage"])
@pytest.mark.parametrize("entry", ["inplace", "linear"])
def test_fp16_keeps_small_gradients_and_large_ones(backend: str, entry: str, large: str) -> None:
    """Before the loss scale is known: those of improbable tokens in a long response beside a short one do not
    underflow, those of a ratio of 1000 or advantages of 10,000 do not overflow.
    """
    given: dict[str, Any] = {"dtype": torch.float16, "seed": 87, "dead": 0.0}
    case = (
        linear_case(2001, 8, (1, 200), **given)
        if entry == "linear"
        else logits_case(2001, (1, 200), sharpness=0.5, **given)
    )
    if entry == "linear":
        case.leaves["weight"] *= 0.1
    o, how = Options(aggregate="seq-mean-token-mean"), {"grad_output": 8.0}
    case.advantages, case.old_logprobs = -torch.ones(201), solve(case, o).logprobs.float()
    if large == "ratio":
        case.old_logprobs[0] -= math.log(1000)  # of the heaviest token
    elif large == "advantage":
        case.advantages, how = 1e4 * case.advantages, {"grad_output": 8e-4}
    truth = solve(case, o, **how).grads
    _, grads = call(entry, case, "ppo", cu_seqlens=case.cu_seqlens, aggregate=o.aggregate, **how)
    for name, got in grads.items():
        improbable = truth[name].abs() < truth[name].abs().quantile(0.5)
        for part in (improbable, ~improbable):
            error = (got.double() - truth[name])[part].norm() / truth[name][part].norm()
            assert float(error) < (2e-3 if entry == "linear" else 5e-3), f"{name}: {float(error):.1e}"


def test_fp16_with_a_large_output_head(backend: str) -> None:
    """The gradient of the hidden states has the head's size too: here up to 4, and a ratio of 1000 among 65 tokens."""
    case = linear_case(1000, 64, (65,), dtype=torch.float16, seed=88, dead=0.0)
    case.leaves["weight"] *= 1 / float(case.leaves["weight"].std())
    case.advantages, case.old_logprobs = -torch.ones(65), solve(case, Options()).logprobs.float()
    case.old_logprobs[3] -= math.log(1000)
    truth = solve(case, Options()).grads
    _, grads = call("linear", case, "ppo", cu_seqlens=case.cu_seqlens)
    for name, got in grads.items():
        assert float((got.double() - truth[name]).norm() / truth[name].norm()) < 2e-3, name


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Row offsets need 64 bits: the last rows of a 2.2e9-element tensor equal the same rows alone."""
    n_tokens, vocab = 2**31 // 65537 + 70, 65537
    need = n_tokens * vocab * 2 * (3 if backend == "cpp" else 8)
    free = pytest.importorskip("psutil").virtual_memory().available
    if free < need:
        pytest.skip(f"needs {need >> 30} GiB of free memory, {free >> 30} GiB available")
    g = torch.Generator().manual_seed(7)
    logits = torch.zeros(n_tokens, vocab, dtype=torch.bfloat16)
    tail: Tensor = torch.randn(64, vocab, generator=g).bfloat16()
    logits[-64:] = tail
    ids, advantages = torch.randint(vocab, (n_tokens,), generator=g), torch.randn(n_tokens, generator=g)
    runs = []
    for leaf, rows in ((logits, slice(None)), (tail.clone(), slice(-64, None))):
        leaf.requires_grad_()
        given: dict[str, Any] = {"denominator": 64.0, "inplace_backward": True}
        out = dapo_loss(leaf, ids[rows], None, advantages[rows], **given)
        out.loss.backward()
        runs.append((out.logprobs, leaf.grad))
    assert torch.equal(runs[0][0][-64:], runs[1][0])
    assert torch.equal(runs[0][1][-64:], runs[1][1])
    assert float(runs[0][0][0]) == pytest.approx(-math.log(vocab), abs=2e-6)
