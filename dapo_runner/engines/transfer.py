"""Send new weights to servers: the interface of transfers, and the transfer by file. `nccl` needs no file."""

from __future__ import annotations

import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.engines.client import RolloutError, Server, ServerError
from dapo_runner.files import check_writable, lock_file
from dapo_runner.parallel.world import World

SHARED_MEMORY = Path("/dev/shm")
LOCK, BLOCK = "lock", 2**24  # the name of a lock file; bytes per thread of a checksum


class Transfer(ABC):
    """Publish weights, and let servers load the last published ones. Only rank 0 has and sends them."""

    device = torch.device("cpu")  # where they are held
    copies = False  # whether to copy them if the policy is on the same device

    def __init__(self, config: Config, world: World) -> None:
        rollout, self.world, self.timeout = config.rollout, world, config.rollout.server.sync_timeout
        # vLLM's pause mode, which decides about responses in progress.
        self.mode = "abort" if not rollout.max_staleness else "keep" if rollout.partial else "wait"
        self.pause_timeout = rollout.request_timeout if self.mode == "wait" else self.timeout
        self._published: tuple[str | None, Any] = (None, None)  # a version, and the argument of ``_load``

    @classmethod
    @abstractmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError if weights cannot be sent this way."""

    @property
    def version(self) -> str | None:
        """The version of the last published weights."""
        return self._published[0]

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the published weights by the current ones. Collective.

        Raises RolloutError if one is not finite: what a server computes with it would stay in its cache.
        """
        self._published = (self.version, None)  # frees the memory of the previous weights
        local = ((name, tensor.detach()) for name, tensor in weights if self.world.is_main)
        held = {name: tensor.to(self.device, copy=self.copies).contiguous() for name, tensor in local}

        def hold() -> Any:
            for name, tensor in held.items():
                if not torch.stack(torch.aminmax(tensor)).isfinite().all():
                    raise RolloutError(f"weights: {name} must be finite, got NaN or infinity. Nothing was sent.")
            return self._hold(version, held)

        self._published = (version, self.world.run_on_rank0(hold))

    def _hold(self, version: str, weights: dict[str, Tensor]) -> Any:
        """Store the weights on rank 0 and return the argument of ``_load``."""
        return weights

    def close(self) -> None:  # noqa: B027
        """Remove the published weights."""

    async def send(self, server: Server) -> str | None:
        """Let one server load the last published weights. Return their version.

        With asynchronous rollouts the responses in progress continue with the new weights, after their cache is
        recomputed; without `rollout.partial` they finish first. Raises ServerError.
        """
        version, held = self._published  # another thread may publish new ones meanwhile
        found = await server.read("/weight_info", "weight_version")
        is_paused = await server.read("/is_paused", "is_paused")
        if found == version and not is_paused:
            return version
        if not self.world.is_main or held is None:
            raise ServerError(f"{server}: waits for weights {version} from rank 0, has {found}")
        if found != server.version:
            server.version = None  # the server has restarted
        await server.post(f"/pause?mode={self.mode}", timeout=self.pause_timeout)
        await self._load(server, held, is_halfway=is_paused)
        running = "?reset_running_requests=true" if self.mode == "keep" else ""
        if not await server.read(f"/reset_prefix_cache{running}", "success", "POST"):
            raise ServerError(f"{server}: kept prompt prefixes that it may have computed with earlier weights")
        await server.post("/update_weight_version", {"new_version": version})
        await server.post("/resume")
        return version

    @abstractmethod
    async def _load(self, server: Server, held: Any, *, is_halfway: bool) -> None:
        """Let a paused server load the weights. ``is_halfway``: another trainer did not finish."""


class FileTransfer(Transfer):
    """Send weights as a safetensors file, in a folder that rank 0 and the servers share: by default in this machine's
    shared memory. There is only one file, with the newest version.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Create the folder. Raises ConfigError if that fails."""
        super().__init__(config, world)
        self._made = world.run_on_rank0(lambda: _make_folder(config))

    @property
    def folder(self) -> Path:
        assert self._made is not None  # on rank 0
        return Path(self._made[0].name)

    @classmethod
    def check(cls, config: Config) -> None:
        check_writable(_parent_folder(config), "rollout.server.folder")

    def close(self) -> None:
        if self._made is not None:
            self._made[0].cleanup()

    def _hold(self, version: str, weights: dict[str, Tensor]) -> Any:
        path = self.folder / f"{version.replace(':', '-')}.safetensors"
        unfinished = path.with_suffix(".unfinished")
        try:
            save_file(weights, unfinished)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            gib = sum(tensor.nbytes for tensor in weights.values()) / 2**30
            room = f"expected room for the new weights beside the last ones, {gib:.3g} GiB each, in {self.folder}"
            raise ConfigError(f"rollout.server.folder: {room}: {error}") from error
        before = list(self.folder.glob("*.safetensors"))
        unfinished.replace(path)
        for old in before:
            old.unlink()
        return [str(path), str(checksum(path))]

    async def _load(self, server: Server, held: Any, *, is_halfway: bool) -> None:
        await server.post("/collective_rpc", {"method": "load_weights_file", "args": held})


def _parent_folder(config: Config) -> Path:
    return (config.rollout.server.folder or SHARED_MEMORY).absolute()


def _make_folder(config: Config) -> tuple[TemporaryDirectory[str], BinaryIO]:
    """Create a folder for this process only, and lock it while the process lives.

    Remove folders that killed runs have left: in this machine's shared memory of all runs; elsewhere, where machines
    may not see each other's locks, only of this run.
    """
    above = _parent_folder(config)
    prefix = f"dapo-{os.getuid()}-{zlib.crc32(str(config.run_dir.absolute()).encode()):08x}-"
    try:
        above.mkdir(parents=True, exist_ok=True)
        for leftover in above.glob(f"dapo-{os.getuid()}-*" if above == SHARED_MEMORY else f"{prefix}*"):
            with suppress(OSError):  # it is in use, or cannot be removed
                _clear_away(leftover)
        folder = TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True)  # private to the user
        unfinished = Path(folder.name, f"{LOCK}.unfinished")
        lock = lock_file(unfinished)
        unfinished.rename(unfinished.with_name(LOCK))  # only now: a lock file without a lock marks a left-over folder
    except OSError as error:
        raise ConfigError(f"rollout.server.folder: expected a folder that can be written to: {error}") from error
    os.register_at_fork(after_in_child=lock.close)  # a child that outlives this process must not keep the lock
    return folder, lock


def _clear_away(leftover: Path) -> None:
    """Remove a left-over folder of this user; another user may have taken the name. Raises OSError."""
    if leftover.lstat().st_uid == os.getuid() and (leftover / LOCK).exists():
        with lock_file(leftover / LOCK):
            shutil.rmtree(leftover)


def checksum(path: Path) -> int:
    """Return the CRC-32 of the CRC-32s of a file's blocks, which threads compute."""
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda block: zlib.crc32(block.numpy()), data.split(BLOCK)))
    return zlib.crc32(repr(found).encode())
