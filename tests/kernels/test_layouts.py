"""Packed, padded, strided, expanded, alone; one thread or two: the same rows give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, call_linear, call_logits, dtypes_of, linear_case, logits_case, pad, unpad
from closeness import EPS
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, token_logprobs

OPTIONS: dict[str, Any] = {"objective": "ppo", "dual_clip": 2.0, "kl_coef": 0.1, "entropy_coef": 0.05}
LENGTHS = (5, 1, 9, 4)


def run(case: Case, **kwargs: Any) -> tuple[Any, Tensor]:
    options = {key: value for key, value in OPTIONS.items() if key != "objective"}
    return call_logits(
        dapo_loss,
        case,
        "ppo",
        **{"mask": case.mask, "cu_seqlens": case.cu_seqlens, "ref_logprobs": case.ref_logprobs, **options, **kwargs},
    )


def padded_inputs(case: Case, width: int, *, mask: bool = True) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Per-token arguments of the padded call, positional then keyword."""
    lengths = case.lengths
    args = (
        pad(case.target_ids, lengths, width, 0),
        pad(case.old_logprobs, lengths, width, 0.0),
        pad(case.advantages, lengths, width, 0.0),
    )
    return args, {
        "mask": pad(case.mask, lengths, width, 0),
        "ref_logprobs": pad(case.ref_logprobs, lengths, width, 0.0),
        **OPTIONS,
    }


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("vocab", [23, 1031])
def test_padded_equals_packed(backend: str, vocab: int, aggregate: str) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=vocab, lengths=LENGTHS, dtype=dtype, seed=91)
        packed, grad = run(case, aggregate=aggregate)
        args, kwargs = padded_inputs(case, 11)
        logits = pad(case.leaves["logits"], LENGTHS, 11, 0.5).requires_grad_()
        out = dapo_loss(logits, *args, **kwargs, aggregate=aggregate)
        out.loss.backward()
        torch.testing.assert_close(out.loss, packed.loss, rtol=1e-6, atol=1e-7)
        assert out.logprobs.shape == out.entropy.shape == (4, 11)
        assert torch.equal(unpad(out.logprobs, LENGTHS), packed.logprobs)
        assert torch.equal(unpad(out.entropy, LENGTHS), packed.entropy)
        assert logits.grad is not None
        assert torch.equal(logits.grad, pad(grad, LENGTHS, 11, 0.0))
        for key, value in packed.metrics.items():
            torch.testing.assert_close(out.metrics[key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_padded_and_empty(backend: str, shape: tuple[int, int]) -> None:
    """No sequence, or sequences of no token: loss 0 and a gradient of the input's shape."""
    ids, zeros = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for inplace in (False, True):
        for aggregate in ("token-mean", "seq-mean-token-mean"):
            logits = torch.randn(*shape, 11, requires_grad=True)
            out = dapo_loss(logits, ids, zeros, zeros, aggregate=aggregate, inplace_backward=inplace)
            out.loss.backward()
            assert out.loss.item() == 0
            assert out.logprobs.shape == shape
            assert logits.grad is not None
            assert logits.grad.shape == (*shape, 11)
    hidden, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    linear = linear_dapo_loss(hidden, weight, ids, zeros, zeros)
    linear.loss.backward()
    assert linear.loss.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.shape == (*shape, 4)
    assert not weight.grad.any()


def test_padded_advantages_per_sequence(backend: str) -> None:
    """[B] equals [B, L] of the same values, also when B == L."""
    for width in (11, 9):
        lengths = LENGTHS if width == 11 else (9, 1, 4, 2, 3, 9, 5, 1, 6)
        case = logits_case(lengths=lengths, seed=92)
        per_sequence = torch.linspace(-1.5, 1.0, len(lengths))
        args, kwargs = padded_inputs(case, width)
        results = []
        for advantages in (per_sequence, per_sequence[:, None].expand(-1, width)):
            logits = pad(case.leaves["logits"], lengths, width, 0.0).requires_grad_()
            out = dapo_loss(logits, args[0], args[1], advantages, **kwargs)
            out.loss.backward()
            results.append((out.loss, logits.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("vocab", [7, 257, 4099])
def test_a_row_alone_has_the_same_bits(backend: str, vocab: int) -> None:
    """Nothing about a row depends on its neighbours: log-prob, entropy, gradient."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=vocab, lengths=(3, 4), dtype=dtype, seed=93, dead=0.0)
        denominator = {"denominator": 7.0}
        together, grad = run(case, **denominator)
        for t in range(7):
            part = slice(t, t + 1)
            logits = case.leaves["logits"][part].clone().requires_grad_()
            out = dapo_loss(
                logits,
                case.target_ids[part],
                case.old_logprobs[part],
                case.advantages[part],
                ref_logprobs=case.ref_logprobs[part],
                **OPTIONS,
                **denominator,
            )
            out.loss.backward()
            assert torch.equal(out.logprobs, together.logprobs[part])
            assert torch.equal(out.entropy, together.entropy[part])
            assert logits.grad is not None
            assert torch.equal(logits.grad, grad[part])


@pytest.mark.parametrize(("n_tokens", "vocab"), [(1, 50257), (2, 4099), (3, 1031), (6, 4099), (64, 257), (37, 4099)])
def test_thread_count_changes_no_bit(backend: str, restore_threads: None, n_tokens: int, vocab: int) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=vocab, lengths=(n_tokens,), dtype=dtype, seed=94, dead=0.2 if n_tokens > 3 else 0.0)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((*run(case), *run(case, inplace_backward=True)))
        # torch's own reductions split long rows by thread, so the reference backend promises rounding only.
        exact = {"rtol": 0.0, "atol": 0.0} if backend == "cpp" else {"rtol": EPS[dtype], "atol": 2e-6}
        for out, grad, over, grad_over in results[1:]:
            first, first_grad, first_over, first_grad_over = results[0]
            for x, y in [
                (out.logprobs, first.logprobs),
                (out.entropy, first.entropy),
                (grad, first_grad),
                (out.loss, first.loss),
                (over.logprobs, first.logprobs),
                (grad_over, first_grad_over),
                (over.loss, first_over.loss),
            ]:
                torch.testing.assert_close(x, y, **exact)


def strided_variants(logits: Tensor) -> dict[str, Tensor]:
    """The same [T, V] values under other strides. NaN lies between the elements."""
    n_tokens, vocab = logits.shape
    wide = torch.full((n_tokens, vocab + 5), float("nan"), dtype=logits.dtype)
    wide[:, 2 : 2 + vocab] = logits
    apart = torch.full((n_tokens, vocab * 2), float("nan"), dtype=logits.dtype)
    apart[:, ::2] = logits
    rows = torch.full((n_tokens * 2, vocab), float("nan"), dtype=logits.dtype)
    rows[::2] = logits
    return {
        "transposed": logits.T.contiguous().T,
        "columns of a wider one": wide[:, 2 : 2 + vocab],
        "every second column": apart[:, ::2],
        "every second row": rows[::2],
        "storage offset": torch.cat([logits[:1], logits])[1:],
    }


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_strided_logits(backend: str, inplace: bool) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, dtype=dtype, seed=95)
        plain, grad = run(case)
        for name, view in strided_variants(case.leaves["logits"]).items():
            leaf = view.requires_grad_()
            out = dapo_loss(
                leaf,
                case.target_ids,
                case.old_logprobs,
                case.advantages,
                mask=case.mask,
                cu_seqlens=case.cu_seqlens,
                ref_logprobs=case.ref_logprobs,
                inplace_backward=inplace,
                **OPTIONS,
            )
            out.loss.backward()
            assert leaf.grad is not None
            assert leaf.grad.shape == leaf.shape
            torch.testing.assert_close(out.logprobs, plain.logprobs, rtol=0, atol=1e-6, msg=name)
            torch.testing.assert_close(leaf.grad, grad, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_all_but_the_last_position(backend: str, inplace: bool) -> None:
    """logits[:, :-1] of a model's [B, L+1, V] output: right gradient inside, exact zeros in the last column."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=67, lengths=LENGTHS, dtype=dtype, seed=96)
        args, kwargs = padded_inputs(case, 9)
        plain_logits = pad(case.leaves["logits"], LENGTHS, 9, 0.5).requires_grad_()
        plain = dapo_loss(plain_logits, *args, **kwargs)
        plain.loss.backward()
        whole = torch.cat([plain_logits.detach(), torch.full((4, 1, 67), float("nan"), dtype=dtype)], 1)
        base = whole.clone().requires_grad_()
        logits = (base * 1)[:, :-1]  # a view of something that is not a leaf, as in a real model
        out = dapo_loss(logits, *args, **kwargs, inplace_backward=inplace)
        out.loss.backward()
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=1e-7)
        assert base.grad is not None
        assert plain_logits.grad is not None
        torch.testing.assert_close(base.grad[:, :-1], plain_logits.grad, rtol=2 * EPS[dtype], atol=1e-7)
        assert not base.grad[:, -1].any()


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_expanded_logits(backend: str, inplace: bool) -> None:
    """Stride 0: every token shares one row of memory. Its gradient is the sum, or in place is refused."""
    row = logits_case(vocab=67, lengths=(1,), seed=97).leaves["logits"]
    ids = torch.tensor([1, 5, 9, 60])
    old, advantages = torch.full((4,), -4.0), torch.tensor([1.0, -1.0, 0.5, 2.0])
    grads = []
    for expand in (False, True):
        leaf = row.clone().requires_grad_()
        logits = leaf.expand(4, 67) if expand else leaf.repeat(4, 1)
        if expand and inplace:
            try:
                out = dapo_loss(logits, ids, old, advantages, clip_high=9.0, inplace_backward=True)
                out.loss.backward()
            except (ValueError, RuntimeError):
                return
        else:
            dapo_loss(logits, ids, old, advantages, clip_high=9.0).loss.backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


def test_inplace_over_rows_that_overlap(backend: str) -> None:
    """A sliding window over one buffer: rows share memory, so writing them in place is refused or done right."""
    buffer = torch.randn(40, generator=torch.Generator().manual_seed(5))
    ids, old = torch.tensor([1, 5, 9, 10]), torch.full((4,), -3.0)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    grads = []
    for inplace in (False, True):
        leaf = buffer.clone().requires_grad_()
        windows = (leaf * 1).unfold(0, 11, 7)[:4]
        assert windows.shape == (4, 11)
        try:
            out = dapo_loss(windows, ids, old, advantages, clip_high=9.0, inplace_backward=inplace)
            out.loss.backward()
        except (ValueError, RuntimeError):
            assert inplace
            return
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


def test_padded_hidden_states_but_the_last_position(backend: str) -> None:
    """hidden[:, :-1] of [B, L+1, H]: same loss as packed, zero gradient and no trace of the last column."""
    lengths = (9, 9)
    case = linear_case(lengths=lengths, seed=102, dead=0.3)
    packed, grads = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    last = torch.full((2, 1, 8), float("nan"))
    hidden = torch.cat([case.leaves["hidden"].reshape(2, 9, 8), last], 1).requires_grad_()
    weight = case.leaves["weight"].clone().requires_grad_()
    per_token = (x.reshape(2, 9) for x in (case.target_ids, case.old_logprobs, case.advantages))
    out = linear_dapo_loss(hidden[:, :-1], weight, *per_token, mask=case.mask.reshape(2, 9))
    out.loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert grads["hidden"] is not None
    torch.testing.assert_close(out.loss, packed.loss, rtol=1e-6, atol=1e-7)
    assert torch.equal(hidden.grad[:, :-1].reshape(18, 8), grads["hidden"])
    assert not hidden.grad[:, -1].any()
    assert torch.equal(weight.grad, grads["weight"])


def test_strided_gradients_come_back(backend: str) -> None:
    """What autograd hands to the backward may be expanded or transposed; the kernel must not read it as flat."""
    case = logits_case(lengths=(6, 6), seed=103)
    factor = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    grads = []
    for transposed in (False, True):
        logits = case.leaves["logits"].reshape(2, 6, 31).clone().requires_grad_()
        stats = token_logprobs(logits, case.target_ids.reshape(2, 6), entropy=True)
        if transposed:
            total = (stats.logprobs.T * factor).sum() + (stats.entropy.T * factor).sum() + stats.logprobs.sum()
        else:
            total = (stats.logprobs * factor.T.contiguous()).sum() + stats.logprobs.sum()
            total = total + (stats.entropy * factor.T.contiguous()).sum()
        total.backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-6)


def test_expanded_and_strided_per_token_inputs(backend: str) -> None:
    case = logits_case(seed=98)
    case.advantages = torch.full_like(case.advantages, 0.75)
    plain, grad = run(case, importance_weights=torch.full((19,), 0.5), temperature=torch.full((19,), 0.9))

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, torch.zeros_like(x)], 1)[:, 0]

    logits = case.fresh()["logits"]
    out = dapo_loss(
        logits,
        strided(case.target_ids),
        strided(case.old_logprobs),
        torch.tensor(0.75).expand(19),
        mask=strided(case.mask),
        cu_seqlens=strided(case.cu_seqlens),
        ref_logprobs=strided(case.ref_logprobs),
        importance_weights=torch.tensor(0.5).expand(19),
        temperature=torch.tensor(0.9).expand(19),
        **OPTIONS,
    )
    out.loss.backward()
    assert torch.equal(out.loss, plain.loss)
    assert logits.grad is not None
    assert torch.equal(logits.grad, grad)


def test_packing_order_changes_no_gradient_row(backend: str) -> None:
    case = logits_case(vocab=131, lengths=LENGTHS, seed=99)
    _, grad = run(case, denominator=19.0)
    order = torch.tensor([*range(15, 19), *range(6, 15), 5, *range(5)])
    moved = Case(**{**case.__dict__, "lengths": (4, 9, 1, 5), "leaves": {"logits": case.leaves["logits"][order]}})
    for name in ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs"):
        setattr(moved, name, getattr(case, name)[order])
    _, other = run(moved, denominator=19.0)
    assert torch.equal(other, grad[order])


def test_live_tokens_only_equals_masked(backend: str) -> None:
    """Dropping the dead rows by hand gives the same bits as masking them."""
    for level in ("logits", "linear"):
        case = (logits_case if level == "logits" else linear_case)(seed=100, dead=0.5)
        index = case.mask.nonzero()[:, 0]
        live = Case(
            **{**case.__dict__, "mask": case.mask[index], "lengths": (len(index),), "leaves": dict(case.leaves)}
        )
        for name in ("target_ids", "old_logprobs", "advantages"):
            setattr(live, name, getattr(case, name)[index])
        leaf = "logits" if level == "logits" else "hidden"
        live.leaves[leaf] = case.leaves[leaf][index]
        if level == "logits":
            out, grad = call_logits(dapo_loss, case, "dapo", mask=case.mask)
            other, other_grad = call_logits(dapo_loss, live, "dapo")
        else:
            out, grads = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
            other, other_grads = call_linear(linear_dapo_loss, live, "dapo")
            assert grads["hidden"] is not None
            assert other_grads["hidden"] is not None
            grad, other_grad = grads["hidden"], other_grads["hidden"]
        assert torch.equal(out.loss, other.loss)
        assert torch.equal(out.logprobs[index], other.logprobs)
        assert torch.equal(grad[index], other_grad)


def test_logprobs_agree_between_entry_points(backend: str) -> None:
    """The log-probs that a trainer stores as old ones are the very bits that the loss computes."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=1031, dtype=dtype, seed=101, dead=0.0)
        stats = token_logprobs(case.leaves["logits"], case.target_ids)
        out, _ = run(case)
        without, _ = call_logits(dapo_loss, case, "dapo")
        assert torch.equal(stats.logprobs, without.logprobs)
        assert torch.equal(stats.logprobs, out.logprobs), "entropy must not change a log-prob's bits"
        hidden = linear_case(dtype=dtype, seed=101, dead=0.0)
        linear, _ = call_linear(linear_dapo_loss, hidden, "dapo", old=None)
        assert float(linear.metrics["ratio"]) == 19
