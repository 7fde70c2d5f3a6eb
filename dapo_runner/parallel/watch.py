"""Publish the phase of every rank in the launcher's store, so that an error can name a lost or stuck rank."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dapo_runner.errors import RunError

DYING = 1.0  # seconds that a process may take to end
PRINTED_WITHIN = 1.0  # seconds for rank 0 to print a shared message
MEETING = 10.0  # seconds between ranks that stop with the same error
MARKS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")  # in errors of failed collectives


class RankLostError(RunError):
    """Another rank is lost, stuck, or stopped with an error. The message names the rank and its host."""


@dataclass
class _Status:
    phase: str
    error: str | None = None
    since: float = field(default_factory=time.time)
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    @property
    def is_dead(self) -> bool:
        """Whether its process on this host has ended. False for other hosts."""
        if self.host != socket.gethostname():
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True


class Watch:
    """Publish the status of this rank and read those of others. Does nothing in a process without a launcher."""

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of this machine, until `open_world` sets one of all
    is_lost = False  # whether this process has seen that the store's host is gone

    def __init__(self) -> None:
        self._store: PrefixStore | None = None
        # torchrun hosts the store. With another launcher rank 0 does, from when the process group exists.
        exists = dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if launched() and exists and not Watch.is_lost:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            try:
                store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
            except dist.DistError:  # the host of the store is gone
                return
            self._store = PrefixStore(f"dapo/{Watch.attempt}", store)

    def set_phase(self, phase: str, error: str | None = None) -> None:
        """Publish the phase of this rank, or the error that stops it."""
        if self._store is not None:
            with suppress(RuntimeError):  # the store's host may be gone
                self._store.set(f"at/{self.rank}", json.dumps(asdict(_Status(phase, error))))

    def explain(self, error: BaseException) -> BaseException:
        """Return a RankLostError for the error of a failed collective. Publish any other error and return it."""
        if self._store is None or isinstance(error, KeyboardInterrupt):
            return error
        if not _is_of_a_collective(error):
            self.set_phase("stopped", f"{type(error).__name__}: {error}".splitlines()[0])
            return error
        try:
            found = {rank: _Status(**json.loads(self._store.get(f"at/{rank}"))) for rank in range(self.size)}
        except (RuntimeError, ValueError):
            Watch.is_lost = True  # connecting to it again would take 20 s
            return RankLostError("the launcher or rank 0 is lost, and other ranks with it")
        return RankLostError(_lost_rank(found, self.rank))

    def all_stopped(self, error: BaseException) -> bool:
        """Return whether every rank calls this within ``MEETING`` seconds. False after a failed collective."""
        if self._store is None or _is_of_a_collective(error):
            return False
        try:
            self._store.set(f"stopping/{self.rank}", "")
            self._store.wait([f"stopping/{rank}" for rank in range(self.size)], timedelta(seconds=MEETING))
        except RuntimeError:  # another rank, or the store's host, is gone or continues
            return False
        return True

    def is_first_to_print(self, text: str) -> bool:
        """Return whether this rank is the first to print this message. Numbers in it are not compared."""
        if self._store is None:
            return True
        key, rank = "printed/" + re.sub(r"\d+", "", text), str(self.rank)
        try:
            if self.rank and not self._store.check([key]):
                time.sleep(PRINTED_WITHIN)  # rank 0 is first where all have it; if one exits, the launcher ends all
            return bool(self._store.compare_set(key, "", rank) == rank.encode())
        except RuntimeError:
            return True


def launched() -> bool:
    """Return whether torchrun, or another launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _is_of_a_collective(error: BaseException) -> bool:
    is_marked = isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)
    return isinstance(error, dist.DistError) or (is_marked and not isinstance(error, RunError))  # may quote a server


def _lost_rank(found: dict[int, _Status], this_rank: int) -> str:
    """Name the rank that stopped with an error, else a dead one, else the one longest in another phase than this."""
    for rank, status in found.items():
        if status.error is not None:
            return f"rank {rank} on {status.host} stopped: {status.error}"
    elsewhere = [rank for rank, status in found.items() if status.phase != found[this_rank].phase]
    dead = _dead_rank(found, elsewhere)
    rank = min(elsewhere or found.keys() - {this_rank}, key=lambda rank: found[rank].since) if dead is None else dead
    status, name = found[rank], f"rank {rank} on {found[rank].host}"
    if dead is not None:  # the launcher prints its exit code or signal
        return f"{name} (process {status.pid}) ended in {status.phase!r} without an error. Run again to resume."
    return f"{name} does not answer: {time.time() - status.since:.0f} s in {status.phase!r} (parallel.timeout)"


def _dead_rank(found: dict[int, _Status], elsewhere: list[int]) -> int | None:
    """Return a dead rank of this host, if any. Prefer one in another phase: the others may have ended because of it.

    Wait up to ``DYING`` seconds, because the connections of a process close before it ends.
    """
    deadline = time.monotonic() + DYING
    while True:
        dead = [rank for rank, status in found.items() if status.is_dead]
        is_late = time.monotonic() > deadline
        if first := [rank for rank in dead if rank in elsewhere] or (dead if is_late else []):
            return first[0]
        if is_late:
            return None
        time.sleep(0.05)
