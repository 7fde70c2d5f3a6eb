"""`dapo_loss` from logits: dtypes, vocabularies, shapes of the distribution, and the in-place form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_oracle import Problem, check_metrics
from cases import Case, dtypes_of, logits_case
from closeness import EPS, as_accurate, elementwise
from oracle import Options
from torch import Tensor

from dapo_kernels import dapo_loss

DAPO = Options(clip_high=0.28)
EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")


def check(case: Case, o: Options, *, inplace: bool = False, multiple: float = 2.0, scale: float | None = None) -> None:
    """Everything `dapo_loss` returns against the oracle run in float64 and, for the bound, as eager."""
    leaf = case.leaves["logits"]
    problem = Problem(case, o, dtype=leaf.dtype)
    out, grads = problem.call("inplace" if inplace else "logits", "ppo", case, "packed", **o.keywords())
    grad, truth, eager = grads["logits"], problem.truth, problem.eager
    assert grad.dtype == leaf.dtype
    assert out.loss.shape == ()
    assert out.loss.dtype == (torch.float64 if leaf.dtype == torch.float64 else torch.float32)
    as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=2.0)
    of = {"what": "gradient", "scale": scale}
    as_accurate(grad, truth.grads["logits"], eager.grads["logits"], multiple=multiple, **of)
    elementwise(grad, truth.grads["logits"], **of)
    # 2e-6 is the bar for log-probs of up to 16; a log-prob of 300 cannot be held nearer than its own rounding.
    size = max([16.0, *truth.logprobs.abs().tolist()])
    torch.testing.assert_close(out.logprobs.double(), truth.logprobs, rtol=0, atol=2e-6 * size / 16)
    assert not out.logprobs.requires_grad
    if o.entropy_coef:
        as_accurate(out.entropy, truth.entropy, eager.entropy, what="entropy", scale=8.0)
    check_metrics(out, truth)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("o", [DAPO, EVERYTHING], ids=["dapo", "everything"])
def test_every_dtype(backend: str, o: Options, inplace: bool) -> None:
    for dtype in dtypes_of(backend):
        check(logits_case(vocab=131, lengths=(7, 2, 12), dtype=dtype, seed=21), o, inplace=inplace)


@pytest.mark.parametrize("vocab", [1, 2, 17, 2049, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_vocabularies_small_and_real(backend: str, vocab: int, dtype: torch.dtype) -> None:
    scale = 1.0 if vocab == 1 else None  # whose gradient is 0
    check(
        logits_case(vocab=vocab, lengths=(3, 4), dtype=dtype, seed=vocab),
        EVERYTHING,
        inplace=vocab % 2 > 0,
        scale=scale,
    )


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 10.0, 40.0])
@pytest.mark.parametrize("vocab", [19, 4099])
def test_flat_and_peaked_logits(backend: str, sharpness: float, vocab: int) -> None:
    """From uniform (entropy log V) to one token with all the mass (entropy 0, gradient by cancellation)."""
    case = logits_case(vocab=vocab, lengths=(6, 5), sharpness=sharpness, seed=3)
    # With probability near 1 the gradient is a difference of numbers at the scale of w = A/tokens.
    scale = float(case.advantages.abs().max() / case.mask.sum())
    check(case, Options(clip_high=0.28, entropy_coef=0.05), scale=scale)


def test_in_place_or_not_gives_the_same_numbers_and_only_in_place_changes_the_logits(backend: str) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=257, dtype=dtype, seed=13)
        found = []
        for inplace in (False, True):
            leaf = case.fresh()["logits"]
            out = dapo_loss(leaf, case.target_ids, case.old_logprobs, case.advantages, inplace_backward=inplace)
            out.loss.backward()
            found.append((out, leaf.grad, torch.equal(leaf.detach(), case.leaves["logits"])))
        (kept, grad_kept, unchanged), (over, grad_over, _) = found
        assert unchanged
        assert torch.equal(kept.logprobs, over.logprobs)
        torch.testing.assert_close(over.loss, kept.loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad_over, grad_kept, rtol=2 * EPS[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_logits_larger_than_the_caches(backend: str, dtype: torch.dtype) -> None:
    """Many megabytes of logits: dead rows are zeros to their last byte, live ones have the bits they have alone."""
    if backend != "cpp":
        pytest.skip("the size at which the C++ kernels store past the caches")
    n, vocab = 37, 640_007 if dtype == torch.bfloat16 else 320_003
    g = torch.Generator().manual_seed(21)
    logits = torch.rand(n, vocab, generator=g).to(dtype)
    target_ids, mask = torch.randint(vocab, (n,), generator=g), torch.arange(n) % 5 == 1
    given: dict[str, Any] = {"denominator": 1, "inplace_backward": True}

    def gradient(rows: slice) -> Tensor:
        leaf = logits[rows].clone().requires_grad_(True)
        out = dapo_loss(leaf, target_ids[rows], None, torch.ones(n)[rows], mask=mask[rows], **given)
        return torch.autograd.grad(out.loss, leaf)[0]

    together = gradient(slice(None))
    assert not bool(together[~mask].any())
    for row in mask.nonzero().flatten().tolist():
        assert torch.equal(together[row], gradient(slice(row, row + 1))[0])


@pytest.mark.parametrize("lengths", [(1,), (0,), (1, 1)], ids=str)
def test_batches_of_almost_nothing(backend: str, lengths: tuple[int, ...]) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=11, lengths=lengths, dtype=dtype, seed=15, dead=0.0)
        for inplace in (False, True):
            check(case, EVERYTHING, inplace=inplace, scale=1.0)
