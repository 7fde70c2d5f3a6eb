"""How autograd may use the losses: grad_output, repeated backward, graphs that share the logits, what is refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

from dapo_kernels import (
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
)

REPEATABLE = ("loss", "loss, gspo", "stats", "policy", "linear_stats")
ONCE = ("loss_inplace", "stats_inplace", "linear_loss")
KINDS = (*REPEATABLE, *ONCE)


def case_of(kind: str) -> Case:
    return (linear_case if kind.startswith("linear") else logits_case)(37, seed=112)


def scalar(kind: str, case: Case, *x: Tensor) -> Tensor:
    """The loss of a kind from its differentiable tensors."""
    per_token = (case.target_ids, case.old_logprobs, case.advantages)
    inplace = {"inplace_backward": True} if kind.endswith("inplace") else {}
    given: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, **inplace}
    if kind == "policy":
        return policy_loss(x[0], *per_token[1:], **given).loss
    if "stats" in kind:
        function: Any = linear_token_logprobs if kind.startswith("linear") else token_logprobs
        stats = function(*x, case.target_ids, entropy=True, **inplace)
        return (stats.logprobs * case.advantages).sum() + stats.entropy.sum()
    if kind == "linear_loss":
        return linear_dapo_loss(*x, *per_token, entropy_coef=0.1, **given).loss
    return dapo_loss(*x, *per_token, entropy_coef=0.1, objective="gspo" if "gspo" in kind else "dapo", **given).loss


def leaves_of(kind: str, case: Case) -> list[Tensor]:
    return [case.ref_logprobs.clone().requires_grad_()] if kind == "policy" else list(case.fresh().values())


def build(kind: str) -> tuple[Tensor, list[Tensor]]:
    """A scalar and its leaves. In place it consumes a tensor that is not the leaf, as in a model."""
    case = case_of(kind)
    leaves = leaves_of(kind, case)
    return scalar(kind, case, *(leaf * 1 for leaf in leaves)), leaves


def gradients(kind: str, factor: float = 1.0) -> list[Tensor]:
    loss, leaves = build(kind)
    (loss * factor).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_used_twice_one_input_alone_and_gradients_that_stay(backend: str, kind: str) -> None:
    """In one expression; another call's backward does not reuse the storage of the first one's gradient."""
    loss, leaves = build(kind)
    (loss - 3 * loss).backward()
    once = gradients(kind)
    copies = [grad.clone() for grad in once]
    for i, (leaf, grad) in enumerate(zip(leaves, once, strict=True)):
        torch.testing.assert_close(leaf.grad, -2 * grad, rtol=1e-5, atol=1e-6)
        loss, others = build(kind)
        torch.testing.assert_close(*torch.autograd.grad(loss, others[i]), grad, rtol=1e-6, atol=1e-9)
        assert grad.any()
    assert not any(grad.any() for grad in gradients(kind, 0.0))
    assert all(torch.equal(grad, copy) for grad, copy in zip(once, copies, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_is_right_or_refused(backend: str, kind: str) -> None:
    """Where the gradient's one buffer was handed out: a clear error, and the first gradient stays as it was."""
    loss, leaves = build(kind)
    loss.backward(retain_graph=True)
    if kind in REPEATABLE:
        loss.backward(retain_graph=True)
        (loss * 3).backward()
    else:
        named, remedy = ("inplace_backward=True", "=False") if "inplace" in kind else ("hidden states", "backward once")
        with pytest.raises(RuntimeError, match=f"{named}: second backward.*{remedy}"):
            loss.backward()
    times = 5 if kind in REPEATABLE else 1
    for leaf, once in zip(leaves, gradients(kind), strict=True):
        torch.testing.assert_close(leaf.grad, times * once, rtol=1e-5 * (times > 1), atol=1e-6 * (times > 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_is_refused(backend: str, kind: str) -> None:
    """``torch.autograd.functional.hessian``, a gradient penalty: never a silent zero."""
    case = case_of(kind)
    leaves = leaves_of(kind, case)

    def loss(first: Tensor) -> Tensor:
        return scalar(kind, case, -first * first, *leaves[1:])

    def penalty() -> None:
        (gradient,) = torch.autograd.grad(loss(leaves[0]), leaves[0], create_graph=True)
        gradient.square().sum().backward()

    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.functional.hessian(loss, leaves[0].detach())
    with pytest.raises(RuntimeError, match="create_graph"):
        penalty()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_torch_func_is_refused(kind: str) -> None:
    """PyTorch's own message is about the inside of an autograd function."""
    case = case_of(kind)
    leaves = [leaf.detach() for leaf in leaves_of(kind, case)]
    with pytest.raises(NotImplementedError, match=r"torch\.autograd\.grad"):
        torch.func.grad(lambda *x: scalar(kind, case, *(leaf * 1 for leaf in x)))(*leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_batch_are_refused(kind: str) -> None:
    loss, leaves = build(kind)
    with pytest.raises(NotImplementedError, match="vectorize=True"):
        torch.autograd.grad(loss, leaves, torch.ones(2), is_grads_batched=True)


def test_vmap_gives_the_gradients_of_a_loop() -> None:
    """Inside vmap a batched tensor does not say that it requires a gradient."""
    case = case_of("linear_loss")
    hidden, weight = (case.leaves[name].detach() for name in ("hidden", "weight"))
    teacher = hidden.flip(0)
    losses = (
        lambda x, w: linear_dapo_loss(x, w, case.target_ids, case.old_logprobs, case.advantages).loss,
        lambda x, w: linear_distillation_loss(x, w, teacher, weight).loss,
    )
    for loss in losses:
        (x, w), (y, v) = (
            (torch.stack([hidden, -hidden]).requires_grad_(), weight.clone().requires_grad_()) for _ in "ab"
        )
        torch.func.vmap(loss, in_dims=(0, None))(x, w).sum().backward()
        (loss(y[0], v) + loss(y[1], v)).backward()
        torch.testing.assert_close((x.grad, w.grad), (y.grad, v.grad))
        assert x.grad.any()


def test_forward_mode_is_refused() -> None:
    case = case_of("stats")
    logits = case.leaves["logits"]
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: token_logprobs(x, case.target_ids).logprobs, (logits,), (torch.ones_like(logits),))


@pytest.mark.parametrize("kind", ["loss_inplace", "stats_inplace"])
def test_in_place_never_corrupts_another_consumer_of_the_logits(backend: str, kind: str) -> None:
    """Something else saved the logits for its own backward: autograd must notice, not use overwritten values."""
    case = case_of(kind)
    (leaf,) = leaves_of(kind, case)
    logits = leaf * 1
    other = logits.square().sum() * 0.01  # saves logits, and its backward is the later one
    total = scalar(kind, case, logits) + other
    with pytest.raises(RuntimeError, match="inplace operation"):
        total.backward()


@pytest.mark.parametrize("rows", [slice(None), slice(0, 20)], ids=["all", "some"])
def test_in_place_a_checkpoint_makes_the_logits_anew_or_is_refused(backend: str, rows: slice) -> None:
    """A function that closes over its logits would take their gradient for them when it is repeated."""
    case = case_of("loss")
    tokens = [x[rows] for x in (case.target_ids, case.old_logprobs, case.advantages)]

    def loss(logits: Tensor, inplace: bool = True) -> Tensor:
        return dapo_loss(logits[rows], *tokens, inplace_backward=inplace).loss

    def gradient(step: Callable[[Tensor], Tensor]) -> Tensor:
        (leaf,) = leaves_of("loss", case)
        step(leaf).backward()
        return leaf.grad

    expected, buffer = gradient(lambda leaf: loss(leaf * 1, inplace=False)), torch.empty_like(case.leaves["logits"])

    def closing_over(leaf: Tensor) -> Tensor:
        logits = leaf * 1
        return checkpoint(lambda: loss(logits), use_reentrant=False)

    with pytest.raises(RuntimeError, match="inplace_backward"):
        gradient(closing_over)
    refills = (lambda leaf: loss(leaf * 1), lambda leaf: loss(buffer.detach().copy_(leaf)))
    for refill, _ in itertools.product(refills, range(2)):
        got = gradient(lambda leaf, refill=refill: checkpoint(refill, leaf, use_reentrant=False))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_around_the_call(backend: str, kind: str) -> None:
    """From hidden states it acts as on the Linear layer that the call stands for; elsewhere it changes no number."""
    case = case_of(kind)
    expected, leaves = leaves_of(kind, case), leaves_of(kind, case)
    head = torch.bfloat16 if kind.startswith("linear") else torch.float32
    scalar(kind, case, *((x * 1).to(head) for x in expected)).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = scalar(kind, case, *(x * 1 for x in leaves))
    assert loss.dtype == torch.float32
    loss.backward()
    for a, b in zip(leaves, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_graph_and_of_constants(backend: str, kind: str) -> None:
    """no_grad, inference_mode and constants: the same numbers. Old log-probs and advantages are constants, too."""
    expected, leaves = build(kind)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss, _ = build(kind)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    case = case_of(kind)
    if "stats" not in kind:
        for x in (case.old_logprobs, case.advantages):
            x.requires_grad_()
    assert not scalar(kind.removesuffix("_inplace"), case, *(leaf.detach() for leaf in leaves)).requires_grad


WRAPPED = ("target_ids", "old_logprobs", "advantages", "mask", "importance_weights")


@pytest.mark.parametrize("name", WRAPPED)
def test_in_place_a_tensor_of_a_collective_is_read(backend: str, name: str) -> None:
    """Its own memory has no address: a kernel would take it as not given."""
    case = case_of("loss_inplace")
    found = []
    for wrap in (lambda x: x, AsyncCollectiveTensor):
        given = {key: wrap(x) if key == name else x for key, x in case.tensors(*WRAPPED).items()}
        (leaf,) = leaves_of("loss_inplace", case)
        loss = dapo_loss(leaf * 1, **given, inplace_backward=True).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)


def test_a_sampling_mask_of_a_collective_or_a_transform_is_read() -> None:
    case = case_of("stats")
    lists = SamplingMask.from_lists([sorted({1, 2, int(x)}) for x in case.target_ids])
    wide = SamplingMask(lists.ids.long(), lists.offsets.long())

    def logprobs(ids: Tensor) -> Tensor:
        mask = SamplingMask(ids, wide.offsets)
        return token_logprobs(case.leaves["logits"], case.target_ids, sampling_mask=mask).logprobs

    expected = logprobs(lists.ids)
    for found in (logprobs(AsyncCollectiveTensor(wide.ids)), torch.func.functionalize(logprobs)(wide.ids)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["loss", "loss, gspo", "stats", "stats_inplace", "linear_stats", "linear_loss"])
def test_results_may_be_changed_before_the_backward_pass(backend: str, kind: str) -> None:
    """As the log-probs of ``log_softmax`` and ``gather``."""
    case = case_of(kind)
    per_token = case.tensors("target_ids", "old_logprobs", "advantages")
    found = []
    for changes in (False, True):
        leaves = leaves_of(kind, case)
        if "stats" in kind:
            call: Any = linear_token_logprobs if kind.startswith("linear") else token_logprobs
            inplace = {"inplace_backward": True} if kind.endswith("inplace") else {}
            logprobs = call(*(leaf * 1 for leaf in leaves), case.target_ids, **inplace).logprobs
            loss = ((logprobs.sub_(case.old_logprobs) if changes else logprobs) * case.advantages).sum()
        else:
            call = linear_dapo_loss if kind.startswith("linear") else dapo_loss
            objective = "gspo" if "gspo" in kind else "dapo"
            out = call(*leaves, **per_token, cu_seqlens=case.cu_seqlens, objective=objective)
            loss = out.loss
            if changes:
                out.logprobs.zero_()
        found.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_nothing_outlives_a_call() -> None:
    """No cycle holds logits or gradients until the next collection: on a GPU that would be the memory of many steps."""

    def own_loss(logprobs: Tensor, entropy: Tensor | None, tokens: Any) -> Tensor:
        return -logprobs * tokens.advantages

    gc.collect()
    gc.disable()
    try:
        for kind, backwards in itertools.product((*KINDS, "loss, own", "linear_loss, own"), (True, False)):
            case = case_of(kind)
            x = [leaf * 1.0 for leaf in leaves_of(kind, case)]
            alive = [weakref.ref(tensor) for tensor in x]
            if kind.endswith("own"):
                function = linear_dapo_loss if kind.startswith("linear") else dapo_loss
                loss = function(*x, case.target_ids, None, case.advantages, objective=own_loss).loss
            else:
                loss = scalar(kind, case, *x)
            if backwards:
                loss.backward()
            del loss, x
            assert [ref() for ref in alive] == [None] * len(alive), kind
    finally:
        gc.enable()


def test_the_loss_is_float32_whatever_the_default_dtype() -> None:
    case = case_of("loss")
    given = {**case.leaves, **case.tensors("target_ids", "old_logprobs", "advantages", "mask")}
    expected = dapo_loss(**given).loss
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = dapo_loss(**given).loss
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
