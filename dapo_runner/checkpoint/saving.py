"""Save and load checkpoints, on one process or many, at once or while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import files, model_files
from dapo_runner.checkpoint.files import Checkpoint
from dapo_runner.checkpoint.model_files import StagedModel
from dapo_runner.checkpoint.optimizer import load_optimizer, optimizer_tensors, save_optimizer, stage
from dapo_runner.checkpoint.snapshot import STATE_FILE, Resumable, encode_snapshot, restore_snapshot, take_snapshot
from dapo_runner.parallel.world import World
from dapo_runner.policy.lora import adapter_tensors, has_adapters, save_adapters
from dapo_runner.policy.model import Policy


def save_checkpoint(
    folder: Path,
    step: int,
    learner: Learner,
    sampler: Resumable,
    keep: int,
    snapshot: dict[str, Any] | None = None,
) -> Checkpoint:
    """Write a checkpoint after ``step`` steps and remove all but the newest ``keep``. Collective.

    Args:
        snapshot: the state to resume from; None for that of now.

    Raises:
        CheckpointError: a rank cannot write. It is raised on all ranks, and earlier checkpoints stay.
    """
    snapshot = snapshot or take_snapshot(sampler)
    return _stage(folder, step, learner, snapshot, keep, copied=False)(learner.world)


class BackgroundSaves:
    """Writes one checkpoint at a time in a thread of each rank while training continues on a copy of the content."""

    def __init__(self, world: World, timeout: float) -> None:
        """Make a process group for the threads, which wait ``timeout`` seconds for each other. Collective."""
        self._world = world if world.is_single_process else world.new_group(timeout)
        self._pending: Future[Checkpoint] | None = None

    def start(
        self,
        folder: Path,
        step: int,
        learner: Learner,
        sampler: Resumable,
        keep: int,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        """Do what ``save_checkpoint`` does; ``finish`` returns its result. The save before must be finished."""
        assert self._pending is None
        snapshot = snapshot or take_snapshot(sampler)
        write = _stage(folder, step, learner, snapshot, keep, copied=True)
        pending = Future[Checkpoint]()

        def run() -> None:
            try:
                pending.set_result(write(self._world))
            except BaseException as error:  # raised again by `finish`
                pending.set_exception(error)

        self._pending = pending
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def finish(self) -> Checkpoint | None:
        """Wait for the save in progress; None without one. Raises CheckpointError where it could not be written."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()


def _stage(
    folder: Path, step: int, learner: Learner, snapshot: dict[str, Any], keep: int, *, copied: bool
) -> Callable[[World], Checkpoint]:
    """Collect the content of a checkpoint, and return the function that writes it. Collective."""
    path, world = files.folder_of(folder, step), learner.world
    state = encode_snapshot(step, snapshot, world)
    with _raising_checkpoint_error(path, world):
        unfinished = world.broadcast_from_rank0(lambda: files.begin(folder, step))
        _write_settings(learner.policy, unfinished)
        model = StagedModel(learner.policy, copied=copied)
    tensors = stage(optimizer_tensors(learner)) if copied else optimizer_tensors(learner)

    def write(world: World) -> Checkpoint:
        with _raising_checkpoint_error(path, world):
            optimizer_files = save_optimizer(tensors, unfinished, world)
            own = world.run_and_gather(lambda: _write_own(model, optimizer_files, unfinished, world))

            def complete() -> None:
                model.write_index(unfinished, [names for _, names in own])
                (unfinished / STATE_FILE).write_bytes(state)
                files.finish(unfinished, {name: entry for part, _ in own for name, entry in part.items()}, keep)

            world.broadcast_from_rank0(complete)
        return Checkpoint(path, step)

    return write


def _write_own(model: StagedModel, others: list[Path], unfinished: Path, world: World) -> tuple[dict[str, Any], Any]:
    """Write this rank's weights. Return the manifest entries of its files and the sizes of its weights by name."""
    try:
        paths = [*others, *model.write(unfinished, world)]
        return {str(path.relative_to(unfinished)): files.entry_of(path) for path in paths}, model.sizes
    except (OSError, SafetensorError) as error:
        raise OSError(f"{world.name}{error}") from error


def _write_settings(policy: Policy, unfinished: Path) -> None:
    """Write the model's configuration, the tokenizer and, where there are any, the adapters. Collective."""
    adapters = adapter_tensors(policy.model) if has_adapters(policy.model) else {}

    def write() -> None:
        policy.save_settings(unfinished / model_files.FOLDER)
        if adapters:
            save_adapters(policy.model, adapters, unfinished / "adapter")

    policy.world.broadcast_from_rank0(write)


@contextmanager
def _raising_checkpoint_error(path: Path, world: World) -> Iterator[None]:
    """Raise the OSError that all ranks have as a CheckpointError. Rank 0 removes what was written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise world.broadcast_from_rank0(partial(files.not_written, path, path.parent, error)) from error


def load_checkpoint(checkpoint: Checkpoint, learner: Learner, sampler: Resumable) -> int:
    """Restore learner, sampler and generators, and return how many ranks wrote the checkpoint. Collective.

    The policy must have been loaded from ``checkpoint.model``; one with adapters from the model that it was trained
    from, because ``checkpoint.model`` has them merged in.

    Raises:
        CheckpointError: the checkpoint is of another version, or of other weights.
    """
    load_optimizer(learner, checkpoint.path)
    return restore_snapshot(checkpoint.path, sampler, learner.world)
