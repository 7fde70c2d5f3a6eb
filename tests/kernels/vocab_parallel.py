"""A head of which every rank holds some rows, held against the whole head, on every rank.

Legend: R ranks, T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, call_linear, call_logits
from torch import Tensor

from dapo_kernels import OBJECTIVES, dapo_loss, linear_dapo_loss

Group = dist.ProcessGroup
V, H, LENGTHS = 67, 12, (7, 2, 12, 3)
T = sum(LENGTHS)
# Columns of each rank: the last one short, as torch.chunk leaves it, and cut any other way.
CUTS = {2: ((34, 33), (66, 1)), 4: ((17, 17, 17, 16), (1, 40, 6, 20))}
CLOSE = {torch.float64: {"atol": 1e-13, "rtol": 1e-12}, torch.float32: {"atol": 1e-6, "rtol": 1e-5}}


def columns(cut: tuple[int, ...], group: Group) -> slice:
    rank = group.rank()
    return slice(sum(cut[:rank]), sum(cut[: rank + 1]))


WHOLE = ("hidden", "lora_a")  # on every rank


def share(case: Case, mine: slice) -> Case:
    """The case with this rank's rows of the head, or its columns of the logits."""
    leaves = {name: leaf if name in WHOLE else leaf[mine] for name, leaf in case.leaves.items()}
    if "logits" in leaves:
        leaves["logits"] = case.leaves["logits"][:, mine]
    return replace(case, leaves=leaves)


def of_mine(grads: dict[str, Tensor | None], mine: slice) -> dict[str, Any]:
    return {name: grad if name in WHOLE or grad is None else grad[mine] for name, grad in grads.items()}


def options_of(name: str, case: Case) -> dict[str, Any]:
    row = OBJECTIVES[name]
    given: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
    if row.needs_reference:
        given["ref_logprobs"] = case.ref_logprobs
    if row.aggregate == "seq-mean-token-sum-norm":
        given["length_norm"] = 9
    return given


def alike(
    group: Group, got: Any, whole: Any, grads: dict[str, Any], expected: dict[str, Any], what: str, **close: float
) -> None:
    def same(a: Tensor, b: Tensor, of: str) -> None:
        torch.testing.assert_close(a, b, **close, msg=lambda text: f"{what}, {of}: {text}")

    same(got.loss, whole.loss, "loss")
    close_logprobs = {"atol": close["atol"], "rtol": min(close["rtol"], 3e-7)}  # one rounding more, of some ten
    torch.testing.assert_close(got.logprobs, whole.logprobs, **close_logprobs)
    if whole.entropy is not None:
        same(got.entropy, whole.entropy, "entropy")
    for name, grad in expected.items():
        same(grads[name], grad, name)
    everyone = [torch.empty_like(got.loss.detach()) for _ in range(group.size())]
    dist.all_gather(everyone, got.loss.detach(), group=group)
    assert len({x.item() for x in everyone}) == 1, f"{what}: ranks differ in the loss' bits"


def from_hidden(group: Group, case: Case, cut: tuple[int, ...], objective: Any, what: str, **options: Any) -> None:
    mine = columns(cut, group)
    whole, expected = call_linear(linear_dapo_loss, case, objective, **options)
    got, grads = call_linear(linear_dapo_loss, share(case, mine), objective, group=group, **options)
    close = CLOSE[torch.float64 if case.leaves["hidden"].dtype == torch.float64 else torch.float32]
    alike(group, got, whole, grads, of_mine(expected, mine), what, **close)


def from_logits(group: Group, case: Case, cut: tuple[int, ...], objective: Any, what: str, **options: Any) -> None:
    mine = columns(cut, group)
    whole, expected = call_logits(dapo_loss, case, objective, **options)
    got, grad = call_logits(dapo_loss, share(case, mine), objective, group=group, **options)
    alike(group, got, whole, {"logits": grad}, {"logits": expected[:, mine]}, what, **CLOSE[torch.float32])


@contextlib.contextmanager
def refusing(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert all(word in str(caught.value) for word in words), f"{caught.value}: without {words}"
