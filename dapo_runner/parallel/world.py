"""The processes of a run, as started by torchrun, and their communication.

Every rank runs the same loop and makes the same decisions; the work is divided. The index of a rank is

    rank = replica · shard + rank within the replica        weights: each replica is sharded over its ranks
    rank = data rank · sequence + sequence rank             positions: neighbours share those of a micro-batch
    rank = engine · rollout_tensor + rank within the engine rollouts: neighbours share an engine
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dapo_runner.config import Config, ConfigError
from dapo_runner.config.run import is_cuda
from dapo_runner.errors import RunError
from dapo_runner.interrupt import StepAbandonedError
from dapo_runner.parallel.watch import Watch, launched

T = TypeVar("T")


class RankError(RunError):
    """Another rank raised an exception that cannot be pickled. The message contains its text."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks share weights, positions and an engine."""

    size: int = 1
    shard: int = 1
    sequence: int = 1
    rollout_tensor: int = 1

    @property
    def replicate(self) -> int:
        return self.size // self.shard


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """This process among all processes of a run. Without a launcher there is no process group.

    Objects are pickled and sent through host memory. If ``work`` raises on one rank, the method that runs it raises on
    all ranks.
    """

    rank: int = 0
    layout: Layout = Layout()
    mesh: DeviceMesh | None = None  # (shard) or (replicate, shard), for the weights
    sequence_group: dist.ProcessGroup | None = None  # ranks that share the positions of a micro-batch, if several
    watch: Watch | None = None
    group: dist.ProcessGroup | None = None  # None: the default group

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def is_single_process(self) -> bool:
        return self.mesh is None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """A prefix for messages about this rank; "" in a single process."""
        return "" if self.is_single_process else f"rank {self.rank} on {socket.gethostname()}: "

    @property
    def data_size(self) -> int:
        """The number of micro-batches computed at the same time."""
        return self.size // self.layout.sequence

    @property
    def data_rank(self) -> int:
        return self.rank // self.layout.sequence

    @property
    def is_sequence_leader(self) -> bool:
        """Whether this rank reports what its sequence-parallel group has computed."""
        return self.rank % self.layout.sequence == 0

    @property
    def is_engine_leader(self) -> bool:
        """Whether this rank reports the responses of its engine."""
        return self.rank % self.layout.rollout_tensor == 0

    @property
    def device(self) -> torch.device | None:
        """The GPU of this rank; None if `run.device` decides."""
        if self.mesh is None or self.mesh.device_type == "cpu":
            return None
        return torch.device("cuda", torch.cuda.current_device())

    def all_gather_object(self, item: T) -> list[T]:
        """Return the item of every rank, in the order of ranks."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def gather_shares(self, item: T) -> list[T]:
        """Return the item of each data rank, in order."""
        return self.all_gather_object(item)[:: self.layout.sequence]

    def any(self, flag: bool) -> bool:
        return any(self.all_gather_object(flag))

    def run_and_gather(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank and return all results."""
        outcome = Outcome.of(work)
        outcomes = self.all_gather_object(outcome.portable(self))
        outcomes[self.rank] = outcome  # keeps its traceback
        return [each.value() for each in outcomes]

    def run_or_raise_everywhere(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result."""
        results: list[T] = []
        self.run_and_gather(lambda: results.append(work()))
        return results[0]

    def run_on_rank0(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0 and return its result there, None on other ranks."""
        return self.run_or_raise_everywhere(lambda: work() if self.is_main else None)

    def broadcast_from_rank0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on every rank."""
        if self.size == 1:
            return work()
        outcome = Outcome.of(work) if self.is_main else None
        received: list[Any] = [outcome and outcome.portable(self)]
        dist.broadcast_object_list(received, group=self.group)
        return cast(T, (outcome or received[0]).value())

    def scatter_from_rank0(self, items: Sequence[T], copies: int = 1) -> T:
        """Return item ``rank // copies`` of rank 0's ``items`` on each rank. Other ranks may pass anything.

        Rank 0 pickles all, then sends each item once. Ranks with the same item pass it on from one to the next.
        """
        if self.size == 1:
            return items[0]
        pickled = [pickle.dumps(item) for item in items] if self.is_main else []
        for index, data in enumerate(pickled[1:], 1):
            dist.send_object_list([data], group=self.group, group_dst=copies * index)
        copy = self.rank % copies
        data = pickled[0] if self.is_main else self._receive(self.rank - 1 if copy else 0)
        if copy + 1 < copies:
            dist.send_object_list([data], group=self.group, group_dst=self.rank + 1)
        return items[0] if self.is_main else cast(T, pickle.loads(data))

    def run_and_gather_on_rank0(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank. Rank 0 returns all results, or raises an error of any rank; others return []."""
        outcome = Outcome.of(work)
        self.all_gather_object(None)  # a rank that is lost is noticed by all that wait
        if not self.is_main:
            dist.send_object_list([outcome.portable(self)], group=self.group, group_dst=0)
            return []
        return [each.value() for each in (outcome, *map(self._receive, range(1, self.size)))]

    def _receive(self, rank: int) -> Any:
        received: list[Any] = [None]
        dist.recv_object_list(received, group=self.group, group_src=rank)
        return received[0]

    def close(self, error: BaseException | None) -> None:
        """End the run on this rank. Raises RankLostError if ``error`` comes from the loss of another rank."""
        if error is None and self.device is not None:
            dist.destroy_process_group()
        if error is not None and self.watch is not None:
            explained = self.watch.explain(error)
            if explained is not error:
                raise explained from error

    def all_stopped(self, error: BaseException) -> bool:
        """Return whether every rank has stopped with an error of its own. Then collectives still work."""
        return self.watch is None or self.watch.all_stopped(error)

    def new_group(self, timeout: float) -> World:
        """Return the same ranks with a new gloo group, for a thread of each, with its own ``timeout``. Collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return replace(self, group=cast("dist.ProcessGroup", group))


SINGLE_PROCESS = World()


class Outcome(NamedTuple):
    """A result, or the exception that was raised instead."""

    result: Any
    error: BaseException | None

    @staticmethod
    def of(work: Callable[[], Any]) -> Outcome:
        try:
            return Outcome(work(), None)
        except (Exception, StepAbandonedError) as error:  # raised again by `value`
            return Outcome(None, error)

    def portable(self, world: World) -> Outcome:
        """Return the same outcome with an exception that can be pickled."""
        with suppress(Exception):
            if self.error is None or str(pickle.loads(pickle.dumps(self.error))) == str(self.error):
                return self
        return Outcome(None, RankError(f"{world.name}{type(self.error).__name__}: {self.error}"))

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


def open_world(config: Config) -> World:
    """Join the process group of the ranks. Raises ConfigError if their number does not fit `parallel`."""
    if not launched():
        _check_single_process(config)
        return SINGLE_PROCESS
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    layout = make_layout(config, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    on_gpus, timeout = is_cuda(config.run.device), timedelta(seconds=config.parallel.timeout)
    if on_gpus:
        index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= count:
            raise ConfigError(f"run.device: expected a GPU for each process, got {count}. Start fewer, or use the CPU")
        torch.cuda.set_device(index)
    if not dist.is_initialized():
        device = torch.device("cuda", index) if on_gpus else None
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=timeout, device_id=device)
    world = make_world(layout, rank, "cuda" if on_gpus else "cpu", timeout)
    Watch.attempt = world.broadcast_from_rank0(lambda: os.urandom(8).hex())  # the store outlives a restart
    watch = Watch()
    watch.set_phase("loading")
    return replace(world, watch=watch)


def make_world(layout: Layout, rank: int, device_type: str, timeout: timedelta | None = None) -> World:
    """Return the world of ``rank`` in an existing process group. ``timeout`` applies to the subgroups."""
    dims = {"shard": layout.shard} if layout.replicate == 1 else {"replicate": layout.replicate, "shard": layout.shard}
    mesh = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    if timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
    sequence = None if layout.sequence == 1 else dist.new_subgroups(layout.sequence, timeout=timeout)[0]
    return World(rank, layout, mesh, cast("dist.ProcessGroup | None", sequence))


def make_layout(config: Config, size: int, per_node: int) -> Layout:
    """Divide the work over ``size`` ranks, ``per_node`` on each machine. Raises ConfigError."""
    settings = config.parallel
    if settings.gpus not in (1, size):
        raise ConfigError(f"parallel.gpus: expected {settings.gpus} processes, got {size}")
    shard = max(1, size // settings.replicate)
    divided = {"replicate": size, "sequence": shard, "rollout_tensor": per_node}
    for name, number in divided.items():
        if number % getattr(settings, name):
            raise ConfigError(f"parallel.{name}: expected a divisor of {number}, got {getattr(settings, name)}")
    return Layout(size, shard, settings.sequence, settings.rollout_tensor)


def _check_single_process(config: Config) -> None:
    """Raise ConfigError if several processes were configured, or started by a launcher that torch does not support."""
    size, gpus = os.environ.get("WORLD_SIZE", ""), config.parallel.gpus
    if size.isdigit() and int(size) > 1:
        raise ConfigError(f"WORLD_SIZE={size}: requires RANK, MASTER_ADDR and MASTER_PORT. Start with torchrun")
    if gpus > 1:
        raise ConfigError(
            f"parallel.gpus: expected {gpus} processes, got one. Start with `dapo launch RECIPE --gpus {gpus}`, or use "
            "--dry-run or --simulate"
        )
    make_layout(config, 1, 1)
