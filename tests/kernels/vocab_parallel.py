"""A head of which every rank holds some rows (R ranks), held against the whole head, on every rank."""

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
WHOLE = ("hidden", "lora_a")  # on every rank


def columns(cut: tuple[int, ...], group: Group) -> slice:
    rank = group.rank()
    return slice(sum(cut[:rank]), sum(cut[: rank + 1]))


def share(case: Case, mine: slice) -> Case:
    """The case with this rank's rows of the head, or its columns of the logits."""
    return replace(case, leaves=of_mine(case.leaves, mine))


def of_mine(by_name: Any, mine: slice) -> dict[str, Any]:
    """This rank's part of leaves, or of their gradients."""

    def part(name: str, x: Tensor | None) -> Tensor | None:
        if name in WHOLE or x is None:
            return x
        return x[:, mine] if name == "logits" else x[mine]

    return {name: part(name, x) for name, x in by_name.items()}


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


def compare(group: Group, case: Case, cut: tuple[int, ...], objective: Any, what: str = "", **options: Any) -> None:
    """The loss of this rank's columns against that of the whole, from hidden states or from logits."""
    mine, logits = columns(cut, group), "logits" in case.leaves
    results = []
    for given, more in ((case, {}), (share(case, mine), {"group": group})):
        if "generator" in options:  # the ranks' dice differ: the first one's count
            options["generator"].manual_seed(1 + (group.rank() if more else 0))
        how = {**options, **more}
        if logits:
            out, grad = call_logits(dapo_loss, given, objective, **how)
            results.append((out, {"logits": grad}))
        else:
            out, grads = call_linear(linear_dapo_loss, given, objective, **how)
            results.append((out, grads))
    (whole, expected), (got, mine_grads) = results
    wide = next(iter(case.leaves.values())).dtype == torch.float64
    close = CLOSE[torch.float64 if wide else torch.float32]
    alike(group, got, whole, mine_grads, of_mine(expected, mine), f"{objective}, {list(case.leaves)} {what}", **close)


@contextlib.contextmanager
def refusing(kind: type[Exception], *values: str) -> Iterator[None]:
    """On every rank, with names and values in the message."""
    with pytest.raises(kind) as caught:
        yield
    assert all(value in str(caught.value) for value in values), f"{caught.value}: without {values}"
