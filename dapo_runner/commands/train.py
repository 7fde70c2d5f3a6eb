"""`dapo train`: a run, or with `--dry-run` the plan for one and everything that would stop it here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.checkpoint import CheckpointError, checkpoint_to_resume
from dapo_runner.commands.complain import complain
from dapo_runner.commands.output import print_evaluations, quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, load_config
from dapo_runner.data.curriculum import make_curriculum
from dapo_runner.data.dataset import Tokenizer, load_data
from dapo_runner.folder import check_same_run
from dapo_runner.fork import find_origin
from dapo_runner.interrupt import StepGivenUpError
from dapo_runner.logging.metrics import METRICS_FILE, before_and_after
from dapo_runner.logging.progress import make_progress
from dapo_runner.logging.report import write_report
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.parallel.watch import RankLostError
from dapo_runner.parallel.world import RankError, make_layout
from dapo_runner.policy.lengths import check_lengths
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.preflight.needs import check_needs, check_writable
from dapo_runner.preflight.plan import GPUS_OF_A_MACHINE, make_plan
from dapo_runner.rewards.plugin import RewardError
from dapo_runner.rollout.asynchronous import SamplingStalledError
from dapo_runner.rollout.client import RolloutError
from dapo_runner.rollout.group_buffer import SamplingExhaustedError
from dapo_runner.rollout.probe import OutOfSyncError
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.train import train

STOPPED = (
    CheckpointError,
    NonFiniteUpdateError,
    OutOfSyncError,
    RankError,
    RankLostError,
    RewardError,
    RolloutError,
    SamplingExhaustedError,
    SamplingStalledError,
)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config, console = load_config(find_recipe(options.config), overrides), Console()
    quiet_libraries()
    try:
        if options.dry_run:
            return _dry_run(config, console)
        if options.simulate:
            return _simulate(config, console)
        folder = train(config, make_progress(config.logging.progress, console))
    except StepGivenUpError as error:
        raise KeyboardInterrupt from error
    except STOPPED as error:
        complain(str(error))
        return 1
    if int(os.environ.get("RANK", 0)) > 0:
        return 0
    print_evaluations(console, f"{folder}: held-out problems", before_and_after(folder))
    print(f"picture: {write_report(folder)}")
    return 0


def _dry_run(config: Config, console: Console) -> int:
    table = Table(box=None, show_header=False, title="plan", title_justify="left")
    for label, text in make_plan(config).items():
        table.add_row(label, text)
    console.print(table)
    _rehearse(config)
    return 0


def _simulate(config: Config, console: Console) -> int:
    # Tools of torch's own development, which no run should depend on.
    from dapo_runner.preflight.account import describe, fits
    from dapo_runner.preflight.simulate import simulate

    found = simulate(config, print)
    table = Table(box=None, show_header=False)
    for label, text in describe(config, found).items():
        table.add_row(label, text)
    console.print(table)
    return 0 if fits(config, found) else 1


def _rehearse(config: Config) -> None:
    """What a run checks before it loads weights, but for its folder's lock. Raises ConfigError, CheckpointError."""
    gpus = config.parallel.gpus
    check_needs(config, make_layout(config, gpus, min(gpus, GPUS_OF_A_MACHINE)))
    check_writable(config.run_dir)
    if (config.run_dir / METRICS_FILE).exists():
        check_same_run(config, config.run_dir)
    elif config.run.from_ is not None:
        find_origin(config)
    checkpoint_to_resume(config.run_dir / CHECKPOINTS)
    if config.model.path is not None:
        check_lengths(config, config.model.path, download=False)
    dataset = load_data(config, _tokenizer(config))
    make_curriculum(config.sampler.curriculum, dataset.train)
    print(f"data: {dataset.report.describe()}")


def _tokenizer(config: Config) -> Tokenizer:
    """That of a model on this machine."""
    path = config.model.path
    if path is None:
        return make_tokenizer()
    return load_tokenizer(path, config.model) if Path(path).is_dir() else NotHere()


class NotHere:
    """Stands for the tokenizer of a model that was not downloaded: no prompt is too long for it."""

    chat_template = "not here"

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in text]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        return ""
