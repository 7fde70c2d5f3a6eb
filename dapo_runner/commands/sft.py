"""`dapo sft`: a supervised run, or with `--dry-run` the plan for one and everything that would stop it here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dapo_runner.checkpoint import checkpoint_to_resume, latest_checkpoint
from dapo_runner.commands.complain import complain
from dapo_runner.commands.output import quiet_libraries
from dapo_runner.commands.train import STOPPED
from dapo_runner.config import SftConfig, load_sft_config
from dapo_runner.folder import check_same_run
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.progress import make_progress
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.parallel.world import make_layout
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.preflight.needs import check_needs, check_writable
from dapo_runner.preflight.plan import GPUS_OF_A_MACHINE
from dapo_runner.tools.sft.data import load_examples
from dapo_runner.tools.sft.run import plan_updates, sft


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    recipe, console = load_sft_config(options.config, overrides), Console()
    quiet_libraries()
    if options.dry_run:
        _dry_run(recipe, console)
        return 0
    try:
        folder = sft(recipe, make_progress(recipe.logging.progress, console))
    except STOPPED as error:
        complain(str(error))
        return 1
    if int(os.environ.get("RANK", 0)) == 0:
        newest = latest_checkpoint(folder / CHECKPOINTS)
        assert newest is not None
        print(f"model: {newest.model}")
    return 0


def _dry_run(recipe: SftConfig, console: Console) -> None:
    """What a run checks before it loads weights, but for its folder's lock. Raises ConfigError, CheckpointError."""
    config, gpus = recipe.training(), recipe.parallel.gpus
    check_needs(config, make_layout(config, gpus, min(gpus, GPUS_OF_A_MACHINE)))
    check_writable(recipe.run_dir)
    if (recipe.run_dir / METRICS_FILE).exists():
        check_same_run(recipe, recipe.run_dir)
    checkpoint_to_resume(recipe.run_dir / CHECKPOINTS)
    path, optimizer = str(recipe.model.path), recipe.optimizer
    rows = {
        "run": f"{recipe.run_dir}, seed {recipe.run.seed}",
        "model": f"{path}, {recipe.model.dtype}",
        "data": str(recipe.data.path),
        "update": f"{optimizer.mini_batch_size} examples, lr {optimizer.lr:g}, {optimizer.schedule}",
    }
    if Path(path).is_dir():
        examples = load_examples(recipe, load_tokenizer(path, recipe.model))
        rows["data"] += f": {examples.report.describe()}"
        rows["updates"] = f"{plan_updates(recipe, examples).run.steps}, {recipe.run.epochs:g} epochs"
    table = Table(box=None, show_header=False, title="plan", title_justify="left")
    for label, text in rows.items():
        table.add_row(label, text)
    console.print(table)
