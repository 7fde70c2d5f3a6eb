"""`dapo train`: start or resume a run; with `--dry-run` print its configuration and run the preflight checks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from dapo_runner.checkpoint.files import checkpoint_to_resume
from dapo_runner.commands.output import print_evaluations, print_rows, quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, load_config
from dapo_runner.data.curriculum import make_curriculum
from dapo_runner.data.dataset import load_data
from dapo_runner.files import check_writable
from dapo_runner.logging.metrics import METRICS_FILE, before_and_after
from dapo_runner.logging.report import write_report
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.loop import train
from dapo_runner.parallel.world import make_layout
from dapo_runner.policy.lengths import check_lengths, is_local
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.preflight.dry_run import resolved_yaml, summarize
from dapo_runner.preflight.memory import GPUS_OF_A_MACHINE
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rewards.scoring import unmatchable_answers
from dapo_runner.run.folder import AnyConfig, check_same_run
from dapo_runner.run.fork import find_origin
from dapo_runner.tiny_model import tiny_tokenizer


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(find_recipe(options.config), overrides)
    quiet_libraries()
    if options.dry_run:
        return _dry_run(config)
    if options.simulate:
        return _simulate(config)
    folder = train(config)
    if int(os.environ.get("RANK", 0)) == 0:
        print_evaluations(f"{folder}: held-out problems", before_and_after(folder))
        print(f"picture: {write_report(folder)}")
    return 0


def check_start(recipe: AnyConfig, config: Config) -> None:
    """Run the preflight checks that need no weights and no lock of the run's folder. ``recipe`` is compared with the
    folder, ``config`` is that of its training. Raises ConfigError, CheckpointError if the run could not start.
    """
    gpus = config.parallel.gpus
    check_needs(config, make_layout(config, gpus, min(gpus, GPUS_OF_A_MACHINE)))
    check_writable(recipe.run_dir)
    if (recipe.run_dir / METRICS_FILE).exists():
        check_same_run(recipe, recipe.run_dir)
    checkpoint_to_resume(recipe.run_dir / CHECKPOINTS)


def _dry_run(config: Config) -> int:
    print(resolved_yaml(config))
    print_rows(summarize(config))
    check_start(config, config)
    if config.run.from_ is not None and not (config.run_dir / METRICS_FILE).exists():
        find_origin(config)
    path = config.model.path
    is_here = path is None or is_local(path, "tokenizer_config.json")
    tokenizer = tiny_tokenizer(config) if path is None else load_tokenizer(path, config.model) if is_here else None
    dataset = load_data(config, tokenizer)
    if path is not None:
        check_lengths(config, path, dataset.train + dataset.heldout, download=False)
    make_curriculum(config.sampler, dataset.train)
    if (unmatchable := unmatchable_answers(config, dataset.train, dataset.heldout)) is not None:
        print(unmatchable)
    lengths = "" if is_here else f". Lengths are unknown: the tokenizer of {path} is not on this machine"
    print(f"data: {dataset.report.describe()}{lengths}")
    print(f"first prompt: {dataset.train[0].text!r}")
    return 0


def _simulate(config: Config) -> int:
    # These modules use development tools of torch, which training must not depend on.
    from dapo_runner.preflight.simulate import simulate
    from dapo_runner.preflight.simulate_report import describe, fits

    found = simulate(config)
    print_rows(describe(config, found))
    return 0 if fits(config, found) else 1
