"""`dapo eval`: evaluate a checkpoint, or a recipe's model, on held-out problems."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from dapo_runner.checkpoint.files import damage_of, find_checkpoints
from dapo_runner.checkpoint.snapshot import STATE_FILE
from dapo_runner.commands.output import complain, print_evaluations, quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, ConfigError, RolloutLogConfig, apply_overrides, flatten, load_config
from dapo_runner.config.reading import CONFIG_FILE
from dapo_runner.data.dataset import Dataset, fingerprint, load_data
from dapo_runner.engines.engine import engine_class
from dapo_runner.evaluate import evaluate
from dapo_runner.logging.rollout_log import EVALUATIONS, RolloutLog
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.lengths import check_length
from dapo_runner.policy.model import load_tokenizer, resolve_device
from dapo_runner.preflight.needs import check_model
from dapo_runner.rewards.scoring import Scorer, unmatchable_answers
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.rollout.worker import RolloutWorker
from dapo_runner.run.folder import read_config
from dapo_runner.types import Group, Prompt


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    quiet_libraries()
    if (out := options.json) and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise ConfigError(f"--json: expected a file that can be written to, got {out}")
    if (folder := options.responses) is not None and (folder.exists() or not os.access(folder.parent, os.W_OK)):
        raise ConfigError(f"--responses: expected a new folder in one that can be written to, got {folder}")
    config, source = _target(options.target, overrides)
    tokenizer = load_tokenizer(source, config.model)
    dataset = _load_problems(config, source, tokenizer)
    setting = "evaluation.max_response_tokens and rollout.max_response_tokens"
    highest = max(max(prompt.token_ids, default=0) for prompt in dataset.heldout)
    check_length("model.path", source, config.model, config.longest_sequence, setting, highest)
    complain(f"data: {dataset.report.describe()}")
    if unmatchable := unmatchable_answers(config, dataset.train, dataset.heldout):
        complain(unmatchable)
    chosen = config.evaluation.model_dump() | {"max_response_tokens": config.evaluation_tokens}
    how = "{k} responses of up to {max_response_tokens} tokens, temperature {temperature}, top_p {top_p}, seed {seed}"
    complain(f"evaluation: {len(dataset.heldout)} problems × {how.format(**chosen)}")
    device = resolve_device(config.run.device)
    with closing(engine_class(config).load(source, config, device, SINGLE_PROCESS, complain)) as engine:
        episodes = EpisodeRunner(config, tokenizer) if config.env else None
        worker = RolloutWorker(engine, Scorer(config, shaped=False), tokenizer, episodes=episodes)
        groups, metrics = evaluate(worker.generate, dataset.heldout, config)
    try:
        if options.json is not None:
            found = {"model": str(source), "evaluation": chosen, **metrics}
            found["problems"] = by_problem(dataset.heldout, groups)
            options.json.write_text(json.dumps(found), encoding="utf-8")
        if folder is not None:
            folder.mkdir()
            RolloutLog(folder / EVALUATIONS, RolloutLogConfig(groups=None)).write(0, groups)
            complain(f"responses: dapo show {folder} --eval --step 0")
    finally:  # a full disk does not hide the figures
        for warning in episodes.take_warnings() if episodes else ():
            complain(warning)
        print_evaluations(str(source), {"held-out": {f"eval/{k}": v for k, v in metrics.items()}})
    return 0


def _load_problems(config: Config, source: str | Path, tokenizer: Any) -> Dataset:
    """Return the data set. Raises ConfigError for a run if its held-out problems are others than in training."""
    dataset = load_data(config, tokenizer, trains=False)
    if not dataset.heldout:
        raise ConfigError("data.eval_size: expected at least one held-out problem, got none")
    if isinstance(source, Path) and not config.data.eval:
        state = torch.load(source.with_name(STATE_FILE), weights_only=True)
        if state["sampler"]["cursor"]["data"] != fingerprint(dataset.train, dataset.heldout):
            raise ConfigError(
                "data: expected the problems of the run, got others, some of which may have been trained on. Name "
                f"others in data.eval, or {source} as model.path of a recipe with them."
            )
    return dataset


def _target(target: str, overrides: Sequence[str]) -> tuple[Config, str | Path]:
    if (folder := Path(target)).is_dir():
        return _of_run(folder, overrides)
    config = load_config(find_recipe(target, "a run's folder, one of its checkpoints, a YAML file"), overrides)
    if config.model.path is None:
        raise ConfigError(f"{target}: requires model.path. A tiny model exists only in its run: name the run's folder.")
    check_model("model.path", config.model.path)
    return config, config.model.path


def _of_run(folder: Path, overrides: Sequence[str]) -> tuple[Config, Path]:
    """Return the configuration of a run, and the model of its newest checkpoint or of the checkpoint ``folder``."""
    if (folder := folder.absolute()).parent.name != CHECKPOINTS:  # maybe a link to a checkpoint
        folder = folder.resolve()
    is_checkpoint = folder.parent.name == CHECKPOINTS
    run = folder.parent.parent if is_checkpoint else folder
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder}: expected the folder of a run or of a checkpoint, found no {run / CONFIG_FILE}")
    fixed = ("model.path", "model.tiny", "model.lora")
    if given := [key for key in flatten(apply_overrides({}, overrides)) if key.startswith(fixed)]:
        raise ConfigError(f"{given[0]}: is not supported with {folder}, which has its own. Name a recipe instead.")
    config = read_config(run, Config, overrides)
    if is_checkpoint:
        if (damage := damage_of(folder, contents=False)) is not None:
            raise ConfigError(f"{folder}: expected a complete checkpoint: {damage}")
        return config, folder / "model"
    for found in reversed(find_checkpoints(run / CHECKPOINTS, damaged=True)):
        if (damage := damage_of(found.path, contents=False)) is None:
            return config, found.model
        complain(f"{found.path} is skipped because it is damaged: {damage}")
    raise ConfigError(f"{run / CHECKPOINTS}: expected a complete checkpoint, found none")


def by_problem(prompts: Sequence[Prompt], groups: Sequence[Group]) -> list[dict[str, object]]:
    """Return what is known of each problem, in the order of the data. Without samples, all its episodes failed."""
    names = {p: {"id": p.id, "set": p.eval_set} | ({"source": p.source} if p.source else {}) for p in prompts}
    counts = {group.prompt: {"correct": group.n_correct, "samples": len(group.samples)} for group in groups}
    return [{**name, **counts.get(prompt, {"correct": 0, "samples": 0})} for prompt, name in names.items()]
