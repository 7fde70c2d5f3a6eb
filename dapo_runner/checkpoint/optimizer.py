"""The folder ``optimizer/``: float32 masters and optimizer state, in safetensors files of torch.distributed.checkpoint.

Each rank writes and reads its own shards. The only metadata are the headers of the files.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint.files import CheckpointError
from dapo_runner.parallel.sharding import local
from dapo_runner.parallel.world import World
from dapo_runner.policy.lora import has_adapters

FOLDER = "optimizer"
_MASTER = "master"
_FILE_BYTES = 2**30  # a file is assembled in memory


def optimizer_tensors(learner: Learner, *, copied: bool) -> dict[str, Tensor]:
    """Return the optimizer state of all trained weights by name, and the masters that model/ does not contain; as
    shards if the weights are sharded. ``copied``: return copies on the CPU.
    """
    tensors, policy = {}, learner.policy
    is_exact = policy.world.is_single_process and policy.compute == torch.float32 and not has_adapters(policy.model)
    for part in learner.parts():
        for name, master in part.tensors.items():
            if part.prefix or not is_exact:  # else model/ has it
                tensors[f"{part.prefix}{name}/{_MASTER}"] = master.detach()
            for kind, value in part.state_of(master).items():
                tensors[f"{part.prefix}{name}/{kind}"] = value
    if not copied:
        return tensors
    with closing(DefaultStager(StagingOptions(*[False] * 4))) as stager:
        return cast("dict[str, Tensor]", stager.stage(tensors))


def save_optimizer(tensors: dict[str, Tensor], checkpoint: Path, world: World) -> list[Path]:
    """Write the tensors and return the files of this rank. Collective. Raises OSError, the same on all ranks."""
    folder = checkpoint / FOLDER
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_of_each(tensors), save_distributed=True)
    with _raising_cause(world):
        save(tensors, storage_writer=writer, process_group=world.group, no_dist=world.is_single_process)
    return list(folder.glob(f"shard-{world.rank + 1:05d}-*"))


def load_optimizer(learner: Learner, checkpoint: Path) -> None:
    """Restore masters and optimizer state. What the checkpoint lacks, such as a fork's new critic, does not change.

    Collective. Raises CheckpointError for a checkpoint of other weights.
    """
    reader, world, parts = HuggingFaceStorageReader(str(checkpoint / FOLDER)), learner.world, learner.parts()
    masters = {f"{part.prefix}{name}": x for part in parts for name, x in part.tensors.items()}
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        stored: dict[str, Any] = world.run_or_raise_everywhere(reader.read_metadata).state_dict_metadata
        for key, entry in stored.items():
            name, _, kind = key.rpartition("/")
            if name in masters:
                found[name][kind] = _target(name, kind, entry, masters[name])
        wanted = {f"{name}/{kind}": tensor for name, tensors in found.items() for kind, tensor in tensors.items()}
        with _raising_cause(world):
            load(wanted, storage_reader=reader, no_dist=world.is_single_process)
    except OSError as error:
        raise CheckpointError(f"cannot load {checkpoint}: {error}") from error
    for part in parts:
        for name, master in part.tensors.items():
            state = {kind: x for kind, x in found[f"{part.prefix}{name}"].items() if kind != _MASTER}
            if state and part.optimizer is not None:
                part.optimizer.state[master] = state
        part.publish()


def _target(name: str, kind: str, entry: Any, master: Tensor) -> Tensor:
    """Return the tensor to read into: the master itself, or zeros with the same sharding."""
    if not entry.size:
        return torch.zeros((), dtype=entry.properties.dtype, device=master.device)
    if entry.size != master.shape:
        raise CheckpointError(f"{name}: expected shape {list(master.shape)}, got {list(entry.size)} in the checkpoint")
    return master.detach() if kind == _MASTER else torch.zeros_like(master.detach(), dtype=entry.properties.dtype)


def _file_of_each(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the number of each tensor's file, from 1."""
    numbers, number, filled = dict[str, int](), 1, 0
    for name, tensor in tensors.items():
        size = local(tensor).nbytes
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        numbers[name] = number
    return numbers


@contextmanager
def _raising_cause(world: World) -> Iterator[None]:
    """Raise the cause on the first failed rank in place of a CheckpointException, which is a BaseException."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended in a single process
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, OSError) and not world.is_single_process:
            raise OSError(f"rank {rank}: {cause}") from error
        raise cause from error
