"""A run's folder: one process at a time writes into it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from dapo_runner.config import Config, ConfigError, dump_config

CONFIG_FILE = "config.yaml"
LOCK_FILE = "lock"


def lock_folder(folder: Path, note: Callable[[str], None]) -> FolderLock:
    """Make a run's folder where there is none, and keep other processes out of it. Raises ConfigError that names the
    process which is in it, or says why nothing can be written there.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.output_dir: expected a folder that can be written to: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = _owner(file)
        file.close()
        raise ConfigError(
            f"{folder}: {owner} trains in this folder, and two would write over each other; wait for it or stop it, "
            "or choose another run.name"
        ) from error
    except OSError as error:  # a file system without locks
        note(f"{path} cannot be locked ({error}): see to it that no other process trains in this folder")
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
    file.flush()
    return FolderLock(file)


class FolderLock:
    """Held until ``release``, or until the process ends, however it ends: the kernel gives it back."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file

    def release(self) -> None:
        self._file.close()


def _owner(file: TextIOWrapper) -> str:
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not said so yet
        return "another process"


def check_alone() -> None:
    """Raises ConfigError in one of several processes that a launcher has started: each would train a run of its own,
    in the same folder.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}: expected one process, which is what this version trains with, found a launcher's "
            f"environment for {world}; start `dapo train` once and without torchrun, or unset WORLD_SIZE"
        )


def write_config(config: Config, folder: Path) -> None:
    """A kill leaves the old file or the new one, never half of it. Raises ConfigError."""
    path = folder / CONFIG_FILE
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text(dump_config(config), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"run.output_dir: expected a folder that can be written to: {error}") from error
