"""What torch itself cuts, on every rank: heads that are DTensors, hidden states by sequence, a model under FSDP2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import LORA_SCALE, Case, call_linear, linear_case, pad
from entries import lora_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from vocab_parallel import CLOSE, LENGTHS, Group, H, T, V, alike, columns, of_mine, refusing

from dapo_kernels import LoraFactors, dapo_loss, linear_dapo_loss


def distributed_tensors(group: Group) -> None:
    """Heads that say themselves how they are cut; hidden states that lie as sequence parallelism leaves them."""
    mesh, n_ranks, rank = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank()
    case = linear_case(V, H, LENGTHS, bias=True, seed=11)
    options = {"mask": case.mask, "temperature": 0.7}
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", **options)
    for placement in (Shard(0), Replicate()):
        leaves = (distribute_tensor(case.leaves[name], mesh, [placement]) for name in ("weight", "bias"))
        weight, bias = (leaf.requires_grad_() for leaf in leaves)
        hidden = case.leaves["hidden"].clone().requires_grad_()
        replicated, by_sequence = (
            distribute_tensor(case.leaves["hidden"], mesh, [cut]).requires_grad_() for cut in (Replicate(), Shard(0))
        )
        local = by_sequence.to_local().detach().requires_grad_()
        calls: list[tuple[Tensor, dict[str, Any]]] = [(hidden, {}), (replicated, {}), (hidden, {"group": group})]
        if placement == Shard(0):
            calls += [(by_sequence, {}), (local, {"sequence_parallel": True})]
        for x, more in calls:
            x.grad = weight.grad = bias.grad = None
            got = linear_dapo_loss(x, weight, *tokens, bias=bias, **options, **more)
            got.loss.backward()
            grads = {"weight": full(weight.grad), "bias": full(bias.grad), "hidden": full(x.grad)}
            grad = expected["hidden"]
            if x is local:
                grad = distribute_tensor(grad, mesh, [Shard(0)]).to_local()
            alike(group, got, whole, grads, {**expected, "hidden": grad}, f"{placement}", **CLOSE[torch.float32])
    # The ranks' dice differ: the first one's count, also where each has the whole head (the last placement).
    dice = {"generator": torch.Generator().manual_seed(rank), "mask": case.mask, "clip_cov": (0.3, -9.0, 9.0)}
    loss = linear_dapo_loss(hidden, weight, *tokens, objective="clip_cov", **dice).loss.detach()
    first = loss.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    assert torch.equal(first, loss)
    # Padded: the sequence is the second dimension.
    mask = pad(case.mask, LENGTHS, 12, 0).bool()
    padded = [pad(x, LENGTHS, 12, 0) for x in tokens]
    part = pad(case.leaves["hidden"], LENGTHS, 12, 0.0).chunk(n_ranks, 1)[rank].clone().requires_grad_()
    weight, bias = (distribute_tensor(case.leaves[name], mesh, [Shard(0)]) for name in ("weight", "bias"))
    how = {"bias": bias, "mask": mask, "temperature": 0.7, "sequence_parallel": True}
    linear_dapo_loss(part, weight, *padded, **how).loss.backward()
    own_part = pad(expected["hidden"], LENGTHS, 12, 0.0).chunk(n_ranks, 1)[rank]
    torch.testing.assert_close(part.grad, own_part, **CLOSE[torch.float32])
    rows = distribute_tensor(case.leaves["hidden"] @ case.leaves["weight"].T, mesh, [Shard(1)]).requires_grad_()
    plain = rows.full_tensor().detach().requires_grad_()
    for in_place in (False, True):
        rows.grad = plain.grad = None
        for logits in (rows, plain):
            dapo_loss(logits * 1, *tokens, mask=case.mask, inplace_backward=in_place).loss.backward()
        torch.testing.assert_close(full(rows.grad), plain.grad, **CLOSE[torch.float32])


def full(grad: Tensor | None) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def low_rank_factors(group: Group) -> None:
    """With hidden states cut by sequence, whose gradient the factors share in; and as DTensors."""
    mesh, n_ranks, rank = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank()
    case = linear_case(V, H, LENGTHS, seed=23, rank=3)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    cuts = {"weight": Shard(0), "lora_a": Replicate(), "lora_b": Shard(0)}
    x = {name: distribute_tensor(case.leaves[name], mesh, [cut]).requires_grad_() for name, cut in cuts.items()}
    part = case.leaves["hidden"].chunk(n_ranks)[rank].clone().requires_grad_()
    how = {"lora": lora_of(x), "mask": case.mask, "sequence_parallel": True}
    got = linear_dapo_loss(part, x["weight"], *tokens, **how)
    got.loss.backward()
    grads = {**{name: full(leaf.grad) for name, leaf in x.items()}, "hidden": part.grad}
    expected["hidden"] = expected["hidden"].chunk(n_ranks)[rank]
    alike(group, got, whole, grads, expected, "LoRA by sequence", **CLOSE[torch.float32])
    for name, wrong in {"a": ("lora_b", "lora_b"), "b": ("lora_a", "lora_a")}.items():
        with refusing(ValueError, f"lora.{name}"):
            factors = LoraFactors(*(x[factor] for factor in wrong), LORA_SCALE)
            linear_dapo_loss(part, x["weight"], *tokens, **{**how, "lora": factors})


def the_page(group: Group) -> None:
    """The snippets of docs/vocabulary-parallel.md."""
    page = (Path(__file__).parents[2] / "docs" / "vocabulary-parallel.md").read_text(encoding="utf-8")
    snippets = re.findall(r"<!-- vocabulary: \w+ -->\n```python\n(.+?)```", page, re.DOTALL)
    assert len(snippets) == 2
    case = linear_case(V, H, LENGTHS, seed=17)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    mine = columns((34, 33), group)
    hidden = case.leaves["hidden"].clone().requires_grad_()
    names: dict[str, Any] = {"targets": case.target_ids, **case.tensors("old_logprobs", "advantages", "mask")}
    names |= {"linear_dapo_loss": linear_dapo_loss, "distribute_tensor": distribute_tensor, "Shard": Shard}
    names |= {"hidden": hidden, "my_rows": case.leaves["weight"][mine].clone().requires_grad_(), "tp_group": group}
    names |= {"whole_weight": case.leaves["weight"], "tp_mesh": DeviceMesh.from_group(group, "cpu")}
    for snippet in snippets:
        exec(snippet, names)
        grads = {"weight": names["my_rows"].grad, "hidden": hidden.grad}
        alike(group, names["out"], whole, grads, of_mine(expected, mine), snippet, **CLOSE[torch.float32])


class Network(nn.Module):
    """A body that FSDP2 shards and a head that the tensor-parallel ranks share."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.body = nn.Linear(H, H)
        self.head = nn.Linear(H, V)
        self.head.weight.data.copy_(case.leaves["weight"])

    def forward(self, states: Tensor, *tokens: Tensor, denominator: float) -> Tensor:
        hidden = torch.tanh(self.body(states))
        head = {"weight": self.head.weight, "bias": self.head.bias}
        return linear_dapo_loss(hidden, target_ids=tokens[0], old_logprobs=tokens[1], advantages=tokens[2], **head,
                                denominator=denominator).loss  # fmt: skip


def with_fsdp() -> None:
    """TP × FSDP2: 2 × 2 ranks, each pair of which has half of the tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = linear_case(V, H, LENGTHS, seed=15)
    inputs = (case.leaves["hidden"], case.target_ids, case.old_logprobs, case.advantages)
    torch.manual_seed(0)
    whole = Network(case)
    whole(*inputs, denominator=float(T)).backward()
    torch.manual_seed(0)
    model = Network(case)
    for name in ("weight", "bias"):
        shard = distribute_tensor(getattr(model.head, name).data, mesh["tp"], [Shard(0)])
        setattr(model.head, name, nn.Parameter(shard))
    fully_shard(model, mesh=mesh["dp"])
    own = [x.chunk(2)[mesh["dp"].get_local_rank()] for x in inputs]
    model(*own, denominator=T / 2).backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, **CLOSE[torch.float32])
