"""Start a run from the checkpoint of another one: `run.from=RUN@STEP`.

The fork continues with the checkpoint's weights, optimizer, sampler, random generators and step number. Other settings
may change. The checkpoint is copied, so the fork does not depend on the other run afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo_runner.checkpoint.files import Checkpoint, copy_checkpoint, find_checkpoints
from dapo_runner.config import Config, ConfigError
from dapo_runner.config.reading import CONFIG_FILE, may_change
from dapo_runner.config.rollout import SamplingConfig
from dapo_runner.files import atomic_write, copy_folder, read_jsonl
from dapo_runner.logging.run_log import CHANGES_FILE, CHECKPOINTS, log_fork
from dapo_runner.logging.versions import this_version
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.run.folder import TINY_MODEL, Change, changes_between, is_among, read_config, settings_of, version_of
from dapo_runner.run.frozen import FROZEN_FILE

# The checkpoint's weights, optimizer state and order of prompts depend on these, unless marked with `MayChange`.
FIXED = ("model", "data", "run.seed", "rollout.max_prompt_tokens")
# The groups left over in the checkpoint were sampled and rewarded with these.
OF_GROUPS = (
    "reward",
    "rollout.group_size",
    "rollout.max_response_tokens",
    "rollout.stop",
    "rollout.sampling_mask",
    *(f"rollout.{name}" for name in SamplingConfig.model_fields),
    "advantage.segments",
    "loss.routing_replay",
    "sampler.filter_groups",
    "env",
)
OWN = ("run.name", "run.output_dir", "run.from", "ranks")  # always differ, or are not a setting


def find_origin(config: Config) -> tuple[Checkpoint, list[Change]]:
    """Return the checkpoint that `run.from` names, and the settings that differ from its run. Raises ConfigError."""
    assert config.run.from_ is not None
    source, step = Path(config.run.from_.rpartition("@")[0]), config.run.forked_at
    if not (source / CONFIG_FILE).is_file():
        raise ConfigError(f"run.from: expected a run's folder before the @, found no {CONFIG_FILE} in {source}")
    found = {checkpoint.step: checkpoint for checkpoint in find_checkpoints(source / CHECKPOINTS)}
    if step not in found:
        there = f"those after step {', '.join(map(str, found))}" if found else "none"
        raise ConfigError(f"run.from: expected a checkpoint of {source} after step {step}, it has {there} (run.keep)")
    if config.run.steps <= step:
        raise ConfigError(f"run.steps: expected more than the {step} steps of run.from, got {config.run.steps}")
    before, now = _settings_at(source, step), settings_of(config) | {"version": this_version()}
    changes = [change for change in changes_between(before, now) if change.key not in OWN]
    # The fork takes a moving reference and a critic from the checkpoint, so their sources must stay the same.
    moving = (("loss.reference", "loss.reference_ema"), ("critic.path", "critic.lr"))
    fixed = (*FIXED, *(key for key, sign in moving if None not in (before.get(sign), now.get(sign))))
    refused = [str(change) for change in changes if is_among(change.key, fixed) and not may_change(change.key, Config)]
    if refused:
        raise ConfigError(
            f"run.from: expected the model, the data and the seed of {source}, which its checkpoint belongs to, got "
            f"{'; '.join(refused)}; to train its weights on something else, name {found[step].model} as model.path"
        )
    if before.get("critic.lr") is None and config.critic and 0 < (until := config.critic.warmup_steps) <= step:
        raise ConfigError(f"critic.warmup_steps: expected 0, or more than the {step} steps of run.from, got {until}")
    return found[step], changes


def _settings_at(source: Path, step: int) -> dict[str, Any]:
    """Return the settings of the run when it saved ``step``: later changes are undone."""
    settings = settings_of(read_config(source, Config)) | {"version": version_of(source)}
    later = (change for change in reversed(_changes(source)) if change["step"] >= step)
    return settings | {change["key"]: change["before"] for change in later}


def _changes(folder: Path) -> list[dict[str, Any]]:
    """Return the logged changes of settings, oldest first."""
    path = folder / CHANGES_FILE
    return [entry for entry in read_jsonl(path) if entry["kind"] == "change"] if path.is_file() else []


def start_fork(config: Config, folder: Path) -> Checkpoint:
    """Copy the checkpoint of `run.from` into the run's folder and log the fork. Raises ConfigError, CheckpointError."""
    origin, changes = find_origin(config)
    log_fork(folder, origin, changes)
    tiny, frozen = (origin.path.parent.parent / name for name in (TINY_MODEL, FROZEN_FILE))
    if tiny.is_dir():
        copy_folder(tiny, folder / TINY_MODEL)
    if frozen.is_file():
        others, digests = {change.key for change in changes}, json.loads(frozen.read_text(encoding="utf-8"))
        atomic_write(folder / FROZEN_FILE, json.dumps({key: digests[key] for key in digests.keys() - others}))
    return copy_checkpoint(origin, folder / CHECKPOINTS)


def drop_incompatible_groups(sampler: DynamicSampler, folder: Path, note: Callable[[str], None]) -> None:
    """Note the settings that a fork changes. Drop the groups left over if they were made with other settings."""
    changes = [Change(entry["key"], entry["before"], entry["after"]) for entry in _changes(folder)]
    for change in changes:
        note(str(change))
    if changed := [change.key for change in changes if is_among(change.key, OF_GROUPS)]:
        note(f"{sampler.drop_groups()} groups left over are dropped because of {', '.join(changed)}")
