"""FSDP2: shard weights over the ranks, a group of parameters per block and one for the rest.

Shards that train are float32, computation runs in the model's dtype and gradients are reduced in float32, so an AdamW
step is that of float32 masters. Parameters are whole only inside the forward of the module that owns them. Forwards are
collective: every rank makes equally many.
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
    """Runs ``root(work)`` where the parameters that belong to no block are whole: head and loss need them outside of
    the model's own forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: nn.Module, blocks: Iterable[nn.Module], world: World, compute: torch.dtype) -> Root:
    """Shard a model in place. ``blocks`` are gathered one at a time, other parameters while ``Root.forward`` runs."""
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
    """Move a sharded model from the meta device to ``device`` with the values of ``source``, which rank 0 alone has.

    They are sent one at a time, so that no other rank holds more than one whole. Collective.
    """
    model.to_empty(device=device)
    values = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if source is not None:
            sent.copy_(values[name])
        if isinstance(tensor, DTensor):
            tensor.copy_(distribute_tensor(sent, tensor.device_mesh, tensor.placements))
        else:
            dist.broadcast(sent, 0)
            tensor.copy_(sent)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_up_over_replicas(root: Root | None, now: bool) -> None:
    """Set whether the next backward pass reduces gradients over replicas, as the last of a mini-batch does."""
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(now)


@contextmanager
def whole_until_backward(root: Root | None, wanted: bool) -> Iterator[None]:
    """Keep layers whole from a forward pass to its backward pass, if ``wanted``. Each forward needs a backward."""
    if not (wanted and isinstance(root, FSDPModule)):
        yield
        return
    root.set_reshard_after_forward(False)
    yield
    root.set_reshard_after_forward(True)  # not where the pass failed: nothing follows
