"""Save and load checkpoints, with one process or several, in the foreground or in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.stateful import Stateful

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import files, model_files, optimizer
from dapo_runner.checkpoint.files import Checkpoint
from dapo_runner.checkpoint.snapshot import STATE_FILE, encode_snapshot, restore_snapshot
from dapo_runner.parallel.world import World
from dapo_runner.policy.lora import adapter_tensors, has_adapters, save_adapters
from dapo_runner.policy.model import Policy
from dapo_runner.threads import in_thread


def save_checkpoint(folder: Path, step: int, learner: Learner, snapshot: dict[str, Any], keep: int) -> Checkpoint:
    """Write a checkpoint with a ``snapshot`` from ``take_snapshot``; remove all but the newest ``keep``. Collective.

    Raises CheckpointError, on all ranks, if one cannot write or weights are not finite. Earlier checkpoints stay.
    """
    return _stage(folder, step, learner, snapshot, keep, copied=False)(learner.world)


class BackgroundSaves:
    """Write one checkpoint at a time in a thread of each rank, from a copy, while training continues."""

    def __init__(self, world: World, timeout: float) -> None:
        """Create a process group for the threads. Waits in it end after ``timeout`` seconds. Collective."""
        self._world = world if world.is_single_process else world.new_group(timeout)
        self._pending: Future[Checkpoint] | None = None

    def start(self, folder: Path, step: int, learner: Learner, snapshot: dict[str, Any], keep: int) -> None:
        """Start ``save_checkpoint`` in the background. The previous save must be finished."""
        self._pending = in_thread(partial(_stage(folder, step, learner, snapshot, keep, copied=True), self._world))

    def finish(self) -> Checkpoint | None:
        """Wait for the save in progress and return its result; None without one. Raises CheckpointError."""
        wait(filter(None, [self._pending]))  # it stays pending if a signal ends the wait
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()


def _stage(
    folder: Path, step: int, learner: Learner, snapshot: dict[str, Any], keep: int, *, copied: bool
) -> Callable[[World], Checkpoint]:
    """Collect the content of a checkpoint, and return the function that writes it. Collective."""
    path, world = folder / f"step_{step:06d}", learner.world
    state = encode_snapshot(step, snapshot, learner.scalers(), world)
    with files.writing(path, folder, world):
        if world.any(not all(part.is_finite() for part in learner.parts())):
            raise FloatingPointError("its weights are not finite")
        unfinished = world.broadcast_from_rank0(lambda: files.begin(path))
        _write_settings(learner.policy, unfinished)
        weights = model_files.stage_model(learner.policy, copied=copied)
    tensors = optimizer.optimizer_tensors(learner, copied=copied)

    def write_own(world: World, written: list[Path]) -> tuple[dict[str, Any], dict[str, int]]:
        """Write this rank's weights. Return the manifest entries of its files and the sizes of its weights."""
        try:
            entries = files.entries_of([*written, *model_files.write_model(weights, unfinished, world)], unfinished)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{world.name}{error}") from error
        return entries, {name: weight.nbytes for name, weight in weights.items()}

    def write(world: World) -> Checkpoint:
        with files.writing(path, folder, world):
            written = optimizer.save_optimizer(tensors, unfinished, world)
            results = world.run_and_gather(lambda: write_own(world, written))

            def complete() -> None:
                model_files.write_index(unfinished, [sizes for _, sizes in results])
                (unfinished / STATE_FILE).write_bytes(state)
                files.finish(unfinished, {name: entry for part, _ in results for name, entry in part.items()}, keep)

            world.broadcast_from_rank0(complete)
        return Checkpoint(path, step)

    return write


def _write_settings(policy: Policy, unfinished: Path) -> None:
    """Write the model's configuration, the tokenizer and the adapters, if any. Collective."""
    adapters = adapter_tensors(policy.model) if has_adapters(policy.model) else {}

    def write() -> None:
        (unfinished / optimizer.FOLDER).mkdir()
        policy.save_settings(unfinished / model_files.FOLDER)
        if adapters:
            save_adapters(policy.model, adapters, unfinished / "adapter")

    policy.world.broadcast_from_rank0(write)


def load_checkpoint(checkpoint: Checkpoint, learner: Learner, sampler: Stateful) -> int:
    """Restore learner, sampler and generators. Return the number of ranks that wrote the checkpoint. Collective.

    The policy must be loaded from ``checkpoint.model``; with LoRA from the base model, because ``checkpoint.model`` has
    the adapters merged in. Raises CheckpointError for a checkpoint of other weights.
    """
    optimizer.load_optimizer(learner, checkpoint.path)
    return restore_snapshot(checkpoint.path, sampler, learner.scalers(), learner.world)
