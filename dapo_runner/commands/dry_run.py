"""The part that the dry runs of `dapo train` and `dapo sft` share: what a run checks before it loads weights."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from dapo_runner.checkpoint import checkpoint_to_resume
from dapo_runner.config import Config
from dapo_runner.files import check_writable
from dapo_runner.folder import AnyConfig, check_same_run
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.parallel.world import make_layout
from dapo_runner.preflight.memory import GPUS_OF_A_MACHINE
from dapo_runner.preflight.needs import check_needs


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    table = Table(box=None, show_header=False)
    for label, text in rows.items():
        table.add_row(label, text)
    console.print(table)


def check_start(recipe: AnyConfig, config: Config) -> None:
    """Check everything but the lock of the run's folder. Raises ConfigError, CheckpointError.

    Args:
        recipe: what the run's folder is compared with.
        config: the configuration of its training.
    """
    gpus = config.parallel.gpus
    check_needs(config, make_layout(config, gpus, min(gpus, GPUS_OF_A_MACHINE)))
    check_writable(recipe.run_dir)
    if (recipe.run_dir / METRICS_FILE).exists():
        check_same_run(recipe, recipe.run_dir)
    checkpoint_to_resume(recipe.run_dir / CHECKPOINTS)
