"""What all ranks of a call refuse together, whichever of them has been given something wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import linear_case
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from vocab_parallel import LENGTHS, Group, H, T, V, columns, refusing

from dapo_kernels import (
    dapo_loss,
    linear_dapo_loss,
    linear_preference_loss,
    linear_token_logprobs,
    preference_loss,
    token_logprobs,
)


def refusals(group: Group, cut: tuple[int, ...]) -> None:
    """The same clear error on every rank, and nobody waits for anybody."""
    case, rank = linear_case(V, H, LENGTHS, seed=14), group.rank()
    weight = case.leaves["weight"][columns(cut, group)]
    mesh = DeviceMesh.from_group(group, "cpu")

    def call(**changes: Any) -> None:
        given: dict[str, Any] = {
            "hidden": case.leaves["hidden"],
            "weight": weight,
            "target_ids": case.target_ids,
            "old_logprobs": case.old_logprobs,
            "advantages": case.advantages,
            "group": group,
            **changes,
        }
        linear_dapo_loss(**given)

    other = torch.where(torch.arange(T) == rank, 1, 2)
    with refusing(ValueError, "linear_dapo_loss: all ranks", "same target_ids and mask", "fully_shard"):
        call(target_ids=other)
    with refusing(ValueError, "same target_ids and mask"):
        call(mask=torch.arange(T) > rank)
    few = {name: getattr(case, name)[: T - rank] for name in ("target_ids", "old_logprobs", "advantages")}
    with refusing(ValueError, "same target_ids", f"tokens by rank: [{T}, {T - 1}"):
        call(**few, hidden=case.leaves["hidden"][: T - rank])
    with refusing(ValueError, "all ranks", "the same call", f"chunk_bytes {8 + rank}"):
        call(chunk_bytes=8 + rank)
    with refusing(ValueError, "valid_vocab must be at most V=67"):
        call(valid_vocab=V + 1)
    call(weight=case.leaves["weight"][: V if rank == 0 else 0])  # a rank without columns has its part in the exchange
    with refusing(IndexError, "target_ids", f"[0, {V})"):
        call(target_ids=torch.full_like(case.target_ids, V))
    with refusing(TypeError, "group must be", "str"):
        call(group="tp")
    with refusing(ValueError, "weight, a DTensor, must be Shard(0) or Replicate()", "Shard(dim=1)"):
        call(weight=distribute_tensor(case.leaves["weight"], mesh, [Shard(1)]), group=None)
    with refusing(ValueError, "sequence_parallel=True needs"):
        call(weight=case.leaves["weight"], group=None, sequence_parallel=True)
    # Whatever else differs, down to what only one rank has to refuse.
    with refusing(ValueError, "tokens by rank", "tokens by rank: [24, 22]"):
        n = T - 2 * rank
        call(hidden=case.leaves["hidden"][: n // 2], target_ids=case.target_ids[:n], mask=case.mask[:n],
             old_logprobs=case.old_logprobs[:n], advantages=case.advantages[:n], sequence_parallel=True)  # fmt: skip
    for name, values in {
        "temperature": (1.0, 0.5),
        "sequence_parallel": (False, True),
        "host_sync": (True, False),
        "clip_high": (0.2, 0.3),
    }.items():
        hidden = case.leaves["hidden"][: T // 2 if name == "sequence_parallel" and rank else T]
        with refusing(ValueError, "the same call", name):
            call(**{name: values[rank]}, hidden=hidden)
    marked = torch.where(torch.arange(T) == 3, float(-rank), 1.0)
    for given in ({"temperature": marked}, {"advantages": marked}, {"old_logprobs": marked - 1}):
        with refusing(ValueError, "tokens by rank", "advantages"):
            call(**given)
    call(advantages=torch.where(case.mask, case.advantages, marked), mask=case.mask)
    for name, wrong in {"temperature": -1.0, "valid_vocab": 0, "softcap": -1.0}.items():
        with refusing(ValueError, f"{name} must be" if rank else "rank 1 of the group has refused its arguments"):
            call(**({name: wrong} if rank else {}))
    pairs = torch.tensor([[0, 1 + rank]])
    hidden, bounds = case.leaves["hidden"], case.cu_seqlens
    with refusing(ValueError, "tokens by rank"):
        linear_preference_loss(hidden, weight, case.target_ids, None, pairs=pairs, cu_seqlens=bounds, group=group)
    with refusing(ValueError, "tokens by rank"):
        call(aggregate="prompt-mean-token-mean", group_ids=torch.tensor([0, rank, 0, 0]), cu_seqlens=bounds)
    refused_by_one(group, call, mesh, case.leaves["weight"])
    for placement in (Shard(0), Replicate()):
        head = distribute_tensor(case.leaves["weight"], mesh, [placement])
        with refusing(ValueError, f"valid_vocab must be at most V={V}"):
            call(weight=head, group=None, valid_vocab=V + 1)
        with refusing(ValueError, "tokens by rank"):
            call(weight=head, group=None, advantages=marked)


def refused_by_one(group: Group, call: Callable[..., None], mesh: DeviceMesh, weight: Tensor) -> None:
    """What a rank refuses before it knows how the head is shared; and gradients that only some ranks ask for."""
    rank, told = group.rank(), "rank 1 of the group has refused its arguments"
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def cut(x: Tensor, dim: int) -> DTensor:
        """As ``distribute_tensor``, without an exchange: the ranks here do different things."""
        mine = x.chunk(group.size(), dim)[rank]
        return DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=x.shape, stride=x.stride())

    with refusing(TypeError if rank else ValueError, "sequence_parallel" if rank else told):
        call(sequence_parallel=1 if rank else False)
    with refusing(ValueError, "Shard(0)" if rank else told):
        call(weight=cut(weight, rank), group=None)
    with refusing(ValueError, "group" if rank else told):
        call(weight=cut(weight, 0), group=alone if rank else None)
    hidden, ids = torch.randn(T, H), torch.arange(T)
    how: dict[str, Any] = {"cu_seqlens": torch.tensor([0, T // 2, T])}
    from_hidden: list[Callable[..., Any]] = [
        linear_token_logprobs,
        lambda *given, **more: linear_preference_loss(*given, None, **more, **how),
    ]
    from_logits: list[Callable[..., Any]] = [
        token_logprobs,
        lambda *given, **more: dapo_loss(*given, None, torch.ones(T), **more),
        lambda *given, **more: preference_loss(*given, None, **more, **how),
    ]
    for function in from_hidden:
        with refusing(ValueError, "Shard(0)" if rank else told):
            function(hidden, cut(weight, rank), ids)
    rows = torch.randn(T, V)
    for function in from_logits:
        with refusing(ValueError, "Shard(1)" if rank else told):
            function(cut(rows, 1 - rank), ids)
        with refusing(ValueError, "group" if rank else told):
            function(cut(rows, 1), ids, group=alone if rank else None)
    for name in ("hidden", "weight"):
        leaves = {"hidden": hidden.clone(), "weight": cut(weight, 0).to_local()}
        leaves[name].requires_grad_(rank == 1)
        with refusing(ValueError, "the same call", "requires_grad"):
            call(**leaves)
    with torch.set_grad_enabled(rank == 1), refusing(ValueError, "the same call", "requires_grad"):
        call(hidden=hidden.clone().requires_grad_())
