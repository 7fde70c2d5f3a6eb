"""Where every rank is, so that one that is lost or stuck can be named: told through the store that the ranks met by."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dapo_runner.errors import RunError

DYING = 1.0  # seconds that a process may take to go
PRINTED_WITHIN = 1.0  # seconds that the rank whose message is printed may take for it
MEETING = 10.0  # seconds between ranks that stop with the same error
MARKS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")  # of a collective that failed


class RankLostError(RunError):
    """A rank is gone, stuck, or stopped with an error of its own; the message names it and its host."""


class Watch:
    """One rank's view. Where no launcher started it, it says and hears nothing."""

    def __init__(self) -> None:
        self.rank = self.size = 0
        self._store: PrefixStore | None = None
        if launched():
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            try:
                store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
            except dist.DistError:  # its host is gone: every rank speaks for itself
                return
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = PrefixStore(f"dapo/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)

    def set_phase(self, phase: str, error: str | None = None) -> None:
        """What this rank turns to, or stops with."""
        if self._store is not None:
            note = {"phase": phase, "since": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
            with suppress(RuntimeError):  # its host may be gone
                self._store.set(f"at/{self.rank}", json.dumps(note | {"error": error}))

    def explain(self, error: BaseException) -> BaseException:
        """``error``, told to the other ranks; or, where it is only that another rank does not answer, which one."""
        if self._store is None or isinstance(error, KeyboardInterrupt):
            return error
        if not _is_of_a_collective(error):
            self.set_phase("stopped", f"{type(error).__name__}: {error}".splitlines()[0])
            return error
        try:
            notes = {rank: json.loads(self._store.get(f"at/{rank}")) for rank in range(self.size)}
        except (RuntimeError, ValueError):
            return RankLostError("the launcher that started this run's processes is gone, and other ranks with it")
        return RankLostError(_blame(notes, self.rank))

    def all_stopped(self, error: BaseException) -> bool:
        """Return whether every rank calls this, within ``MEETING`` seconds of each other. Not after a collective that
        failed: its ranks are no longer at the same place.
        """
        if self._store is None or _is_of_a_collective(error):
            return False
        try:
            self._store.set(f"stopping/{self.rank}", "")
            self._store.wait([f"stopping/{rank}" for rank in range(self.size)], timedelta(seconds=MEETING))
        except RuntimeError:  # one of them, or the store's host, is gone or goes on
            return False
        return True

    def says_first(self, text: str) -> bool:
        """Whether no other rank has said it, be it with other numbers."""
        if self._store is None:
            return True
        kind = re.sub(r"\d+", "", text)
        key, own = f"said/{hashlib.sha256(kind.encode()).hexdigest()}", str(self.rank)
        try:
            is_first = bool(self._store.compare_set(key, "", own) == own.encode())
        except RuntimeError:
            return True
        if not is_first:
            time.sleep(PRINTED_WITHIN)  # the launcher ends every rank when one exits: the first has to print before
        return is_first


def launched() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _is_of_a_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)
    )


def _blame(notes: dict[int, dict[str, Any]], own: int) -> str:
    """Who stopped with an error, who is gone, or who has been longest in something else than this rank."""
    for rank, note in notes.items():
        if note["error"] is not None:
            return f"rank {rank} on {note['host']} stopped: {note['error']}"
    elsewhere = [rank for rank in notes if notes[rank]["phase"] != notes[own]["phase"]]
    host, deadline = socket.gethostname(), time.monotonic() + DYING
    while True:  # its connections close before it is gone; others may go because it did
        dead = [rank for rank in notes if notes[rank]["host"] == host and not _is_alive(notes[rank]["pid"])]
        too_late = time.monotonic() > deadline
        for rank in [rank for rank in dead if rank in elsewhere] or (dead if too_late else []):
            note = notes[rank]
            return (
                f"rank {rank} on {host} (process {note['pid']}) ended in {note['phase']!r} without an error. The "
                "launcher prints its exit code; signal 9 is often the kernel's out-of-memory killer. The same command "
                "resumes from the last checkpoint"
            )
        if too_late:
            break
        time.sleep(0.05)
    others = [rank for rank in notes if rank != own]
    rank = min(elsewhere or others, key=lambda rank: notes[rank]["since"])
    note = notes[rank]
    return (
        f"rank {rank} on {note['host']} does not answer: it has been in {note['phase']!r} for "
        f"{time.time() - note['since']:.0f} s; parallel.timeout is how long the others wait"
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
