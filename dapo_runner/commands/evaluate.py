"""`dapo eval`: avg@k of a checkpoint, or of a recipe's model, on held-out problems."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dapo_runner.checkpoint import damage_of, find_checkpoints
from dapo_runner.commands.output import complain, print_evaluations, quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, ConfigError, load_config
from dapo_runner.data.dataset import load_data
from dapo_runner.evaluate import evaluate
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.logging.show import printable
from dapo_runner.policy.lengths import check_length
from dapo_runner.policy.model import load_tokenizer, resolve_device
from dapo_runner.preflight.needs import check_model
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.engine import open_engine
from dapo_runner.rollout.worker import RolloutWorker
from dapo_runner.run.folder import CONFIG_FILE, read_config
from dapo_runner.types import Group


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    quiet_libraries()
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json: expected a file in a folder that is there, got {options.json}")
    config, source = _target(options.target, overrides)
    setting = "evaluation.max_response_tokens and rollout.max_response_tokens"
    check_length("model.path", source, config.model, config.longest_sequence, setting)
    tokenizer = load_tokenizer(source, config.model)
    dataset = load_data(config, tokenizer)
    if not dataset.heldout:
        raise ConfigError("data.eval_size: expected at least one held-out problem, got none")
    with closing(open_engine(config, source, resolve_device(config.run.device), note=complain)) as engine:
        worker = RolloutWorker(engine, Scorer(config, shaped=False), tokenizer)
        result = evaluate(worker.generate, dataset.heldout, config)
    for group in result.groups[: options.show]:
        _print_response(group)
    print_evaluations(str(source), {"held-out": {f"eval/{k}": v for k, v in result.metrics.items()}})
    if options.json is not None:
        options.json.write_text(json.dumps({"model": str(source), **result.metrics}, indent=1), encoding="utf-8")
    return 0


def _target(target: str, overrides: Sequence[str]) -> tuple[Config, str | Path]:
    """Return the configuration and the model to evaluate."""
    folder = Path(target)
    if folder.is_dir():
        return _of_run(folder, overrides)
    config = load_config(find_recipe(target, "a run's folder, one of its checkpoints, a YAML file"), overrides)
    if config.model.path is None:
        raise ConfigError(f"{target}: expected model.path, or a run's folder: a tiny model exists only inside its run")
    check_model("model.path", config.model.path)
    return config, config.model.path


def _of_run(folder: Path, overrides: Sequence[str]) -> tuple[Config, Path]:
    """Return the configuration of a run and its newest checkpoint's model, or that of the checkpoint ``folder``."""
    folder = folder.absolute()
    is_checkpoint = folder.parent.name == CHECKPOINTS
    run = folder.parent.parent if is_checkpoint else folder
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder}: expected a run's folder or one of its checkpoints, found no {CONFIG_FILE} in {run}"
        )
    config, whole = read_config(run, overrides), find_checkpoints(run / CHECKPOINTS)
    if is_checkpoint:
        whole = [found for found in whole if found.path.name == folder.name]
        if not whole:
            raise ConfigError(f"{folder}: expected a whole checkpoint: {damage_of(folder, contents=False)}")
        return config, whole[0].model
    for path in sorted((run / CHECKPOINTS).glob("step_*[0-9]")):
        if not whole or path.name > whole[-1].path.name:
            complain(f"{path} is damaged and not evaluated: {damage_of(path, contents=False)}")
    if not whole:
        raise ConfigError(f"{run / CHECKPOINTS}: expected a whole checkpoint, found none")
    return config, whole[-1].model


def _print_response(group: Group) -> None:
    sample = group.samples[0]
    verdict = "correct" if sample.correct else "incorrect"
    print(printable(f"--- {verdict}, expected {group.prompt.answer}, read {sample.verdict.extracted}"))
    print(printable(f"{group.prompt.text}{sample.completion.text}"))
