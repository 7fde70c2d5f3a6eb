"""A run's folder: one process at a time writes into it, and all of it comes from one configuration, but for what may
change on the way.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.config import (
    Config,
    ConfigError,
    SftConfig,
    apply_overrides,
    dump_config,
    flatten,
    parse,
    parse_config,
    read_recipe,
)
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.run_log import CHECKPOINTS

CONFIG_FILE = "config.yaml"
LOCK_FILE = "lock"
TINY_MODEL = "model"
# What may change in a run's folder; `changes.jsonl` says what did, after which step. A name that ends in a point stands
# for its whole section. Anything else is another run (run.name), or a fork of this one (run.from).
MAY_CHANGE = (
    "algorithm",  # a name: the settings that it stands for are compared one by one
    # How long, how often, where to.
    *("run.steps", "run.max_tokens", "run.epochs", "run.eval_every", "run.save_every", "run.keep", "run.async_save"),
    *("run.grace", "run.early_stop", "run.early_stop.", "run.name", "run.output_dir", "logging."),
    # What a step takes of machine, memory and patience; its figures stay what they are but for rounding.
    *("run.device", "run.threads", "parallel.", "optimizer.token_budget"),
    *("model.attention", "model.compile", "model.gradient_checkpointing"),
    *("rollout.max_batch_sequences", "rollout.vllm.", "rollout.server.", "rollout.probe."),
    *("reward.workers", "reward.deadline", "reward.plugin_deadline", "reward.calls."),
    *("reward.judge.url", "reward.judge.key_env"),
    # What helps a run in trouble.
    "critic.lr",
    *("optimizer.lr", "optimizer.schedule", "optimizer.min_lr_ratio", "optimizer.grad_clip"),
    *("sampler.max_rounds", "sampler.max_age", "sampler.on_exhausted"),
)

AnyConfig = Config | SftConfig
C = TypeVar("C", bound=AnyConfig)


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
    # A child that a plug-in forks shares the lock, and would keep it when this process is killed.
    os.register_at_fork(after_in_child=file.close)
    return FolderLock(file)


class FolderLock:
    """Held until ``close``, or until the process ends, however it ends: the kernel gives it back."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()


def _owner(file: TextIOWrapper) -> str:
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not said so yet
        return "another process"


def write_config(config: AnyConfig, folder: Path) -> None:
    """A kill leaves the old file or the new one, never half of it. Raises ConfigError."""
    path = folder / CONFIG_FILE
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text(dump_config(config), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"run.output_dir: expected a folder that can be written to: {error}") from error


class Change(NamedTuple):
    """A setting and its values, as YAML has them."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.after!r}"


def read_config(folder: Path, overrides: Iterable[str] = ()) -> Config:
    """What a run was last started with; keys that a later version added have their defaults. Raises ConfigError."""
    raw = apply_overrides(_read(folder, "train"), overrides)
    return _naming_file(folder, lambda: parse_config(raw))


def read_sft_config(folder: Path) -> SftConfig:
    """The same of a supervised run."""
    raw = _read(folder, "sft")
    return _naming_file(folder, lambda: parse(raw, SftConfig))


def _naming_file(folder: Path, read: Callable[[], C]) -> C:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from error


def _read(folder: Path, command: str) -> dict[str, Any]:
    raw = read_recipe(folder / CONFIG_FILE)
    if (found := "train" if "reward" in raw else "sft") != command:
        raise ConfigError(f"{folder}: expected a run of dapo {command}, found one of dapo {found}")
    return raw


def settings_of(config: AnyConfig) -> dict[str, Any]:
    """By dotted keys, as YAML has them."""
    return flatten(yaml.safe_load(dump_config(config)))


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Of settings by dotted keys."""
    keys = sorted(before.keys() | now.keys())
    return [Change(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]


def is_among(key: str, names: Iterable[str]) -> bool:
    """Whether ``names`` has the key, or its section, which ends in a point."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def check_same_run(config: AnyConfig, folder: Path) -> list[Change]:
    """What has changed since the folder's run was last started. Raises ConfigError naming what may not.

    A folder where nothing was logged holds no run yet: what an earlier attempt made there is cleared away.
    """
    if not (folder / CONFIG_FILE).is_file():
        return []
    earlier = read_config(folder) if isinstance(config, Config) else read_sft_config(folder)
    changes = changes_between(settings_of(earlier), settings_of(config))
    refused = [str(change) for change in changes if not is_among(change.key, MAY_CHANGE)]
    log = folder / METRICS_FILE
    if refused and not (log.exists() and log.stat().st_size):
        shutil.rmtree(folder / TINY_MODEL, ignore_errors=True)
        for verdicts in folder.glob("verdicts*.jsonl"):
            verdicts.unlink()
        if isinstance(earlier, Config) and earlier.run.from_ is not None:
            shutil.rmtree(folder / CHECKPOINTS / f"step_{earlier.run.forked_at:06d}", ignore_errors=True)
    elif refused:
        forked = f", with run.from={folder}@STEP to go on from one of its checkpoints"
        fork = forked if find_checkpoints(folder / CHECKPOINTS) else ""
        raise ConfigError(
            f"{folder} holds a run with another configuration ({'; '.join(refused)}); choose another "
            f"run.name{fork}, or remove the folder (docs/watching.md: what may change in a run)"
        )
    return changes
