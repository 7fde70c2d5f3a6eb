"""The learner of many ranks, as files: each writes the shards that it holds and its share of the model.

`optimizer/` is torch.distributed.checkpoint's, in its safetensors format, whose only metadata are the files' own
headers. `model/` is transformers': every rank gathers the weights one at a time, keeps those it will write, and no rank
has the whole model.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import files
from dapo_runner.parallel.sharding import local
from dapo_runner.parallel.world import World
from dapo_runner.policy.lora import adapter_tensors, has_adapters, save_adapters
from dapo_runner.policy.model import Policy
from dapo_runner.policy.weights import checkpoint_weights, layer_of

T = TypeVar("T")
OPTIMIZER = "optimizer"
_FILE_BYTES = 2**30  # a file of the optimizer is put together in memory


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank is going to write."""

    weights: dict[str, Tensor]  # on the CPU
    optimizer: dict[str, Tensor]  # the same names on every rank; shards

    def write(self, unfinished: Path, world: World) -> list[str]:
        """Returns the files that this rank has written. Collective. Raises OSError, the same on all ranks."""
        own = _write_weights(self.weights, unfinished / "model", world)
        _write_optimizer(self.optimizer, unfinished / OPTIMIZER, world)
        mine = [own, *(unfinished / OPTIMIZER).glob(f"shard-{world.rank + 1:05d}-*")]
        return [str(path.relative_to(unfinished)) for path in mine if path is not None]


def hold(learner: Learner, unfinished: Path, *, copied: bool) -> Held:
    """Collective. Rank 0 writes what is small already here. ``copied``: on the CPU and apart from the learner, which
    may train on.
    """
    policy = learner.policy
    adapters = adapter_tensors(policy.model) if has_adapters(policy.model) else {}

    def write_small() -> None:
        policy.save_settings(unfinished / "model")
        if adapters:
            save_adapters(policy.model, adapters, unfinished / "adapter")

    policy.world.broadcast_from_rank0(lambda: named(policy.world, write_small))
    return Held(_own_weights(policy), _optimizer_tensors(learner, copied=copied))


def _own_weights(policy: Policy) -> dict[str, Tensor]:
    """This rank's share of the model, by transformers' names on the disk, where several tensors of a layer may be one:
    a layer is always of one rank.
    """
    world, owner, own = policy.world, dict[str, int](), dict[str, Tensor]()
    held = [0] * world.size
    for name, weight in policy.named_weights():
        rank = owner.setdefault(layer_of(name), held.index(min(held)))
        held[rank] += weight.nbytes
        if rank == world.rank:
            own[name] = weight.to("cpu", copy=True).contiguous()
    return dict(checkpoint_weights(policy.model, own.items()))


def _optimizer_tensors(learner: Learner, *, copied: bool) -> dict[str, Tensor]:
    tensors = {}
    for part in learner.parts():
        for name, master in part.tensors.items():
            tensors[f"{part.prefix}{name}/master"] = master.detach()
            for key, value in part.state_of(master).items():
                tensors[f"{part.prefix}{name}/{key}"] = value
    if not copied:
        return tensors
    stager = DefaultStager(StagingOptions(*[False] * 4))
    try:
        return cast("dict[str, Tensor]", stager.stage(tensors))
    finally:
        stager.close()


def _write_weights(own: dict[str, Tensor], folder: Path, world: World) -> Path | None:
    """A file for each rank that has weights, and transformers' index where they are several."""
    sizes = world.all_gather_object({name: tensor.nbytes for name, tensor in own.items()})
    holders = [rank for rank in range(world.size) if sizes[rank]]
    names = {rank: f"model-{n:05d}-of-{len(holders):05d}.safetensors" for n, rank in enumerate(holders, start=1)}
    if len(holders) == 1:
        names = {holders[0]: "model.safetensors"}

    def write() -> Path | None:
        if world.is_main and len(holders) > 1:
            weights = {name: names[rank] for rank in holders for name in sizes[rank]}
            total = sum(sum(part.values()) for part in sizes)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        if not own:
            return None
        path = folder / names[world.rank]
        save_file(own, path, metadata={"format": "pt"})
        files.force_to_disk(path)
        return path

    return world.run_or_raise_everywhere(lambda: named(world, write))


def _write_optimizer(tensors: dict[str, Tensor], folder: Path, world: World) -> None:
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_of_each(tensors), save_distributed=True)
    try:
        save(tensors, storage_writer=writer, process_group=world.group)
    except CheckpointException as error:  # a BaseException, raised on all ranks
        raise told(error) from error


def _file_of_each(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Which of a rank's files a tensor goes to, counted from 1."""
    files_of, number, filled = dict[str, int](), 1, 0
    for name, tensor in tensors.items():
        size = local(tensor).nbytes
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        files_of[name] = number
    return files_of


def told(error: CheckpointException) -> BaseException:
    """What the first of the failed ranks raised, as an ``Exception`` that names it."""
    rank, (cause, _) = min(error.failures.items())
    return OSError(f"rank {rank}: {cause}") if isinstance(cause, OSError) else cause


def named(world: World, work: Callable[[], T]) -> T:
    """What ``work`` gives; where it cannot write, it says on which of several ranks and machines."""
    if world.is_single_process:
        return work()
    try:
        return work()
    except (OSError, SafetensorError) as error:
        raise OSError(f"rank {world.rank} on {socket.gethostname()}: {error}") from error
