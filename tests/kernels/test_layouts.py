"""Packed, padded, strided, expanded, alone; one thread or two: the same rows give the same bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, call_linear, call_logits, dtypes_of, linear_case, logits_case, pad, unpad
from closeness import EPS
from entries import call
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, linear_token_logprobs, token_logprobs, use_backend

OPTIONS: dict[str, Any] = {"dual_clip": 2.0, "kl_coef": 0.1, "entropy_coef": 0.05}
LENGTHS = (5, 1, 9, 4)
PER_TOKEN = ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs")


def run(case: Case, **how: Any) -> tuple[Any, Tensor]:
    given = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "ref_logprobs": case.ref_logprobs}
    return call_logits(dapo_loss, case, "ppo", **{**given, **OPTIONS, **how})


def run_on(logits: Tensor, given: dict[str, Tensor], **how: Any) -> tuple[Any, Tensor | None]:
    """The same of logits that are no leaf, with per-token tensors by name. And the gradient, of a leaf."""
    out = dapo_loss(logits, **given, objective="ppo", **OPTIONS, **how)
    out.loss.backward()
    return out, logits.grad if logits.is_leaf else None


def padded(case: Case, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    fills = {"mask": 0.0, "target_ids": 0.0}
    given = {n: pad(getattr(case, n), case.lengths, width, fills.get(n, math.nan)) for n in PER_TOKEN}
    return pad(case.leaves["logits"], case.lengths, width, math.nan).requires_grad_(), given


def chosen(case: Case, at: Tensor, lengths: tuple[int, ...]) -> Case:
    """The case's tokens ``at``."""
    leaves = {name: x if name == "weight" else x[at] for name, x in case.leaves.items()}
    return replace(case, lengths=lengths, leaves=leaves, **{name: getattr(case, name)[at] for name in PER_TOKEN})


@pytest.mark.parametrize("vocab", [7, 23, 257, 1031])
def test_a_row_has_the_same_bits_padded_alone_and_anywhere(backend: str, vocab: int) -> None:
    """Nothing about a row depends on its neighbours, nor on where it stands: log-prob, entropy, gradient."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=vocab, lengths=LENGTHS, dtype=dtype, seed=91)
        together, grad = run(case, denominator=7.0)
        for at in (*torch.arange(7)[:, None], torch.arange(18, -1, -1), case.mask.nonzero()[:, 0]):
            out, other = run(chosen(case, at, (len(at),)), denominator=7.0)
            assert torch.equal(out.logprobs, together.logprobs[at])
            assert torch.equal(out.entropy, together.entropy[at])
            assert torch.equal(other, grad[at])
        assert dtype == torch.float64 or torch.equal(out.loss, together.loss)  # of the live rows alone
        packed, grad = run(case, aggregate="seq-mean-token-mean")
        out, padded_grad = run_on(*padded(case, 11), aggregate="seq-mean-token-mean")
        torch.testing.assert_close(out.loss, packed.loss, rtol=1e-6, atol=1e-7)
        for got, expected in ((out.logprobs, packed.logprobs), (out.entropy, packed.entropy)):
            assert torch.equal(got, pad(expected, LENGTHS, 11, 0.0))
        assert torch.equal(padded_grad, pad(grad, LENGTHS, 11, 0.0))


def test_hidden_states_give_the_same_bits_without_the_dead_ones_and_padded(backend: str) -> None:
    """Padded as hidden[:, :-1] of [B, L+1, H], without a trace of the last column; and they are left alone."""
    case = linear_case(lengths=(9, 9), seed=100, dead=0.5)
    at = case.mask.nonzero()[:, 0]
    out, grads = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    live, live_grads = call_linear(linear_dapo_loss, chosen(case, at, (len(at),)), "dapo")
    assert torch.equal(out.loss, live.loss)
    assert torch.equal(grads["hidden"][at], live_grads["hidden"])
    assert torch.equal(grads["weight"], live_grads["weight"])
    hidden = torch.cat([case.leaves["hidden"].view(2, 9, 8), torch.full((2, 1, 8), math.nan)], 1).requires_grad_()
    weight = case.leaves["weight"].clone().requires_grad_()
    ids, *others, mask = (x.view(2, 9) for x in case.tensors(*PER_TOKEN[:4]).values())
    linear_dapo_loss(hidden[:, :-1], weight, ids, *others, mask=mask).loss.backward()
    assert torch.equal(hidden.grad[:, :-1].reshape(18, 8), grads["hidden"])
    assert not hidden.grad[:, -1].any()
    assert torch.equal(weight.grad, grads["weight"])
    assert torch.equal(weight.detach(), case.leaves["weight"])
    assert torch.equal(hidden.detach()[:, :-1].reshape(18, 8), case.leaves["hidden"])
    flat = linear_token_logprobs(case.leaves["hidden"], weight, case.target_ids)
    assert torch.equal(linear_token_logprobs(hidden[:, :-1], weight, ids).logprobs.flatten(), flat.logprobs)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_padded_and_empty(backend: str, shape: tuple[int, int], inplace: bool) -> None:
    """No sequence, or sequences of no token: loss 0 and a gradient of the input's shape."""
    ids, zeros = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for aggregate in ("token-mean", "seq-mean-token-mean"):
        logits = torch.randn(*shape, 11, requires_grad=True)
        out = dapo_loss(logits, ids, zeros, zeros, aggregate=aggregate, inplace_backward=inplace)
        hidden, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
        loss = out.loss + linear_dapo_loss(hidden, weight, ids, zeros, zeros, aggregate=aggregate).loss
        loss.backward()
        assert loss.item() == 0
        assert out.logprobs.shape == shape
        for leaf in (logits, hidden, weight):
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize(("n_tokens", "vocab"), [(1, 50257), (3, 1031), (6, 4099), (64, 257)])
def test_thread_count_changes_no_bit(restore_threads: None, n_tokens: int, vocab: int) -> None:
    pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = logits_case(vocab=vocab, lengths=(n_tokens,), dtype=dtype, seed=94, dead=0.2 if n_tokens > 3 else 0.0)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with use_backend("cpp"):
                (out, grad), (over, grad_over) = run(case), run(case, inplace_backward=True)
            # In float16 the gradient in place is scaled: entries below 2⁻¹⁴ are rounded once more, by up to 2⁻²⁴.
            torch.testing.assert_close(grad_over, grad, rtol=0, atol=2**-24 if dtype == torch.float16 else 0)
            results.append((out.loss, out.logprobs, out.entropy, grad, grad_over, over.loss, over.logprobs))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("strides", ["spread", "transposed", "negated"])
@pytest.mark.parametrize("entry", ["logits", "inplace"])
def test_strided_logits(backend: str, entry: str, strides: str) -> None:
    """Columns that do not lie side by side, or with the other sign. `test_backends.py` has rows that lie apart."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, dtype=dtype, seed=95)
        given = {**OPTIONS, "ref_logprobs": case.ref_logprobs}
        (plain, grads), (out, strided) = (call(entry, case, "ppo", strides=x, **given) for x in ("dense", strides))
        torch.testing.assert_close(out.logprobs, plain.logprobs, rtol=0, atol=1e-6)
        torch.testing.assert_close(strided, grads, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_all_but_the_last_position(backend: str, inplace: bool) -> None:
    """logits[:, :-1] of a model's [B, L+1, V] output: right gradient inside, exact zeros in the last column."""
    for dtype in dtypes_of(backend):
        plain_logits, given = padded(logits_case(vocab=67, lengths=LENGTHS, dtype=dtype, seed=96), 9)
        plain, grad = run_on(plain_logits, given)
        base = torch.cat([plain_logits.detach(), torch.full((4, 1, 67), math.nan, dtype=dtype)], 1).requires_grad_()
        logits = (base * 1)[:, :-1]  # a view of something that is not a leaf, as in a real model
        out, _ = run_on(logits, given, inplace_backward=inplace)
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(base.grad[:, :-1], grad, rtol=2 * EPS[dtype], atol=1e-7)
        assert not base.grad[:, -1].any()


@pytest.mark.parametrize("kind", ["one row for all", "overlapping windows"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_rows_that_share_memory(backend: str, inplace: bool, kind: str) -> None:
    """The gradient is the sum over the rows; in place it is refused or done right."""
    buffer = torch.randn(40, generator=torch.Generator().manual_seed(5))
    tokens = (torch.tensor([1, 5, 9, 10]), torch.full((4,), -3.0), torch.tensor([1.0, -1.0, 0.5, 2.0]))
    grads = []
    for shared in (False, True):
        leaf = buffer.clone().requires_grad_()
        windows = (leaf * 1).expand(4, 40) if kind == "one row for all" else (leaf * 1).unfold(0, 11, 7)[:4]
        rows = windows if shared else windows.clone()
        try:
            dapo_loss(rows, *tokens, clip_high=9.0, inplace_backward=inplace and shared).loss.backward()
        except (ValueError, RuntimeError):
            assert inplace
            return
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


def test_strided_gradients_come_back(backend: str) -> None:
    """What autograd hands to the backward may be expanded or transposed; the kernel must not read it as flat."""
    case = logits_case(lengths=(6, 6), seed=103)
    factor = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    grads = []
    for transposed in (False, True):
        logits = case.leaves["logits"].reshape(2, 6, 31).clone().requires_grad_()
        stats = token_logprobs(logits, case.target_ids.reshape(2, 6), entropy=True)
        total = stats.logprobs.sum()
        for x in stats:
            total = total + ((x.T * factor) if transposed else (x * factor.T.contiguous())).sum()
        total.backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-6)


def test_logprobs_agree_between_entry_points(backend: str) -> None:
    """What a trainer stores as old log-probs are the bits that the loss computes, with and without entropy."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=1031, dtype=dtype, seed=101, dead=0.0)
        flat = token_logprobs(case.leaves["logits"], case.target_ids)
        assert torch.equal(flat.logprobs, run(case)[0].logprobs)
        assert torch.equal(flat.logprobs, call_logits(dapo_loss, case, "dapo")[0].logprobs)
        logits, given = padded(case, 9)
        of_padded = token_logprobs(logits.nan_to_num(), given["target_ids"]).logprobs
        assert torch.equal(unpad(of_padded, LENGTHS), flat.logprobs)
