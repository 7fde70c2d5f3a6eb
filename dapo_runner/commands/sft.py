"""`dapo sft`: start or resume a supervised run; with `--dry-run` print its summary and run the preflight checks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from dapo_runner.checkpoint import latest_checkpoint
from dapo_runner.commands.output import print_rows, quiet_libraries
from dapo_runner.commands.train import check_start
from dapo_runner.config import ConfigError, SftConfig, apply_overrides, parse, read_recipe
from dapo_runner.data.reading import missing_data
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.policy.lengths import is_local
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.tools.sft.data import load_examples
from dapo_runner.tools.sft.run import plan_updates, sft


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    recipe = parse(apply_overrides(read_recipe(options.config), overrides), SftConfig)
    if (path := recipe.data.eval_path) is not None and (problem := missing_data(path)) is not None:
        raise ConfigError(f"data.eval_path: {problem}")
    quiet_libraries()
    if options.dry_run:
        check_start(recipe, recipe.training())
        print_rows(_summary(recipe))
        return 0
    newest = latest_checkpoint(sft(recipe) / CHECKPOINTS)
    if int(os.environ.get("RANK", 0)) == 0 and newest is not None:
        print(f"model: {newest.model}")
    return 0


def _summary(recipe: SftConfig) -> dict[str, str]:
    path, optimizer = str(recipe.model.path), recipe.optimizer
    rows = {
        "run": f"{recipe.run_dir}, seed {recipe.run.seed}",
        "model": f"{path}, {recipe.model.dtype}",
        "data": str(recipe.data.path),
        "update": f"{optimizer.mini_batch_size} examples, lr {optimizer.lr:g}, {optimizer.schedule}",
    }
    if is_local(path, "tokenizer_config.json"):
        examples = load_examples(recipe, load_tokenizer(path, recipe.model))
        rows["data"] += f": {examples.report.describe('examples')}"
        first = examples.train[0]
        rows["first example"] = f"{first.text!r} → {first.answer!r}"
        rows |= {"caution": examples.note} if examples.note is not None else {}
        rows["updates"] = f"{plan_updates(recipe, examples).run.steps}, {recipe.run.epochs:g} epochs"
    return rows
