"""New weights on their way to servers, in a file: the trainer's side. `receiver` is the other; `nccl` needs no file.

A server is told of them through vLLM's own endpoints (pause, start_weight_update, update_weights, finish_weight_update,
reset_prefix_cache, resume), and every answer that it gives names the version that it finished with.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError, RolloutConfig
from dapo_runner.files import check_writable, lock_file
from dapo_runner.parallel.world import World
from dapo_runner.rollout.client import RolloutError, Server, ServerError

SHARED_MEMORY = Path("/dev/shm")
BACKEND = "dapo_files"  # of vLLM's WeightTransferConfig
POLL = 0.05  # seconds
LOCK = "lock"


class Transfer(ABC):
    """Publishes weights, and has servers load what was published last, which is called ``version``."""

    def __init__(self, config: Config, world: World) -> None:
        self.world = world
        self.sends = True  # or another rank does it for this one
        self.within = config.rollout.server.sync_within
        self.version = ""
        self.mode = _pause_mode(config.rollout)
        self.drains_within = config.rollout.server.answer_within
        self._published: dict[str, Any] = {}  # by version, for ``_load``; there is one

    @classmethod
    @abstractmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError where weights cannot pass."""

    @abstractmethod
    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the weights as they are now, in the place of those before. Collective; rank 0 keeps them. Raises
        RolloutError where one is not finite.
        """

    def close(self) -> None:  # noqa: B027
        """Remove what was published."""

    async def send(self, server: Server) -> str:
        """Have one server load what was published last, unless another rank has, and return its version.

        With asynchronous rollouts the responses under way go on with the new weights, what was computed for them before
        anew; without `rollout.partial` they end first. Otherwise there are none but those of a trainer that is gone.

        Raises:
            ServerError: The server failed, perhaps half-way: then it does not state that it has the version.
        """
        async with self._alone_with(server):
            version = self.version  # another thread may publish the next, and what is sent is still what it is called
            present, paused = (await server.get("/weight_info"))["weight_version"], await server.get("/is_paused")
            if present == version and not paused["is_paused"]:
                return version
            if not self.sends:
                raise ServerError(f"{server}: waits for weights {version} from rank 0, and has {present}")
            within = self.drains_within if self.mode == "wait" else self.within
            await server.post(f"/pause?mode={self.mode}", within=within)
            await self._connect(server, present, is_halfway=paused["is_paused"])
            await self._start_update(server)
            if version not in self._published:
                raise ServerError(f"{server}: weights {version} gave way to newer ones")
            await self._load(server, self._published[version])
            running = "?reset_running_requests=true" if self.mode == "keep" else ""
            if not (await server.post(f"/reset_prefix_cache{running}"))["success"]:
                raise ServerError(f"{server}: kept prompt prefixes that it may have computed with earlier weights")
            await server.post("/finish_weight_update", {"weight_version": version})
            await server.post("/resume")
            return version

    async def _start_update(self, server: Server) -> None:
        try:
            await server.post("/start_weight_update")
        except ServerError:  # one that was left half-way
            await server.post("/finish_weight_update")
            await server.post("/start_weight_update")

    def _alone_with(self, server: Server) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def _connect(self, server: Server, present: str, *, is_halfway: bool) -> None:  # noqa: B027
        """Do what a server with weights ``present`` needs before it can take others. ``is_halfway``: it had paused
        already, for a trainer that did not get to the end.
        """

    @abstractmethod
    async def _load(self, server: Server, published: Any) -> None:
        """Have a server that is ready for them take the weights."""


def _pause_mode(rollout: RolloutConfig) -> str:
    """Return vLLM's name for what becomes of the responses under way."""
    if not rollout.max_staleness:
        return "abort"
    return "keep" if rollout.partial else "wait"


class FileTransfer(Transfer):
    """Weights pass as one safetensors file, in a folder that trainer and servers see: by default in this machine's
    shared memory. There is one file, that of the newest version.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Raises ConfigError where there can be no such folder, or a rank does not see it."""
        super().__init__(config, world)

        self._remove: weakref.finalize | None = None

        def make() -> Path:
            folder, lock = _make_folder(config)
            self._remove = weakref.finalize(self, _remove, folder, lock)
            return folder

        self.folder = world.broadcast_from_rank0(make)
        world.run_or_raise_everywhere(lambda: _check_seen(self.folder))

    @classmethod
    def check(cls, config: Config) -> None:
        check_writable(weights_folder(config), "rollout.server.folder")

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        before, path = self._path(self.version), self._path(version)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in weights if self.world.is_main}
        self.world.run_on_rank0(lambda: check_finite(held))
        update = self.world.broadcast_from_rank0(lambda: {"path": str(path), "checksum": _write(held, path)})
        self._published = {version: update}
        self.version = version
        self.world.run_on_rank0(lambda: before.unlink(missing_ok=True))

    def close(self) -> None:
        if self._remove is not None:
            self._remove()

    async def _load(self, server: Server, published: Any) -> None:
        await server.post("/update_weights", {"update_info": published})

    def _path(self, version: str) -> Path:
        return self.folder / f"{version.replace(':', '-')}.safetensors"

    @asynccontextmanager
    async def _alone_with(self, server: Server) -> AsyncIterator[None]:
        """Several ranks may find a server that is back, and it takes weights from one at a time."""
        if self.world.is_single_process:
            yield
            return
        path = self.folder / f"{hashlib.blake2b(server.url.encode(), digest_size=8).hexdigest()}.lock"
        until = time.monotonic() + self.within
        while True:
            try:
                lock = lock_file(path)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    message = f"{server}: another rank has sent weights to it for {self.within:g} s"
                    raise ServerError(message) from None
                await asyncio.sleep(POLL)
        with lock:
            yield


def weights_folder(config: Config) -> Path:
    """Return where the folder is made."""
    return (config.rollout.server.folder or SHARED_MEMORY).absolute()


def _make_folder(config: Config) -> tuple[Path, BinaryIO]:
    """Make it for this process alone, and lock it as long as that lives. What killed runs have left is removed: in this
    machine's shared memory that of any run, elsewhere, where machines may not see each other's locks, of this one.
    """
    above = weights_folder(config)
    run = hashlib.blake2b(str(config.run_dir.absolute()).encode(), digest_size=8).hexdigest()
    prefix = f"dapo-{os.getuid()}-{run}-"
    try:
        above.mkdir(parents=True, exist_ok=True)
        for leftover in above.glob(f"dapo-{os.getuid()}-*" if above == SHARED_MEMORY else f"{prefix}*"):
            _clear_away(leftover)
        own = Path(tempfile.mkdtemp(prefix=prefix, dir=above))  # nobody else's to enter
        lock = lock_file(own / f"{LOCK}.unfinished")
        (own / f"{LOCK}.unfinished").rename(own / LOCK)  # only now: one that can be locked is taken for left behind
        folder = own / "weights"
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"rollout.server.folder: expected a folder that can be written to: {error}") from error
    os.register_at_fork(after_in_child=lock.close)  # a child that outlives this process does not keep it
    return folder, lock


def _remove(folder: Path, lock: BinaryIO) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)
    lock.close()


def _clear_away(leftover: Path) -> None:
    """Remove it unless it is in use, or another user's, who may have taken the name in a folder for all."""
    with suppress(OSError):
        if leftover.lstat().st_uid == os.getuid() and (leftover / LOCK).exists():
            with lock_file(leftover / LOCK):
                shutil.rmtree(leftover)


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
