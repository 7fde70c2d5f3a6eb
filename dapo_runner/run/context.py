"""The context that every rank of a run has: ranks, device, progress display, clock, folder lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import torch

from dapo_runner.config import Config, ConfigError, dump_config
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.versions import this_version
from dapo_runner.parallel.world import World, open_world
from dapo_runner.policy.model import resolve_device
from dapo_runner.preflight.needs import check_needs
from dapo_runner.run.folder import lock_folder
from dapo_runner.timing import StepClock


@dataclass(frozen=True)
class RunContext:
    """The context of a run on one rank. Only rank 0 holds the lock of the run's folder and shows progress."""

    world: World
    device: torch.device
    progress: Progress
    clock: StepClock
    lock: BinaryIO | None
    opened: ExitStack = field(default_factory=ExitStack)  # closed if the start of the run fails

    def close(self, error: BaseException | None) -> None:
        """Close everything. ``error`` is what ended the run, or None. May raise RankLostError."""
        self.progress.close()
        if self.lock is not None:
            self.lock.close()
        self.world.close(error)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            try:
                self.opened.close()
            finally:
                self.close(error)
            raise


def open_context(config: Config, progress: Progress) -> RunContext:
    """Join the other ranks, run the preflight checks and lock the run's folder. Raises ConfigError."""
    world = open_world(config)
    try:
        if len({*world.all_gather_object(f"{this_version()}\n{dump_config(config)}")}) > 1:
            raise ConfigError("expected the same command, recipe and version of dapo-kernels on each machine")
        world.run_or_raise_everywhere(lambda: check_needs(config, world.layout))
        device = world.device or resolve_device(config.run.device)
        shown = progress if world.is_main else Progress()
        lock = world.run_on_rank0(lambda: lock_folder(config.run_dir, shown.note))
    except BaseException as error:
        world.close(error)
        raise

    def on_phase(name: str) -> None:
        shown.phase(name)
        if world.watch is not None:
            world.watch.set_phase(name)

    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    return RunContext(world, device, shown, StepClock(device, on_phase), lock)
