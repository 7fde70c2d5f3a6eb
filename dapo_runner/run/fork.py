"""A run that starts from another one's checkpoint: `run.from=RUN@STEP`.

Weights, optimizer, sampler and every random generator are the checkpoint's, steps are counted on from its own, and the
settings may be other ones. The checkpoint is copied: what becomes of the run it came from does not matter afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo_runner.checkpoint import Checkpoint, copy_checkpoint, find_checkpoints
from dapo_runner.config import Config, ConfigError
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.run_log import CHANGES_FILE, CHECKPOINTS, log_fork
from dapo_runner.run.folder import CONFIG_FILE, TINY_MODEL, Change, changes_between, is_among, read_config, settings_of

# What the checkpoint's weights, its optimizer and its walk over the prompts belong to.
FIXED = ("model.", "data.", "run.seed", "rollout.max_prompt_tokens")
FREE = ("model.attention", "model.compile", "model.gradient_checkpointing")
# What the groups left over were sampled and rewarded under.
OF_GROUPS = (
    "reward.",
    "rollout.group_size",
    "rollout.max_response_tokens",
    "rollout.stop",
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
    "advantage.segments.",
)
OWN = ("run.name", "run.output_dir", "run.from", "ranks")  # differ in any case, or are no setting


def find_origin(config: Config) -> tuple[Checkpoint, list[Change]]:
    """The checkpoint that `run.from` names, and what is set otherwise than in its run. Raises ConfigError."""
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
    before, now = _settings_at(source, step), settings_of(config)
    changed = changes_between(before, now)
    changes = [change for change in changed if change.key not in OWN]
    fixed = (*FIXED, *_held(before, now))
    refused = [str(change) for change in changes if is_among(change.key, fixed) and change.key not in FREE]
    if refused:
        raise ConfigError(
            f"run.from: expected the model, the data and the seed of {source}, which its checkpoint belongs to, got "
            f"{'; '.join(refused)}; to train its weights on something else, name {found[step].model} as model.path"
        )
    return found[step], changes


def _held(*settings: dict[str, Any]) -> Iterator[str]:
    """What the models came from that the checkpoint holds beside the policy and the fork goes on with."""
    if all(each.get("loss.reference_ema") is not None for each in settings):
        yield "loss.reference"
    if all(each.get("critic.share_trunk") is False for each in settings):
        yield "critic.path"


def _settings_at(source: Path, step: int) -> dict[str, Any]:
    """Those that the checkpoint after ``step`` was made under: what was set otherwise from there on is undone."""
    settings = settings_of(read_config(source))
    for change in reversed(_changes(source)):
        if change["step"] >= step:
            settings[change["key"]] = change["before"]
    return settings


def _changes(folder: Path) -> list[dict[str, Any]]:
    """The lines of its settings, the oldest first."""
    path = folder / CHANGES_FILE
    return [entry for entry in read_log(path) if entry["kind"] == "change"] if path.is_file() else []


def start_fork(config: Config, folder: Path) -> Checkpoint:
    """Copy what `run.from` names into the run's own folder and write down where it comes from. Raises ConfigError where
    there is no such checkpoint, CheckpointError where it cannot be copied.
    """
    origin, changes = find_origin(config)
    log_fork(folder, origin, changes)
    tiny = origin.path.parent.parent / TINY_MODEL
    if tiny.is_dir():
        shutil.copytree(tiny, folder / TINY_MODEL, dirs_exist_ok=True)
    return copy_checkpoint(origin, folder / CHECKPOINTS)


def changes_of_groups(folder: Path) -> list[str]:
    """Settings of a fork under which the groups that its origin left over would be other ones."""
    return [change["key"] for change in _changes(folder) if is_among(change["key"], OF_GROUPS)]
