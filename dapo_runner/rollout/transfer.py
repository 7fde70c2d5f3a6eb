"""New weights on their way to servers, in a file: the trainer's side. `receiver` is the other; `nccl` needs no file.

A server is told of them through vLLM's own endpoints (pause, start_weight_update, update_weights, finish_weight_update,
reset_prefix_cache, resume), and every answer that it gives names the version that it finished with.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError, RolloutConfig
from dapo_runner.parallel.world import World
from dapo_runner.rollout.client import RolloutError, Server, ServerError

SHARED_MEMORY = Path("/dev/shm")
BACKEND = "dapo_files"  # of vLLM's WeightTransferConfig
POLL = 0.05  # seconds
LOCK = "lock"


class Transfer(ABC):
    """``version`` is that of the weights that were published last."""

    def __init__(self, config: Config, world: World) -> None:
        self.world = world
        self.sends = True  # or another rank does it for this one
        self.within = config.rollout.server.sync_within
        self.version = ""
        self.mode = _pause_mode(config.rollout)
        self.drains_within = config.rollout.server.answer_within

    @abstractmethod
    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the weights as they are now, in the place of those before. Collective; rank 0 keeps them. Raises
        RolloutError where one is not finite.
        """

    def send(self, server: Server, caller: object = None) -> str:
        """Have one server load what was published last, unless another rank has. Returns its version. Raises
        ServerError; a server that fails half-way does not say that it has the version. ``caller`` may hang up.

        Asynchronous: the responses under way go on with the new weights, what was computed for them before anew;
        without `rollout.partial` they end first. With nothing ahead there are none but those of a trainer that
        is gone.
        """
        post, get = partial(server.post, caller=caller), partial(server.get, caller=caller)
        running = "?reset_running_requests=true" if self.mode == "keep" else ""
        with self._alone_with(server):
            version = self.version  # another thread may publish the next, and what is sent is still what it is called
            present, paused = get("/weight_info")["weight_version"], get("/is_paused")["is_paused"]
            if present == version and not paused:
                return version
            if not self.sends:
                raise ServerError(f"{server}: waits for weights {version} from rank 0, and has {present}")
            post(f"/pause?mode={self.mode}", within=self.drains_within if self.mode == "wait" else self.within)
            self._connect(server, present, paused, caller)
            try:
                post("/start_weight_update")
            except ServerError:  # one that was left half-way
                post("/finish_weight_update")
                post("/start_weight_update")
            self._load(server, version, caller)
            if not post(f"/reset_prefix_cache{running}")["success"]:
                raise ServerError(f"{server}: kept prompt prefixes that it may have computed with earlier weights")
            post("/finish_weight_update", {"weight_version": version})
            post("/resume")
            return version

    def _alone_with(self, server: Server) -> AbstractContextManager[None]:
        return nullcontext()

    def _connect(self, server: Server, present: str, halfway: bool, caller: object) -> None:  # noqa: B027
        """What a server with weights ``present`` has to be told before it can take others, if anything. ``halfway``: it
        had paused already, for one that did not get to the end.
        """

    @abstractmethod
    def _load(self, server: Server, version: str, caller: object) -> None:
        """Have a server that is ready for them take the weights."""


class FileTransfer(Transfer):
    """Weights pass as one safetensors file, in a folder that trainer and servers see: by default in this machine's
    shared memory. There is one file, that of the newest version, and it goes with the object.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Raises ConfigError where there can be no such folder, or a rank does not see it."""
        super().__init__(config, world)

        def made() -> Path:
            folder, lock = _make_folder(config)
            weakref.finalize(self, _remove, folder, lock)
            return folder

        self._checksums: dict[str, int] = {}  # by version; there is one
        self.folder = world.broadcast_from_rank0(made)
        world.run_or_raise_everywhere(lambda: _check_seen(self.folder))

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Transfer``. Raises ConfigError where there is no room for them, RolloutError."""
        before, path = self._path(self.version), self._path(version)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in weights if self.world.is_main}
        self.world.run_on_rank0(lambda: check_finite(held))
        self._checksums = {version: self.world.broadcast_from_rank0(lambda: _write(held, path))}
        self.version = version
        self.world.run_on_rank0(lambda: before.unlink(missing_ok=True))

    def _load(self, server: Server, version: str, caller: object) -> None:
        if (expected := self._checksums.get(version)) is None:
            raise ServerError(f"{server}: weights {version} gave way to newer ones")
        update = {"path": str(self._path(version)), "checksum": expected}
        server.post("/update_weights", {"update_info": update}, caller=caller)

    def _path(self, version: str) -> Path:
        return self.folder / f"{version.replace(':', '-')}.safetensors"

    @contextmanager
    def _alone_with(self, server: Server) -> Iterator[None]:
        """Several ranks may find a server that is back, and it takes weights from one at a time."""
        if self.world.is_single_process:
            yield
            return
        digest = hashlib.blake2b(server.url.encode(), digest_size=8).hexdigest()
        with (self.folder / f"{digest}.lock").open("w") as lock:
            until = time.monotonic() + self.within
            while not _locked(lock.fileno()):
                if time.monotonic() > until:
                    raise ServerError(f"{server}: another rank has sent weights to it for {self.within:g} s")
                time.sleep(POLL)
            yield


def _pause_mode(rollout: RolloutConfig) -> str:
    """vLLM's name for what becomes of the responses under way."""
    if not rollout.max_staleness:
        return "abort"
    return "keep" if rollout.partial else "wait"


def place_of_weights(config: Config) -> Path:
    """Where the folder is made."""
    return (config.rollout.server.folder or SHARED_MEMORY).absolute()


def _make_folder(config: Config) -> tuple[Path, IO[str]]:
    """Make it for this process alone, and lock it as long as that lives. What killed runs have left goes: in this
    machine's shared memory that of any run, elsewhere, where machines may not see each other's locks, of this one.
    """
    above = place_of_weights(config)
    run = hashlib.blake2b(str(config.run_dir.absolute()).encode(), digest_size=8).hexdigest()
    prefix = f"dapo-{os.getuid()}-{run}-"
    try:
        above.mkdir(parents=True, exist_ok=True)
        for left in above.glob(f"dapo-{os.getuid()}-*" if above == SHARED_MEMORY else f"{prefix}*"):
            _clear_away(left)
        own = Path(tempfile.mkdtemp(prefix=prefix, dir=above))  # nobody else's to enter
        lock = (own / f"{LOCK}.unfinished").open("x")
        with suppress(OSError):  # a file system without locks, where nothing is cleared away
            fcntl.flock(lock, fcntl.LOCK_EX)
        Path(lock.name).rename(own / LOCK)  # only now: one that can be locked is taken for left behind
        folder = own / "weights"
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"rollout.server.folder: expected a folder that can be written to: {error}") from error
    os.register_at_fork(after_in_child=lock.close)  # as that of a run's folder
    return folder, lock


def _remove(folder: Path, lock: IO[str]) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)
    lock.close()


def _clear_away(left: Path) -> None:
    """Unless it is in use, or another user's, whom a place for all does not keep from taking the name."""
    with suppress(OSError):
        if left.lstat().st_uid == os.getuid():
            with (left / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"rollout.server.folder: expected a folder that trainer processes on all machines see, {folder} is not "
            f"there on {socket.gethostname()}"
        )


def check_finite(weights: dict[str, Tensor]) -> None:
    """Raise RolloutError where a weight is NaN or infinite: what a server computes with it stays in its cache, and
    spoils the answers to later trainers too.
    """
    for name, tensor in weights.items():
        if not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise RolloutError(f"weights: {name} must be finite, got NaN or infinity. Nothing was sent to the servers.")


def checksum(path: Path) -> int:
    """Return the sum of a file's 8-byte words, of the bytes behind the last one, and of its size."""
    size = path.stat().st_size
    words = torch.from_file(str(path), size=size // 8, dtype=torch.int64)
    rest = torch.from_file(str(path), size=size, dtype=torch.uint8)[size // 8 * 8 :]
    return int(words.sum()) + int(rest.sum()) + size


def _write(weights: dict[str, Tensor], path: Path) -> int:
    """Return the file's checksum."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(weights, unfinished)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        gib = sum(tensor.nbytes for tensor in weights.values()) / 2**30
        raise ConfigError(
            f"rollout.server.folder: expected room for the new weights beside the last ones, {gib:.3g} GiB each, in "
            f"{path.parent}: {error}"
        ) from error
    unfinished.replace(path)
    return checksum(path)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
