"""A run's folder: its lock, its configuration, and the settings that may change when a run resumes."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.config import Config, ConfigError, SftConfig, apply_overrides, dump_config, flatten, parse, read_recipe
from dapo_runner.config.reading import CONFIG_FILE, may_change
from dapo_runner.files import atomic_write, check_writable, lock_file
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.logging.trackers import STATE_FILE
from dapo_runner.logging.versions import this_version

MADE_BY = "# made by "  # first line of CONFIG_FILE, followed by a version
LOCK_FILE = "lock"
TINY_MODEL = "model"

AnyConfig = Config | SftConfig
C = TypeVar("C", bound=AnyConfig)


def lock_folder(folder: Path, note: Callable[[str], None]) -> BinaryIO:
    """Create a run's folder if needed and lock it against other processes, until the returned file is closed or the
    process ends, also by `kill -9`.

    Raises ConfigError if another process holds the lock, which the message names, or if the folder is not writable.
    """
    path = folder / LOCK_FILE
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = lock_file(path, note)
    except BlockingIOError as error:
        owner = path.read_text(encoding="utf-8").strip() or "another process"  # which has not written its name yet
        raise ConfigError(f"run.name: expected a free folder, got {folder}, used by {owner}. Stop it first.") from error
    except PermissionError as error:
        raise ConfigError(f"run.name: {error}. If no other user's process trains there, remove that file.") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    file.flush()
    # A child that a plug-in forks shares the lock, and would keep it after this process is killed.
    os.register_at_fork(after_in_child=file.close)
    return file


def write_config(config: AnyConfig, folder: Path) -> None:
    """Write the configuration, under a line with this version, atomically."""
    atomic_write(folder / CONFIG_FILE, f"{MADE_BY}{this_version()}\n{dump_config(config)}")


class Change(NamedTuple):
    """A setting and its values before and after, as in YAML."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.after!r}"


def read_config(folder: Path, kind: type[C], overrides: Sequence[str] = ()) -> C:
    """Return the configuration of the last start, with defaults for settings added since. Raises ConfigError."""
    raw = read_recipe(path := folder / CONFIG_FILE)
    if raw and (found := Config if "reward" in raw else SftConfig) is not kind:
        wanted, got = ("train" if one is Config else "sft" for one in (kind, found))
        raise ConfigError(f"{folder}: expected a run of dapo {wanted}, found one of dapo {got}")
    try:
        return parse(apply_overrides(raw, overrides), kind)
    except ConfigError as error:
        if overrides:
            read_config(folder, kind)  # raises if the file is invalid without them
            raise
        version = version_of(folder)
        other = "" if version == this_version() else f" (the run was last started with {version}: use that)"
        raise ConfigError(f"{path}: {error}{other}. Or correct the file.") from error


def version_of(folder: Path) -> str:
    """Return the version of this package that last started a folder's run."""
    line = (folder / CONFIG_FILE).read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix(MADE_BY) if line.startswith(MADE_BY) else "an older version"


def settings_of(config: AnyConfig) -> dict[str, Any]:
    """Return the settings by dotted keys, with values as in YAML, without empty sections."""
    return {key: value for key, value in flatten(config.model_dump(mode="json", by_alias=True)).items() if value != {}}


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ. Both mappings have dotted keys."""
    keys = sorted(before.keys() | now.keys())
    return [Change(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]


def is_among(key: str, names: Iterable[str]) -> bool:
    """Return whether ``names`` contains the key or a section that it is in."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def check_same_run(config: AnyConfig, folder: Path, *, clears: bool = False) -> list[Change]:
    """Return what differs from the folder's run: settings and `version`. Raises ConfigError if one may not change.

    A folder without a step in its log or checkpoints holds no run yet. If the caller has locked it and ``clears``, what
    an earlier attempt with other settings wrote there is removed.
    """
    if not (folder / CONFIG_FILE).is_file():
        return []
    earlier = read_config(folder, type(config))
    changes = changes_between(settings_of(earlier), settings_of(config))
    refused = [str(change) for change in changes if not may_change(change.key, type(config))]
    log, forked_at = folder / METRICS_FILE, earlier.run.forked_at if isinstance(earlier, Config) else 0
    trained = [found for found in find_checkpoints(folder / CHECKPOINTS, damaged=True) if found.step != forked_at]
    has_steps = bool(trained) or (log.exists() and log.stat().st_size > 0)
    if refused and clears and not has_steps:
        shutil.rmtree(folder / TINY_MODEL, ignore_errors=True)
        for written in (*folder.glob("verdicts*.jsonl"), *folder.glob(STATE_FILE)):
            written.unlink()
        shutil.rmtree(folder / CHECKPOINTS / f"step_{forked_at:06d}", ignore_errors=True)  # of a fork
    elif refused and has_steps:
        forked = f", with run.from={folder}@STEP to go on from one of its checkpoints"
        fork = forked if isinstance(config, Config) and find_checkpoints(folder / CHECKPOINTS) else ""
        raise ConfigError(
            f"run.name: expected the configuration of {folder}, got changes: {'; '.join(refused)}. Set the old "
            f"values, choose another run.name{fork}, or remove the folder. docs/watching.md lists what may change."
        )
    return [*changes, *changes_between({"version": version_of(folder)}, {"version": this_version()})]
