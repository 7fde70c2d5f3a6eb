"""Heads and logits whose last columns pad the vocabulary: the loss of the first ``valid_vocab``, zeros for the rest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, call_linear, call_logits, dtypes_of, linear_case, logits_case
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, linear_token_logprobs, token_logprobs

V, PADDED = 61, 64
OBJECTIVES = ("dapo", "gspo")  # one pass, and two


def padded(case: Case) -> Case:
    """NaN where nobody may look."""
    leaves = dict(case.leaves)
    for name, x in leaves.items():
        if name != "hidden":
            axis = 1 if name == "logits" else 0
            more = [PADDED - V if i == axis else n for i, n in enumerate(x.shape)]
            leaves[name] = torch.cat([x, torch.full(more, math.nan, dtype=x.dtype)], axis)
    return replace(case, leaves=leaves)


def same(got: Any, expected: Any, grads: dict[str, Any], truth: dict[str, Any], dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.entropy, expected.entropy, atol=1e-6, rtol=1e-6)
    rtol = 1e-5 if dtype in (torch.float32, torch.float64) else 2**-7
    for name, grad in truth.items():
        axis = 1 if name == "logits" else 0
        n = grad.shape[axis]
        torch.testing.assert_close(grads[name].narrow(axis, 0, n), grad, atol=1e-6, rtol=rtol)
        assert not grads[name].narrow(axis, n, grads[name].shape[axis] - n).any(), name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_from_hidden_states(backend: str, objective: str) -> None:
    for dtype in dtypes_of(backend):
        for chunk_bytes in (5 * V * dtype.itemsize, None):
            case = linear_case(V, 12, dtype=dtype, bias=True, softcap=3.0, seed=61)
            how: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "entropy_coef": 0.1}
            how["chunk_bytes"] = chunk_bytes
            expected, truth = call_linear(linear_dapo_loss, case, objective, **how)
            got, grads = call_linear(linear_dapo_loss, padded(case), objective, valid_vocab=V, **how)
            same(got, expected, grads, truth, dtype)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_from_logits(backend: str, objective: str, inplace: bool) -> None:
    for dtype in dtypes_of(backend):
        case = logits_case(V, dtype=dtype, seed=62)
        how: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "entropy_coef": 0.1}
        how["inplace_backward"] = inplace
        expected, truth = call_logits(dapo_loss, case, objective, **how)
        got, grad = call_logits(dapo_loss, padded(case), objective, valid_vocab=V, **how)
        same(got, expected, {"logits": grad}, {"logits": truth}, dtype)


def test_log_probs(backend: str) -> None:
    case, rows = linear_case(V, 12, seed=63), logits_case(V, seed=63)

    def run(x: dict[str, Tensor], **more: Any) -> tuple[Any, dict[str, Any]]:
        ids = case.target_ids if "hidden" in x else rows.target_ids
        given = (x["hidden"], x["weight"]) if "hidden" in x else (x["logits"],)
        fn: Any = linear_token_logprobs if "hidden" in x else token_logprobs
        stats = fn(*given, ids, entropy=True, **more)
        (stats.logprobs.sum() + 2 * stats.entropy.sum()).backward()
        return stats, {name: leaf.grad for name, leaf in x.items()}

    for of in (case, rows):
        expected, truth = run(of.fresh())
        got, grads = run(padded(of).fresh(), valid_vocab=V)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        for name, grad in truth.items():
            mine = grads[name][:, :V] if name == "logits" else grads[name][: len(grad)]
            torch.testing.assert_close(mine, grad, atol=1e-6, rtol=1e-5)


def test_main_grad_and_the_compiler() -> None:
    case = linear_case(V, 12, seed=64)
    _, truth = call_linear(linear_dapo_loss, case, "dapo", bias=None)
    main_grad = torch.ones(PADDED, 12)
    call_linear(linear_dapo_loss, padded(case), "dapo", bias=None, valid_vocab=V, main_grad=main_grad)
    torch.testing.assert_close(main_grad[:V] - 1, truth["weight"], atol=1e-6, rtol=1e-5)
    assert (main_grad[V:] == 1).all()

    def loss(logits: Tensor) -> Tensor:
        return dapo_loss(logits, rows.target_ids, rows.old_logprobs, rows.advantages, valid_vocab=V).loss

    rows = padded(logits_case(V, seed=65))
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        logits = rows.fresh()["logits"]
        run(logits).backward()
        results.append(logits.grad)
    assert torch.equal(*results)


def test_refusals() -> None:
    case = linear_case(V, 12, seed=66)
    for value, kind in ((0, ValueError), (V + 1, ValueError), ("61", ValueError), (True, ValueError)):
        with pytest.raises(kind, match="valid_vocab"):
            call_linear(linear_dapo_loss, case, "dapo", valid_vocab=value)
        with pytest.raises(kind, match="valid_vocab"):
            call_logits(dapo_loss, logits_case(V, seed=66), "dapo", valid_vocab=value)
    with pytest.raises(IndexError, match=r"\[0, 60\)"):
        call_linear(linear_dapo_loss, replace(case, target_ids=case.target_ids * 0 + 60), "dapo", valid_vocab=60)
