"""Weights over many ranks: FSDP2, a group of parameters per block and one for the rest.

Shards are float32 where they train, computing happens in the model's dtype and gradients are added up in float32: an
AdamW step is that of float32 masters. Two things to know of FSDP2: parameters are whole only inside the forward of the
module that owns them, and forwards are collective, so every rank makes equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo_runner.parallel.world import World

T = TypeVar("T")


class Root(nn.Module):
    """Holds a model whose head and loss are computed outside of its own forward: ``root(work)`` runs ``work`` where the
    parameters that belong to no block are whole.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: nn.Module, blocks: Iterable[nn.Module], world: World, compute: torch.dtype) -> Root:
    """Shard the model in place over the world's mesh. ``blocks`` are gathered one at a time, what is in none of them
    (embeddings, head, last norm) for as long as ``Root.forward`` runs.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    # Without reshard_after_forward the root would stay whole after a pass under no_grad, and later changes of its
    # shards would be ignored by the next.
    root = Root(model)
    fully_shard(root, mesh=world.mesh, mp_policy=precision, reshard_after_forward=True)
    return root


@torch.no_grad()
def fill(model: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Give a sharded model of the meta device memory and the values of ``source``, which rank 0 alone holds: a
    parameter at a time, so that no other rank ever has more than one whole.
    """
    model.to_empty(device=device)
    values = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = _sent(values, name, parameter, device)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    for name, buffer in model.named_buffers():
        whole = _sent(values, name, buffer, device)
        dist.broadcast(whole, 0)
        buffer.copy_(whole)


def _sent(values: dict[str, Tensor], name: str, like: Tensor, device: torch.device) -> Tensor:
    if dist.get_rank() == 0:
        return values[name].detach().to(device, like.dtype).contiguous()
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; where it is, every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor that may be sharded the values of a whole one, which every rank has."""
    if isinstance(tensor, DTensor):
        value = value.to(tensor.device, tensor.dtype)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_up_over_replicas(root: Root | None, now: bool) -> None:
    """Whether the next backward pass sends the shards' gradients to the other copies of the weights: the last of a
    mini-batch does.
    """
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(now)


@contextmanager
def whole_until_backward(root: Root | None, wanted: bool) -> Iterator[None]:
    """Inside, where ``wanted``, layers that a forward pass gathered stay whole until the backward pass, which every
    forward pass here has to have: one gather less for each, and at the end of the forward all of them in memory.
    """
    if not (wanted and isinstance(root, FSDPModule)):
        yield
        return
    root.set_reshard_after_forward(False)
    yield
    root.set_reshard_after_forward(True)  # not where the pass failed: nothing follows
