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

TOLD = "rank 1 of the group"  # what the others say of the rank that refuses


def refusals(group: Group, cut: tuple[int, ...]) -> None:
    """The same error on every rank, and nobody waits for anybody."""
    case, rank = linear_case(V, H, LENGTHS, seed=14), group.rank()
    weight, mesh = case.leaves["weight"], DeviceMesh.from_group(group, "cpu")

    def call(**changes: Any) -> None:
        given = {"hidden": case.leaves["hidden"], "weight": weight[columns(cut, group)], "group": group}
        given |= case.tensors("target_ids", "old_logprobs", "advantages")
        linear_dapo_loss(**{**given, **changes})

    def first(n: int) -> dict[str, Any]:
        return {name: getattr(case, name)[:n] for name in ("target_ids", "old_logprobs", "advantages")}

    call(weight=weight[: V if rank == 0 else 0])  # a rank without columns has its part in the exchange
    marked = torch.where(torch.arange(T) == 3, float(-rank), 1.0)
    call(advantages=torch.where(case.mask, case.advantages, marked), mask=case.mask)
    bounds, hidden = case.cu_seqlens, case.leaves["hidden"]
    by_sequence = {**first(T - 2 * rank), "hidden": hidden[: T // 2 - rank], "sequence_parallel": True}
    one_group = {"aggregate": "prompt-mean-token-mean", "group_ids": torch.tensor([0, rank, 0, 0])}
    moved = bounds + rank * (torch.arange(len(bounds)) == 1).int()
    tokens, same, few = "tokens by rank", "the same call", f"[{T}, {T - 1}"
    wrong: list[tuple[type[Exception], tuple[str, ...], dict[str, Any]]] = [
        (ValueError, ("linear_dapo_loss", "target_ids", "mask", "fully_shard"), {"target_ids": (marked + 5).long()}),
        (ValueError, ("target_ids", "mask"), {"mask": torch.arange(T) > rank}),
        (ValueError, ("target_ids", few), {**first(T - rank), "hidden": hidden[: T - rank]}),
        (ValueError, (tokens, "[24, 22]"), by_sequence),
        (ValueError, (same, f"chunk_bytes {8 + rank}"), {"chunk_bytes": 8 + rank}),
        (ValueError, (same, "temperature"), {"temperature": (1.0, 0.5)[rank]}),
        (ValueError, (same, "clip_high"), {"clip_high": (0.2, 0.3)[rank]}),
        (
            ValueError,
            (same, "sequence_parallel"),
            {"sequence_parallel": rank == 1, "hidden": hidden[: T - T // 2 * rank]},
        ),
        (ValueError, (tokens,), {**one_group, "cu_seqlens": bounds}),
        (ValueError, (tokens,), {"objective": "gspo", "aggregate": "token-mean", "cu_seqlens": moved}),
        *[(ValueError, (tokens, name), {name: marked - 1}) for name in ("advantages", "old_logprobs")],
        (ValueError, (tokens,), {"temperature": marked + 2}),
        (ValueError, ("valid_vocab", "V=67"), {"valid_vocab": V + 1}),
        (IndexError, ("target_ids", f"[0, {V})"), {"target_ids": torch.full_like(case.target_ids, V)}),
        (TypeError, ("group", "str"), {"group": "tp"}),
        (ValueError, ("sequence_parallel=True",), {"weight": weight, "group": None, "sequence_parallel": True}),
        (ValueError, ("Shard(0)", "dim=1"), {"weight": distribute_tensor(weight, mesh, [Shard(1)]), "group": None}),
    ]
    for placement in (Shard(0), Replicate()):
        head = {"weight": distribute_tensor(weight, mesh, [placement]), "group": None}
        wrong += [(ValueError, ("valid_vocab", f"V={V}"), {**head, "valid_vocab": V + 1})]
        wrong += [(ValueError, (tokens,), {**head, "advantages": marked})]
    for kind, named, changes in wrong:
        with refusing(kind, *named):
            call(**changes)
    with refusing(ValueError, tokens):
        pairs = {"pairs": torch.tensor([[0, 1 + rank]]), "cu_seqlens": bounds, "group": group}
        linear_preference_loss(hidden, weight[columns(cut, group)], case.target_ids, None, **pairs)
    for name, value in {"valid_vocab": 0, "softcap": -1.0}.items():
        with refusing(ValueError, name if rank else TOLD):
            call(**({name: value} if rank else {}))
    refused_by_one(group, call, mesh, weight)


def refused_by_one(group: Group, call: Callable[..., None], mesh: DeviceMesh, weight: Tensor) -> None:
    """What a rank refuses before it knows how the head is shared; and gradients that only some ranks ask for."""
    rank = group.rank()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def cut(x: Tensor, dim: int) -> DTensor:
        """As ``distribute_tensor``, without an exchange: the ranks here do different things."""
        mine = x.chunk(group.size(), dim)[rank]
        return DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=x.shape, stride=x.stride())

    with refusing(TypeError if rank else ValueError, "sequence_parallel" if rank else TOLD):
        call(sequence_parallel=1 if rank else False)
    with refusing(ValueError, "Shard(0)" if rank else TOLD):
        call(weight=cut(weight, rank), group=None)
    with refusing(ValueError, "group" if rank else TOLD):
        call(weight=cut(weight, 0), group=alone if rank else None)
    with refusing(ValueError, "Shard(1)" if rank else TOLD):
        dapo_loss(cut(torch.randn(T, V), 1 - rank), torch.arange(T), None, torch.ones(T))
    hidden, columns_of_rank = torch.randn(T, H), cut(torch.randn(T, V), 1).to_local()
    bounds = {"cu_seqlens": torch.tensor([0, T // 2, T])}
    functions: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
        (linear_token_logprobs, token_logprobs, (), {}),
        (linear_preference_loss, preference_loss, (None,), bounds),
        (linear_dapo_loss, dapo_loss, (None, torch.ones(T)), {}),
    ]
    for from_hidden, from_logits, tokens, more in functions:
        for function, states in ((from_hidden, (hidden, cut(weight, 0).to_local())), (from_logits, (columns_of_rank,))):
            with refusing(ValueError, "temperature" if rank else TOLD):
                how = {**more, "group": group, "temperature": -1.0 if rank else 1.0}
                function(*states, torch.arange(T), *tokens, **how)
    for name in ("hidden", "weight"):
        leaves = {"hidden": hidden.clone(), "weight": cut(weight, 0).to_local()}
        leaves[name].requires_grad_(rank == 1)
        with refusing(ValueError, "the same call", "requires_grad"):
            call(**leaves)
    with torch.set_grad_enabled(rank == 1), refusing(ValueError, "the same call", "requires_grad"):
        call(hidden=hidden.clone().requires_grad_())
