"""A checkpoint written and put back, on one process or on many; at once, or while training goes on."""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import files, plain, sharded
from dapo_runner.checkpoint.files import Checkpoint, CheckpointError
from dapo_runner.checkpoint.state import FILE, Resumable, load_snapshot, packed, take_snapshot
from dapo_runner.parallel.world import World
from dapo_runner.policy.lora import has_adapters, load_adapters


def save_checkpoint(
    folder: Path,
    step: int,
    learner: Learner,
    sampler: Resumable,
    keep: int,
    snapshot: dict[str, Any] | None = None,
) -> Checkpoint:
    """Write a checkpoint after ``step`` steps and remove all but the newest ``keep``. ``snapshot`` is the state to
    resume from, where that is an earlier one than now. Collective.

    Raises CheckpointError, on all ranks, where one cannot write; the checkpoints before stay as they are.
    """
    return _hold(folder, step, learner, sampler, keep, snapshot, copied=False)(learner.world)


class BackgroundSaves:
    """Writes one checkpoint at a time while training goes on: a thread of each rank, which talk through a group of
    their own. The content is copied before it begins.
    """

    def __init__(self, world: World, timeout: float) -> None:
        """``timeout``: seconds that a rank waits for another. Collective."""
        self._world = world.new_group(timeout)
        self._under_way: Future[Checkpoint] | None = None

    def start(
        self,
        folder: Path,
        step: int,
        learner: Learner,
        sampler: Resumable,
        keep: int,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        """As ``save_checkpoint``, of which ``finish`` has the end. Nothing else may be under way."""
        assert self._under_way is None
        write, future = _hold(folder, step, learner, sampler, keep, snapshot, copied=True), Future[Checkpoint]()

        def work() -> None:
            try:
                future.set_result(write(self._world))
            except BaseException as error:  # raised again by `finish`
                future.set_exception(error)

        self._under_way = future
        threading.Thread(target=work, name="checkpoint", daemon=True).start()

    def finish(self) -> Checkpoint | None:
        """Wait for what is under way; None where nothing is. Raises CheckpointError where it could not be written."""
        future, self._under_way = self._under_way, None
        return None if future is None else future.result()


def _hold(
    folder: Path,
    step: int,
    learner: Learner,
    sampler: Resumable,
    keep: int,
    snapshot: dict[str, Any] | None,
    *,
    copied: bool,
) -> Callable[[World], Checkpoint]:
    """What will be in a checkpoint; what is returned writes it."""
    path = files.place_of(folder, step)
    state = packed(step, snapshot or take_snapshot(sampler), learner.world)
    with _failing_together(path, learner.world):
        unfinished = learner.world.broadcast_from_rank0(lambda: files.begin(folder, step))
        held = None if learner.world.is_single_process else sharded.hold(learner, unfinished, copied=copied)

    def write(world: World) -> Checkpoint:
        with _failing_together(path, world):
            mine = plain.write_learner(learner, unfinished) if held is None else held.write(unfinished, world)

            def entries_of_mine() -> dict[str, Any]:
                return {name: files.entry_of(unfinished / name) for name in mine}

            parts = world.run_and_gather(lambda: sharded.named(world, entries_of_mine))

            def complete() -> None:
                (unfinished / FILE).write_bytes(state)
                files.finish(unfinished, {name: entry for part in parts for name, entry in part.items()}, keep)

            world.broadcast_from_rank0(lambda: sharded.named(world, complete))
        return Checkpoint(path, step)

    return write


@contextmanager
def _failing_together(path: Path, world: World) -> Iterator[None]:
    """What all ranks have raised because one cannot write, as one CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise world.broadcast_from_rank0(partial(files.not_written, path, path.parent, error)) from error


def load_checkpoint(checkpoint: Checkpoint, learner: Learner, sampler: Resumable) -> int:
    """Put everything back; returns how many ranks wrote it. The learner's policy must have been loaded from
    ``checkpoint.model``; one with adapters from the model that training started from. Collective.
    """
    model, world = learner.policy.model, learner.world
    if has_adapters(model):
        world.run_or_raise_everywhere(lambda: load_adapters(model, checkpoint.path / "adapter"))
    _load_optimizer(learner, checkpoint.path)
    return load_snapshot(checkpoint.path, sampler, world)


def _load_optimizer(learner: Learner, path: Path) -> None:
    """Each rank reads what it holds, from the shards of however many ranks, or from the file of one process."""
    shards = path / sharded.OPTIMIZER
    reader = HuggingFaceStorageReader(str(shards if shards.is_dir() else path))
    stored = learner.world.run_or_raise_everywhere(reader.read_metadata).state_dict_metadata
    kinds: dict[str, list[str]] = defaultdict(list)
    for key in stored:
        name, _, kind = key.rpartition("/")
        kinds[name].append(kind)
    parts = learner.parts()
    wanted: dict[str, Tensor] = {}
    for part in parts:
        for name, master in part.tensors.items():
            for kind in kinds[key := f"{part.prefix}{name}"]:
                wanted[f"{key}/{kind}"] = _room_for(kind, stored[f"{key}/{kind}"], master)
    try:
        with warnings.catch_warnings():  # of one process, which is meant
            warnings.simplefilter("ignore")
            load(wanted, storage_reader=reader, no_dist=learner.world.is_single_process)
    except CheckpointException as error:  # a BaseException, raised on all ranks
        raise CheckpointError(f"cannot load {path}: {sharded.told(error)}") from error
    for part in parts:
        for name, master in part.tensors.items():
            key = f"{part.prefix}{name}"
            state = {kind: wanted[f"{key}/{kind}"] for kind in kinds[key] if kind != "master"}
            if state and part.optimizer is not None:
                part.optimizer.state[master] = state
        part.publish()


def _room_for(kind: str, stored: Any, master: Tensor) -> Tensor:
    """What a stored tensor is read into: the master itself, or zeros, sharded as it is."""
    assert isinstance(stored, TensorStorageMetadata)
    if kind == "master":
        return master.detach()
    if not stored.size:
        return torch.zeros((), dtype=stored.properties.dtype, device=master.device)
    return torch.zeros_like(master.detach(), dtype=stored.properties.dtype)
