"""How autograd may use the losses: grad_output, repeated backward, graphs that share the logits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, dtypes_of, linear_case, logits_case
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, linear_token_logprobs, policy_loss, token_logprobs

Build = Callable[[], tuple[Tensor, list[Tensor]]]


def build(kind: str, dtype: torch.dtype = torch.float32, head_dtype: torch.dtype | None = None) -> Build:
    """A function that makes a fresh scalar loss and its leaves, which a linear kind casts to ``head_dtype`` first."""
    logits, linear = logits_case(vocab=37, dtype=dtype, seed=111), linear_case(vocab=37, dtype=dtype, seed=112)

    def per_token(case: Case) -> tuple[Tensor, Tensor, Tensor]:
        return case.target_ids, case.old_logprobs, case.advantages

    def make() -> tuple[Tensor, list[Tensor]]:
        if kind.startswith("linear"):
            x = linear.fresh()
            leaves = [x["hidden"], x["weight"]]
            head = [leaf.to(head_dtype or dtype) for leaf in leaves]
            if kind == "linear_loss":
                return linear_dapo_loss(*head, *per_token(linear), mask=linear.mask, entropy_coef=0.1).loss, leaves
            stats = linear_token_logprobs(*head, linear.target_ids, entropy=True)
            return (stats.logprobs * linear.advantages).sum() + stats.entropy.sum(), leaves
        leaf = logits.fresh()["logits"]
        inplace = kind.endswith("inplace")
        view = leaf * 1  # in place: over a tensor that is not the leaf, as in a model
        if kind.startswith("loss"):
            out = dapo_loss(view, *per_token(logits), mask=logits.mask, entropy_coef=0.1, inplace_backward=inplace)
            return out.loss, [leaf]
        if kind.startswith("stats"):
            stats = token_logprobs(view, logits.target_ids, entropy=True, inplace_backward=inplace)
            return (stats.logprobs * logits.advantages).sum() + stats.entropy.sum(), [leaf]
        assert kind == "policy"
        leaf = logits.ref_logprobs.clone().requires_grad_()
        return policy_loss(leaf, logits.old_logprobs, logits.advantages, mask=logits.mask).loss, [leaf]

    return make


KINDS = ("loss", "loss_inplace", "stats", "stats_inplace", "policy", "linear_loss", "linear_stats")
REPEATABLE = ("loss", "stats", "policy", "linear_stats")
ONCE = ("loss_inplace", "stats_inplace", "linear_loss")


def gradients(
    kind: str, factor: float = 1.0, dtype: torch.dtype = torch.float32, head_dtype: torch.dtype | None = None
) -> list[Tensor]:
    loss, leaves = build(kind, dtype, head_dtype)()
    (loss * factor).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [-2.0, 0.5, 0.0, 1024.0])
def test_grad_output(backend: str, kind: str, factor: float) -> None:
    """Powers of two scale exactly, in every dtype with room for them."""
    for dtype in (torch.float32, torch.bfloat16):
        once, scaled = gradients(kind, dtype=dtype), gradients(kind, factor, dtype)
        assert len(once) == len(scaled) > 0
        for a, b in zip(once, scaled, strict=True):
            assert float(a.abs().max()) > 0
            assert bool(torch.isfinite(b).all())
            torch.testing.assert_close(b, a * factor, rtol=2e-6 if dtype == torch.float32 else 8e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_used_twice_in_one_expression(backend: str, kind: str) -> None:
    loss, leaves = build(kind)()
    (loss + 2 * loss).backward()
    for leaf, once in zip(leaves, gradients(kind), strict=True):
        torch.testing.assert_close(leaf.grad, 3 * once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", REPEATABLE)
def test_second_backward_is_right(backend: str, kind: str) -> None:
    loss, leaves = build(kind)()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    for leaf, once in zip(leaves, gradients(kind), strict=True):
        torch.testing.assert_close(leaf.grad, 5 * once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ONCE)
def test_second_backward_is_refused(backend: str, kind: str) -> None:
    """The gradient's one buffer was handed out: a clear error, and the first gradient stays as it was."""
    loss, leaves = build(kind)()
    loss.backward(retain_graph=True)
    before = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for a, b in zip(before, gradients(kind), strict=True):
        assert torch.equal(a, b)
    word = "inplace_backward" if "inplace" in kind else "linear_dapo_loss"
    with pytest.raises(RuntimeError, match=word):
        loss.backward()
    for leaf, grad in zip(leaves, before, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_accumulate_over_calls(backend: str, kind: str) -> None:
    """Two calls, two backwards into the same leaves: .grad adds up and the first gradient's storage is not reused."""
    loss, leaves = build(kind)()
    loss.backward()
    kept = [leaf.grad for leaf in leaves]
    copies = [grad.clone() for grad in kept if grad is not None]
    gradients(kind)
    for grad, copy in zip(kept, copies, strict=True):
        assert grad is not None
        assert torch.equal(grad, copy)


@pytest.mark.parametrize("kind", ["loss", "linear_loss", "loss_inplace"])
def test_autograd_grad_of_some_inputs(backend: str, kind: str) -> None:
    """torch.autograd.grad asks for each leaf alone."""
    expected = gradients(kind)
    for i in range(len(expected)):
        loss, leaves = build(kind)()
        (grad,) = torch.autograd.grad(loss, leaves[i])
        torch.testing.assert_close(grad, expected[i], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("level", ["logits", "linear"])
def test_two_losses_on_one_set_of_hidden_states(backend: str, level: str) -> None:
    """A policy loss and another loss on the same tensor add their gradients."""
    case = linear_case(vocab=37, seed=113)
    args = (case.target_ids, case.old_logprobs, case.advantages)

    def gradient(first: bool, second: bool) -> Tensor:
        x = case.fresh()
        hidden, weight = x["hidden"] * 1, x["weight"]
        total = (hidden.square().sum() * 0.01) if second else torch.zeros(())
        if first and level == "linear":
            total = total + linear_dapo_loss(hidden, weight, *args, mask=case.mask).loss
        elif first:
            total = total + dapo_loss(hidden @ weight.T, *args, mask=case.mask, inplace_backward=True).loss
        total.backward()
        assert x["hidden"].grad is not None
        return x["hidden"].grad

    torch.testing.assert_close(
        gradient(True, True), gradient(True, False) + gradient(False, True), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("kind", ["loss", "stats"])
def test_inplace_never_corrupts_another_consumer_of_the_logits(backend: str, kind: str) -> None:
    """Something else saved the logits for its own backward: autograd must notice, not use overwritten values."""
    case = logits_case(vocab=37, seed=114)

    def gradient(inplace: bool) -> Tensor:
        leaf = case.fresh()["logits"]
        logits = leaf * 1
        other = logits.square().sum() * 0.01  # saves logits
        if kind == "loss":
            mine = dapo_loss(logits, case.target_ids, case.old_logprobs, case.advantages, inplace_backward=inplace).loss
        else:
            mine = token_logprobs(logits, case.target_ids, inplace_backward=inplace).logprobs.sum()
        (mine + other).backward()
        assert leaf.grad is not None
        return leaf.grad

    right = gradient(False)
    try:
        got = gradient(True)
    except RuntimeError:
        return
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_double_backward_is_right_or_refused(backend: str, kind: str) -> None:
    """A gradient penalty needs the derivative of the gradient. Silently treating it as constant would be wrong."""
    loss, leaves = build(kind)()
    try:
        grads = torch.autograd.grad(loss * loss, leaves, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        if not isinstance(penalty, Tensor) or not penalty.requires_grad:
            return  # backward() on it raises: nothing can go unnoticed
        second = torch.autograd.grad(penalty, leaves)
    except RuntimeError:
        return
    # d(penalty) by finite differences along a random direction of the first leaf
    direction = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(0))
    values = []
    for step in (-1e-2, 1e-2):
        shifted, shifted_leaves = _shifted(kind, direction * step)
        grads = torch.autograd.grad(shifted * shifted, shifted_leaves)
        values.append(sum(float(g.square().sum()) for g in grads))
    expected = (values[1] - values[0]) / 2e-2
    assert float((second[0] * direction).sum()) == pytest.approx(expected, rel=0.05, abs=1e-3)


def _shifted(kind: str, step: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same loss at a neighbouring point of its first leaf."""
    if kind.startswith("linear"):
        case = linear_case(vocab=37, seed=112)
        x = case.fresh()
        leaves = [(x["hidden"].detach() + step).requires_grad_(), x["weight"]]
        if kind == "linear_loss":
            out = linear_dapo_loss(
                *leaves, case.target_ids, case.old_logprobs, case.advantages, mask=case.mask, entropy_coef=0.1
            )
            return out.loss, leaves
        stats = linear_token_logprobs(*leaves, case.target_ids, entropy=True)
        return (stats.logprobs * case.advantages).sum() + stats.entropy.sum(), leaves
    case = logits_case(vocab=37, seed=111)
    if kind == "policy":
        leaf = (case.ref_logprobs + step).requires_grad_()
        return policy_loss(leaf, case.old_logprobs, case.advantages, mask=case.mask).loss, [leaf]
    leaf = (case.leaves["logits"] + step).requires_grad_()
    if kind.startswith("loss"):
        out = dapo_loss(leaf, case.target_ids, case.old_logprobs, case.advantages, mask=case.mask, entropy_coef=0.1)
        return out.loss, [leaf]
    stats = token_logprobs(leaf, case.target_ids, entropy=True)
    return (stats.logprobs * case.advantages).sum() + stats.entropy.sum(), [leaf]


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_from_a_model_through_a_view(backend: str, inplace: bool) -> None:
    """[B, L, V] logits reshaped to [T, V]: the in-place gradient lands where the view's base expects it."""
    for dtype in dtypes_of(backend):
        case = logits_case(vocab=37, lengths=(6, 6), dtype=dtype, seed=115)
        args = (case.target_ids, case.old_logprobs, case.advantages)
        expected = case.fresh()["logits"]
        dapo_loss(expected, *args, mask=case.mask).loss.backward()
        leaf = case.leaves["logits"].reshape(2, 6, 37).clone().requires_grad_()
        flat = (leaf * 1).view(12, 37)
        dapo_loss(flat, *args, mask=case.mask, inplace_backward=inplace).loss.backward()
        assert leaf.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(
            leaf.grad.view(12, 37), expected.grad, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=6e-8
        )


def test_checkpointed_body(backend: str) -> None:
    """Activation checkpointing recomputes the body in the backward pass: the loss call happens once and fits in."""
    from torch.utils.checkpoint import checkpoint

    case = linear_case(vocab=37, seed=116)
    body = torch.nn.Linear(8, 8)
    grads = []
    for recompute in (False, True):
        body.zero_grad()
        x = case.leaves["hidden"].clone().requires_grad_()
        hidden = checkpoint(body, x, use_reentrant=False) if recompute else body(x)
        linear_dapo_loss(
            hidden, case.leaves["weight"], case.target_ids, case.old_logprobs, case.advantages
        ).loss.backward()
        assert body.weight.grad is not None
        grads.append(body.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_around_the_call(backend: str, kind: str) -> None:
    """From hidden states it acts as on the Linear layer that the call stands for; elsewhere it changes no number."""
    expected = gradients(kind, head_dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, leaves = build(kind)()
        assert loss.dtype == torch.float32
    loss.backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph(backend: str, mode: Callable[[], Any]) -> None:
    """no_grad and inference_mode: the same numbers, nothing to differentiate."""
    for kind in KINDS:
        expected, _ = build(kind)()
        with mode():
            loss, _ = build(kind)()
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
@pytest.mark.parametrize("call", ["logits", "inplace", "hidden"])
def test_a_second_derivative_is_refused(backend: str, call: str, objective: str) -> None:
    """``torch.autograd.functional.hessian``, a gradient penalty: never a silent zero."""
    case = linear_case(11, 4, (3, 4), seed=2) if call == "hidden" else logits_case(11, (3, 4), seed=2)
    leaves = list(case.fresh().values())

    def loss(first: Tensor) -> Tensor:
        function = linear_dapo_loss if call == "hidden" else dapo_loss
        args = (case.target_ids, case.old_logprobs, case.advantages)
        said = {"objective": objective, "mask": case.mask, "cu_seqlens": case.cu_seqlens}
        if call == "inplace":
            said["inplace_backward"], first = True, first * first
        return function(first, *leaves[1:], *args, **said).loss

    with pytest.raises(RuntimeError, match="gradient of a gradient is not implemented"):
        torch.autograd.functional.hessian(loss, leaves[0].detach())

    def penalty() -> None:
        (gradient,) = torch.autograd.grad(loss(leaves[0]), leaves[0], create_graph=True)
        gradient.square().sum().backward()

    with pytest.raises(RuntimeError, match="gradient of a gradient is not implemented"):
        penalty()


ENTRIES: dict[str, Callable[[Case], Tensor]] = {
    "logits": lambda c: dapo_loss(*_args(c)).loss,
    "entropy": lambda c: dapo_loss(*_args(c), entropy_coef=0.1).loss,
    "inplace": lambda c: dapo_loss(*_args(c), inplace_backward=True).loss,
    "gspo": lambda c: dapo_loss(*_args(c), objective="gspo", cu_seqlens=c.cu_seqlens).loss,
    "gspo in place": lambda c: (
        dapo_loss(*_args(c), objective="gspo", cu_seqlens=c.cu_seqlens, inplace_backward=True).loss
    ),
    "own": lambda c: dapo_loss(*_args(c), objective=lambda lp, h, t: -lp * t.advantages).loss,
    "log-probs": lambda c: token_logprobs(*_args(c)[:2], entropy=True).logprobs.sum(),
    "hidden": lambda c: linear_dapo_loss(*_args(c)).loss,
    "hidden, gspo": lambda c: linear_dapo_loss(*_args(c), objective="gspo", cu_seqlens=c.cu_seqlens).loss,
    "hidden, log-probs": lambda c: linear_token_logprobs(*_args(c)[:3]).logprobs.sum(),
}


def _args(case: Case) -> tuple[Tensor, ...]:
    leaves = [leaf * 1.0 for leaf in case.fresh().values()]
    ALIVE.extend(weakref.ref(leaf) for leaf in leaves)
    return (*leaves, case.target_ids, case.old_logprobs.nan_to_num(0.0), case.advantages.nan_to_num(0.0))


ALIVE: list[weakref.ref[Tensor]] = []


@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_outlives_a_call(entry: str, backwards: bool) -> None:
    """No cycle holds logits or gradients until the next collection: on a GPU that would be the memory of many steps."""
    case = linear_case(11, 4, (3, 4), seed=2) if entry.startswith("hidden") else logits_case(11, (3, 4), seed=2)
    ALIVE.clear()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            loss = ENTRIES[entry](case)
            if backwards:
                loss.backward()
            del loss
        assert ALIVE
        assert [ref() for ref in ALIVE] == [None] * len(ALIVE)
    finally:
        gc.enable()


def test_forward_mode_is_refused() -> None:
    case = logits_case(11, (3, 4), seed=2)
    logits = case.leaves["logits"].detach()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: token_logprobs(x, case.target_ids).logprobs, (logits,), (torch.ones_like(logits),))


def test_the_loss_is_float32_on_its_device_whatever_the_defaults() -> None:
    case = logits_case(11, (3, 4), seed=2)
    args = (case.leaves["logits"], case.target_ids, case.old_logprobs, case.advantages)
    expected = dapo_loss(*args, mask=case.mask).loss
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            loss = dapo_loss(*args, mask=case.mask).loss
    finally:
        torch.set_default_dtype(torch.float32)
    assert (loss.dtype, loss.device.type) == (torch.float32, "cpu")
    assert torch.equal(loss, expected)


def test_fake_tensors_are_not_worked_on_in_place() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits = torch.empty(7, 11, requires_grad=True) * 1
        ids, zeros = torch.empty(7, dtype=torch.int64), torch.empty(7)
        out = dapo_loss(logits, ids, zeros, zeros, inplace_backward=True)
        assert out.loss.shape == ()
