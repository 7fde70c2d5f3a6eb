"""New weights on their way to servers: what every transfer does, and the one by file. `nccl` needs no file."""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.files import check_writable, lock_file
from dapo_runner.parallel.world import World
from dapo_runner.rollout.client import RolloutError, Server, ServerError

SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"


class Transfer(ABC):
    """Publishes weights, and has servers load what was published last. Rank 0 alone has and sends them.

    ``device``: where they are held; ``copies``: also where the policy has them there.
    """

    device = torch.device("cpu")
    copies = False

    def __init__(self, config: Config, world: World) -> None:
        rollout = config.rollout
        self.world = world
        self.within = rollout.server.sync_within
        # vLLM's name for what becomes of the responses under way.
        self.mode = "abort" if not rollout.max_staleness else "keep" if rollout.partial else "wait"
        self.pause_within = rollout.server.answer_within if self.mode == "wait" else self.within
        self._published: tuple[str | None, Any] = (None, None)  # a version and what ``_load`` is given

    @classmethod
    @abstractmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError where weights cannot pass."""

    @property
    def version(self) -> str | None:
        """Of the weights that were published last."""
        return self._published[0]

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the weights as they are now, in the place of those before. Collective.

        Raises RolloutError where one is not finite: what a server computes with it stays in its cache.
        """
        self._published = (self.version, None)  # makes room
        own = ((name, tensor.detach()) for name, tensor in weights if self.world.is_main)
        held = {name: tensor.to(self.device, copy=self.copies).contiguous() for name, tensor in own}

        def hold() -> Any:
            for name, tensor in held.items():
                if not torch.stack(torch.aminmax(tensor)).isfinite().all():
                    raise RolloutError(f"weights: {name} must be finite, got NaN or infinity. Nothing was sent.")
            return self._hold(version, held)

        self._published = (version, self.world.run_on_rank0(hold))

    def _hold(self, version: str, weights: dict[str, Tensor]) -> Any:
        """Keep the weights on rank 0 and return what ``_load`` is given."""
        return weights

    def close(self) -> None:  # noqa: B027
        """Remove what was published."""

    async def send(self, server: Server) -> str | None:
        """Have one server load what was published last and return its version.

        With asynchronous rollouts the responses under way go on with the new weights, what was computed for them before
        anew; without `rollout.partial` they end first. Raises ServerError.
        """
        version, held = self._published  # another thread may publish the next
        found = await server.read("/weight_info", "weight_version")
        is_paused = await server.read("/is_paused", "is_paused")
        if found == version and not is_paused:
            return version
        if not self.world.is_main or held is None:
            raise ServerError(f"{server}: waits for weights {version} from rank 0, and has {found}")
        if found != server.version:
            server.version = None  # it has started anew
        await server.post(f"/pause?mode={self.mode}", within=self.pause_within)
        await self._load(server, held, is_halfway=is_paused)
        running = "?reset_running_requests=true" if self.mode == "keep" else ""
        if not await server.read(f"/reset_prefix_cache{running}", "success", "POST"):
            raise ServerError(f"{server}: kept prompt prefixes that it may have computed with earlier weights")
        await server.post("/update_weight_version", {"new_version": version})
        await server.post("/resume")
        return version

    @abstractmethod
    async def _load(self, server: Server, held: Any, *, is_halfway: bool) -> None:
        """Have a paused server load the weights. ``is_halfway``: another trainer did not get to the end."""


class FileTransfer(Transfer):
    """Weights pass as one safetensors file, in a folder that rank 0 and the servers see: by default in this machine's
    shared memory. There is one file, that of the newest version.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Raises ConfigError where the folder cannot be made."""
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
            raise ConfigError(
                f"rollout.server.folder: expected room for the new weights beside the last ones, {gib:.3g} GiB each, "
                f"in {self.folder}: {error}"
            ) from error
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
    """Make a folder for this process alone, and lock it as long as that lives.

    What killed runs have left is removed: in this machine's shared memory that of any run, elsewhere, where machines
    may not see each other's locks, of this one.
    """
    above = _parent_folder(config)
    run = hashlib.blake2b(str(config.run_dir.absolute()).encode(), digest_size=8).hexdigest()
    prefix = f"dapo-{os.getuid()}-{run}-"
    try:
        above.mkdir(parents=True, exist_ok=True)
        for leftover in above.glob(f"dapo-{os.getuid()}-*" if above == SHARED_MEMORY else f"{prefix}*"):
            with suppress(OSError):  # in use, or not to be removed
                _clear_away(leftover)
        folder = TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True)  # nobody else's to enter
        unfinished = Path(folder.name, f"{LOCK}.unfinished")
        lock = lock_file(unfinished)
        unfinished.rename(unfinished.with_name(LOCK))  # only now: one that can be locked is taken for left over
    except OSError as error:
        raise ConfigError(f"rollout.server.folder: expected a folder that can be written to: {error}") from error
    os.register_at_fork(after_in_child=lock.close)  # a child that outlives this process does not keep it
    return folder, lock


def _clear_away(leftover: Path) -> None:
    """Remove it unless it is another user's, who may have taken the name in a folder for all. Raises OSError."""
    if leftover.lstat().st_uid == os.getuid() and (leftover / LOCK).exists():
        with lock_file(leftover / LOCK):
            shutil.rmtree(leftover)


def checksum(path: Path) -> int:
    """Return the sum of a file's 8-byte words, of the bytes behind the last one, and of its size."""
    size = path.stat().st_size
    words = torch.from_file(str(path), size=size // 8, dtype=torch.int64)
    rest = torch.from_file(str(path), size=size, dtype=torch.uint8)[size // 8 * 8 :]
    return int(words.sum()) + int(rest.sum()) + size
