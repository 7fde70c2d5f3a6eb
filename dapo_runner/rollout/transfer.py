"""New weights on their way to servers: the trainer's side. `receiver` is the other.

A server is told of them through vLLM's own endpoints (pause, start_weight_update, update_weights, finish_weight_update,
reset_prefix_cache, resume), and every answer that it gives names the version that it finished with.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from dapo_runner.config import Config, ConfigError, RolloutConfig
from dapo_runner.parallel.world import World
from dapo_runner.rollout.client import Server, ServerError

SHARED_MEMORY = Path("/dev/shm")
BACKEND = "dapo_files"  # of vLLM's WeightTransferConfig
POLL = 0.05  # seconds


class FileTransfer:
    """Weights pass as one safetensors file, in a folder that trainer and servers see: by default in this machine's
    shared memory. There is one file, that of the newest version, and it goes with the object.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Raises ConfigError where there can be no such folder."""
        self.world = world
        self.within = config.rollout.server.sync_within
        self.folder = _folder_of(config)
        self.version = ""
        self.mode = _pause_mode(config.rollout)
        self.drains_within = config.rollout.server.answer_within
        world.on_first(lambda: _make_folder(self.folder))
        if world.is_main:
            weakref.finalize(self, shutil.rmtree, self.folder, True)

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the weights, in the place of those before. Collective; rank 0 writes."""
        before, path = self._path(self.version), self._path(version)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in weights if self.world.is_main}
        self.world.on_first(lambda: _write(held, path))
        self.version = version
        self.world.on_first(lambda: before.unlink(missing_ok=True))

    def send(self, server: Server, caller: object = None) -> str:
        """Have one server load what was published last, unless another rank has. Returns its version. Raises
        ServerError; a server that fails half-way does not say that it has the version. ``caller`` may hang up.

        With `rollout.ahead` the responses under way go on with the new weights, what was computed for them before
        anew; without `rollout.partial` they end first. With nothing ahead there are none but those of a trainer that
        is gone.
        """
        post, get = partial(server.post, caller=caller), partial(server.get, caller=caller)
        running = "?reset_running_requests=true" if self.mode == "keep" else ""
        with self._alone_with(server):
            version = self.version  # another thread may publish the next, and what is sent is still what it is called
            if get("/weight_info")["weight_version"] == version and not get("/is_paused")["is_paused"]:
                return version
            post(f"/pause?mode={self.mode}", within=self.drains_within if self.mode == "wait" else self.within)
            try:
                post("/start_weight_update")
            except ServerError:  # one that was left half-way
                post("/finish_weight_update")
                post("/start_weight_update")
            post("/update_weights", {"update_info": {"path": str(self._path(version))}})
            if not post(f"/reset_prefix_cache{running}")["success"]:
                raise ServerError(f"{server}: kept prompt prefixes that it may have computed with earlier weights")
            post("/finish_weight_update", {"weight_version": version})
            post("/resume")
            return version

    def _path(self, version: str) -> Path:
        return self.folder / f"{version.replace(':', '-')}.safetensors"

    @contextmanager
    def _alone_with(self, server: Server) -> Iterator[None]:
        """Several ranks may find a server that is back, and it takes weights from one at a time."""
        if self.world.alone:
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
    if not rollout.ahead:
        return "abort"
    return "keep" if rollout.partial else "wait"


def _folder_of(config: Config) -> Path:
    """Of this run, so that one which takes it up clears away what a kill has left."""
    above = config.rollout.server.folder or SHARED_MEMORY
    run = hashlib.blake2b(str(config.run_dir.absolute()).encode(), digest_size=8).hexdigest()
    return above.absolute() / f"dapo-{os.getuid()}-{run}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        for left in folder.glob("*.safetensors"):  # of a process that was killed
            left.unlink()
    except OSError as error:
        raise ConfigError(f"rollout.server.folder: expected a folder that can be written to: {error}") from error


def _write(weights: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".unfinished")
    save_file(weights, unfinished)
    unfinished.replace(path)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
