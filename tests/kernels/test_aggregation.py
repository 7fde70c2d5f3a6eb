"""Token weights: four aggregations, an explicit denominator, and batches that add up however they are split."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from cases import Case, call_linear, call_logits, linear_case, logits_case, solve
from oracle import ROWS, Options
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, policy_loss

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LENGTH_NORM = 16.0


def options(aggregate: str) -> dict[str, Any]:
    return {"aggregate": aggregate, **({"length_norm": LENGTH_NORM} if aggregate.endswith("norm") else {})}


def run(case: Case, aggregate: str, **kwargs: Any) -> tuple[Any, Tensor]:
    return call_logits(
        dapo_loss, case, "dapo", mask=case.mask, cu_seqlens=case.cu_seqlens, **options(aggregate), **kwargs
    )


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_weights_by_hand(backend: str, aggregate: str) -> None:
    """On-policy with advantage 1 the gradient by log-prob is minus the token's weight: no oracle needed."""
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 4, 6, 6, 10], dtype=torch.int32)  # 3, 0, (empty), 4 live tokens
    logprobs = torch.full((10,), -1.0, requires_grad=True)
    out = policy_loss(
        logprobs, None, torch.ones(10), objective="ppo", mask=mask, cu_seqlens=cu_seqlens, **options(aggregate)
    )
    out.loss.backward()
    first, last = {
        "token-mean": (1 / 7, 1 / 7),
        "seq-mean-token-mean": (1 / 6, 1 / 8),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-sum-norm": (1 / 32, 1 / 32),
    }[aggregate]
    expected = [first, first, 0, first, 0, 0, last, last, last, last]
    assert logprobs.grad is not None
    assert (-logprobs.grad).tolist() == pytest.approx(expected, rel=1e-6)
    assert out.loss.item() == pytest.approx(-(3 * first + 4 * last), rel=1e-6)


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [None, 7.5, "tensor"])
def test_against_the_oracle(backend: str, aggregate: str, denominator: Any) -> None:
    case = logits_case(lengths=(5, 1, 0, 9, 4), seed=71)
    given = torch.tensor(7.5) if denominator == "tensor" else denominator
    out, grad = run(case, aggregate, denominator=given)
    o = Options(clip_high=0.28, **options(aggregate))
    truth = solve(case, o, denominator=None if denominator is None else 7.5)
    assert out.loss.item() == pytest.approx(truth.loss.item(), rel=2e-6, abs=1e-6)
    torch.testing.assert_close(grad.double(), truth.grads["logits"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.int64, torch.float64, torch.float32, "int"])
def test_kinds_of_denominator(backend: str, kind: Any) -> None:
    """A token count reduced over ranks is often an int64 tensor."""
    case = logits_case(seed=72)
    reference, _ = run(case, "token-mean", denominator=40.0)
    value: Any = 40 if kind == "int" else torch.tensor(40)
    if isinstance(kind, torch.dtype):
        value = torch.tensor(40, dtype=kind)
    out, _ = run(case, "token-mean", denominator=value)
    assert out.loss.item() == pytest.approx(reference.loss.item(), rel=1e-6)
    assert out.loss.dtype == torch.float32


def test_a_denominator_gets_no_gradient_and_is_not_changed(backend: str) -> None:
    case = logits_case(seed=73)
    denominator = torch.tensor(40.0)
    out, _ = run(case, "token-mean", denominator=denominator)
    assert float(denominator) == 40
    assert not denominator.requires_grad
    assert out.loss.shape == ()


def split(case: Case, order: list[int]) -> Case:
    """A case made of some of the sequences, in the given order."""
    spans = case.spans
    index = torch.tensor(list(itertools.chain.from_iterable(range(*spans[i]) for i in order)), dtype=torch.int64)
    part = Case(**{**case.__dict__, "lengths": tuple(case.lengths[i] for i in order)})
    for name in ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs", "importance_weights"):
        setattr(part, name, getattr(case, name)[index])
    part.leaves = {name: leaf[index] if name in ("logits", "hidden") else leaf for name, leaf in case.leaves.items()}
    part.names = tuple(str(t) for t in index.tolist())
    return part


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_micro_batches_add_up(backend: str, aggregate: str) -> None:
    """With the global count as denominator any split, in any order, gives the whole batch's loss and gradient."""
    case = logits_case(lengths=(5, 1, 9, 4, 3), seed=74)
    whole, grad = run(case, aggregate)
    live_sequences = sum(bool(case.mask[a:b].any()) for a, b in case.spans)
    count = torch.tensor(float(case.mask.sum()) if aggregate == "token-mean" else float(live_sequences))
    for parts in ([[0], [1], [2], [3], [4]], [[4, 0], [3, 1, 2]], [[2, 3], [1, 0, 4]]):
        total, gathered = 0.0, torch.zeros_like(grad)
        for order in parts:
            piece = split(case, order)
            out, piece_grad = run(piece, aggregate, denominator=count)
            total += out.loss.item()
            gathered[[int(t) for t in piece.names]] = piece_grad
        assert total == pytest.approx(whole.loss.item(), rel=1e-6, abs=1e-6)
        relative = (gathered - grad).norm() / grad.norm()
        assert float(relative) <= 1e-6


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_micro_batches_add_up_from_hidden_states(backend: str, aggregate: str) -> None:
    case = linear_case(vocab=41, hidden_size=8, lengths=(5, 1, 9, 4, 3), seed=75)
    shared = options(aggregate)
    _, whole = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask, cu_seqlens=case.cu_seqlens, **shared)
    live_sequences = sum(bool(case.mask[a:b].any()) for a, b in case.spans)
    count = torch.tensor(float(case.mask.sum()) if aggregate == "token-mean" else float(live_sequences))
    for parts in ([[0], [1], [2], [3], [4]], [[4, 0], [3, 1, 2]]):
        total = torch.zeros_like(case.leaves["weight"])
        for order in parts:
            piece = split(case, order)
            _, grads = call_linear(
                linear_dapo_loss,
                piece,
                "dapo",
                mask=piece.mask,
                cu_seqlens=piece.cu_seqlens,
                denominator=count,
                **shared,
            )
            assert grads["weight"] is not None
            total += grads["weight"]
        assert whole["weight"] is not None
        assert float((total - whole["weight"]).norm() / whole["weight"].norm()) <= 1e-6


@pytest.mark.parametrize("level", ["logits", "linear", "policy"])
def test_advantages_per_sequence(backend: str, level: str) -> None:
    """[S] equals the same value spread over the sequence's tokens, packed; empty sequences keep their place."""
    lengths = (5, 1, 0, 9, 4)
    make = linear_case if level == "linear" else logits_case
    case = make(lengths=lengths, seed=76)
    per_sequence = torch.tensor([1.5, -0.5, 9.0, -1.0, 0.7])
    spread = torch.repeat_interleave(per_sequence, torch.tensor(lengths))
    losses = []
    for advantages in (per_sequence, spread):
        shared = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
        if level == "policy":
            out = policy_loss(case.ref_logprobs, case.old_logprobs, advantages, **shared)
            losses.append((out.loss, out.loss))
        elif level == "linear":
            out, grads = call_linear(linear_dapo_loss, case, "dapo", advantages=advantages, **shared)
            losses.append((out.loss, grads["weight"]))
        else:
            out, grad = call_logits(dapo_loss, case, "dapo", advantages=advantages, **shared)
            losses.append((out.loss, grad))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])
    truth_case = Case(**{**case.__dict__, "advantages": spread})
    if level == "logits":
        assert losses[0][0].item() == pytest.approx(float(solve(truth_case, ROWS["dapo"]).loss), abs=1e-6)


def test_token_mean_needs_no_sequences(backend: str) -> None:
    case = logits_case(seed=77)
    with_sequences, grad = run(case, "token-mean")
    without, other = call_logits(dapo_loss, case, "dapo", mask=case.mask)
    assert torch.equal(with_sequences.loss, without.loss)
    assert torch.equal(grad, other)


def test_length_norm_divides_the_sum(backend: str) -> None:
    case = logits_case(seed=78)
    plain, _ = call_logits(
        dapo_loss, case, "ppo", mask=case.mask, cu_seqlens=case.cu_seqlens, aggregate="seq-mean-token-sum"
    )
    normed, _ = call_logits(dapo_loss, case, "dr_grpo", mask=case.mask, cu_seqlens=case.cu_seqlens, length_norm=50.0)
    assert normed.loss.item() == pytest.approx(plain.loss.item() / 50, rel=1e-6)


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_tokens_as_the_denominator_of_sequences(aggregate: str) -> None:
    """Seen where it is the count of this very call; every other number may be one of sequences."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    logprobs, advantages = torch.full((3, 3), -1.0), torch.ones(3)

    def warnings_of(denominator: Any, live: Tensor = mask) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            policy_loss(logprobs, None, advantages, mask=live, denominator=denominator, **options(aggregate))
        return [str(warning.message) for warning in seen]

    for count in (mask.sum(), 5, 5.0):
        said = warnings_of(count)
        assert len(said) == (aggregate != "token-mean")
        assert all("denominator equals the number of live tokens" in text and aggregate in text for text in said)
    one_token_each = torch.eye(3)
    assert warnings_of(2) == warnings_of(mask.sum() + 1) == warnings_of(one_token_each.sum(), one_token_each) == []
