"""FSDP2: shard weights over the ranks, with one parameter group per block and one for all other parameters.

Trained shards are float32, computation is in the model's dtype, and gradients are reduced in float32. So an AdamW step
is the same as with float32 masters. A parameter is whole only inside the forward of the module that owns it. Forwards
are collective: every rank must run the same number.
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
    """Run ``root(work)`` while the parameters outside all blocks, which head and loss use, are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: nn.Module, blocks: Iterable[nn.Module], world: World, compute: torch.dtype) -> Root:
    """Shard a model in place. Each of ``blocks`` is gathered in its forward, other parameters in ``Root.forward``."""
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    # Without reshard_after_forward the root would stay whole after a pass under no_grad, and the next pass would ignore
    # changes of its shards.
    root = Root(model)
    fully_shard(root, mesh=world.mesh, mp_policy=precision, reshard_after_forward=True)
    return root


@torch.no_grad()
def fill(model: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Move a sharded model from the meta device to ``device`` with the values of ``source``, which only rank 0 has.

    Tensors are sent one at a time, so that other ranks hold at most one whole tensor. Collective.
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
    """Return the whole of a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_up_over_replicas(root: Root | None, now: bool) -> None:
    """Set whether the next backward pass reduces gradients over replicas: only the last of a mini-batch must."""
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(now)


@contextmanager
def whole_until_backward(root: Root | None, wanted: bool) -> Iterator[None]:
    """Keep layers whole between forward and backward pass, if ``wanted``. Each forward then needs a backward."""
    if not (wanted and isinstance(root, FSDPModule)):
        yield
        return
    root.set_reshard_after_forward(False)
    yield
    root.set_reshard_after_forward(True)  # not after an error: then no pass follows
