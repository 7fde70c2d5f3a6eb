"""The `dapo` command. A mistake of the user ends in one line and exit code 2; anything else keeps its
traceback.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dapo_runner.config import Config, ConfigError, load_config

USER_ERROR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return USER_ERROR
    options, overrides = parser.parse_known_args(arguments)
    _keep_freed_memory()
    console = Console()
    try:
        return int(options.command(options, overrides, console))
    except ConfigError as error:
        _complain(str(error))
        return USER_ERROR
    except BrokenPipeError:  # `dapo show … | head`: the rest is not wanted, nor a complaint as Python closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on from the last checkpoint")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=importlib.metadata.version("dapo-kernels"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe, or take up a run where it stopped", allow_abbrev=False)
    train.add_argument("config", help="a YAML recipe")
    train.add_argument("--dry-run", action="store_true", help="print the plan and what is missing here; no download")
    train.set_defaults(command=_train)

    evaluate = commands.add_parser("eval", help="avg@k of a model on held-out problems", allow_abbrev=False)
    evaluate.add_argument("target", help="a run's folder (its newest checkpoint), or a recipe (its model.path)")
    evaluate.add_argument("--show", type=int, default=0, metavar="N", help="print N scored responses")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    evaluate.set_defaults(command=_evaluate)

    report = commands.add_parser("report", help="draw the curves of a run as one picture", allow_abbrev=False)
    report.add_argument("run", type=Path, help="a run's folder")
    report.add_argument("--out", type=Path, help="where to (default: report.png in the run's folder)")
    report.set_defaults(command=_report)

    show = commands.add_parser("show", help="read the rollouts of a step, group by group", allow_abbrev=False)
    show.add_argument("run", type=Path, help="a run's folder")
    show.add_argument("--step", type=int, metavar="N", help="which step; without it: a list of those that are kept")
    show.add_argument("--group", type=int, metavar="G", help="only the G-th group of the step")
    show.add_argument("--json", action="store_true", help="a line of JSON for each group")
    show.set_defaults(command=_show)

    doctor = commands.add_parser("doctor", help="what is installed, what is missing and how to get it")
    doctor.set_defaults(command=_doctor)

    for command in (train, evaluate):
        command.usage = (
            f"{command.prog} {'CONFIG' if command is train else 'RUN|CONFIG'} [options] [section.key=value …]"
        )
    return parser


def _train(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    config = load_config(options.config, overrides)
    if options.dry_run:
        return _dry_run(config, console)
    _quiet_libraries()
    from dapo_runner.checkpoint import CheckpointError
    from dapo_runner.interrupt import StepGivenUpError
    from dapo_runner.parallel.watch import RankLostError
    from dapo_runner.records.metrics import before_and_after
    from dapo_runner.records.progress import make_progress
    from dapo_runner.records.report import write_report
    from dapo_runner.rewards.plugin import RewardError
    from dapo_runner.rollout.probe import OutOfSyncError
    from dapo_runner.sampling.sampler import SamplingExhaustedError
    from dapo_runner.train import train
    from dapo_runner.update.learner import NonFiniteUpdateError

    try:
        folder = train(config, make_progress(config.logging.progress, console))
        if int(os.environ.get("RANK", 0)) > 0:
            return 0
    except StepGivenUpError as error:
        raise KeyboardInterrupt from error
    except (
        CheckpointError,
        NonFiniteUpdateError,
        OutOfSyncError,
        RankLostError,
        RewardError,
        SamplingExhaustedError,
    ) as error:
        _complain(str(error))
        return 1
    _print_evaluations(console, f"{folder}: held-out problems", before_and_after(folder))
    print(f"picture: {write_report(folder)}")
    return 0


def _dry_run(config: Config, console: Console) -> int:
    from dapo_runner.folder import check_same_run
    from dapo_runner.fork import find_origin
    from dapo_runner.preflight.needs import check_needs
    from dapo_runner.preflight.plan import make_plan
    from dapo_runner.records.metrics import METRICS_FILE
    from dapo_runner.update.learner import resolve_objective

    resolve_objective(config)
    table = Table(box=None, show_header=False, title="plan", title_justify="left")
    for label, text in make_plan(config).items():
        table.add_row(label, text)
    console.print(table)
    check_needs(config)
    if (config.run_dir / METRICS_FILE).exists():
        check_same_run(config, config.run_dir)
    elif config.run.from_ is not None:
        find_origin(config)
    return 0


def _evaluate(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    _quiet_libraries()
    from dapo_runner.evaluate import evaluate, scored
    from dapo_runner.policy.model import load_tokenizer, resolve_device
    from dapo_runner.rewards.plugin import RewardError
    from dapo_runner.rewards.scoring import make_scorer
    from dapo_runner.run import open_engine
    from dapo_runner.sampling.data import load_data

    config, source = _evaluation_target(Path(options.target), overrides)
    dataset = load_data(config, load_tokenizer(source, config.model))
    if not dataset.heldout:
        raise ConfigError("data.eval_size: expected at least one held-out problem, got none")
    engine = open_engine(config, source, resolve_device(config.run.device))
    try:
        result = evaluate(scored(engine.generate, make_scorer(config, shaped=False)), dataset.heldout, config)
    except RewardError as error:
        print(f"dapo: {error}", file=sys.stderr)
        return 1
    for group in result.groups[: options.show]:
        sample = group.samples[0]
        verdict = "right" if sample.correct else "wrong"
        print(f"--- {verdict}, expected {group.prompt.answer}, read {sample.verdict.extracted}")
        print(f"{group.prompt.text}{sample.completion.text}")
    _print_evaluations(console, str(source), {"held-out": {f"eval/{k}": v for k, v in result.metrics.items()}})
    if options.json is not None:
        options.json.write_text(json.dumps({"model": str(source), **result.metrics}, indent=1), encoding="utf-8")
    return 0


def _evaluation_target(target: Path, overrides: list[str]) -> tuple[Config, str | Path]:
    """The configuration and the model folder to evaluate."""
    from dapo_runner.checkpoint import latest_checkpoint
    from dapo_runner.folder import CONFIG_FILE
    from dapo_runner.records.run_log import CHECKPOINTS

    if not target.exists():
        raise ConfigError(f"expected a run's folder or a recipe, found nothing at {target}")
    if not target.is_dir():
        config = load_config(target, overrides)
        if config.model.path is None:
            raise ConfigError(
                f"{target}: expected model.path, or a run's folder instead of a recipe: "
                "a tiny model exists only inside its run"
            )
        return config, config.model.path
    config = load_config(target / CONFIG_FILE, overrides)
    checkpoint = latest_checkpoint(target / CHECKPOINTS)
    if checkpoint is None:
        raise ConfigError(f"{target / CHECKPOINTS}: expected a checkpoint, found none")
    return config, checkpoint.model


def _report(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    from dapo_runner.records.report import write_report

    _no_overrides(overrides)
    try:
        picture = write_report(options.run, options.out)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _print_time_split(console, options.run)
    print(f"picture: {picture}")
    return 0


def _show(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    from dapo_runner.records.show import choose_group, load_step, page, render_group, steps_table

    _no_overrides(overrides)
    try:
        if options.step is None:
            if options.group is not None or options.json:
                raise ConfigError("--step: expected beside --group and --json, got none")
            console.print(steps_table(options.run))
            return 0
        saved = load_step(options.run, options.step)
        chosen = saved.groups if options.group is None else [choose_group(saved, options.group)]
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if options.json:
        for group in chosen:
            print(json.dumps(group, ensure_ascii=False))
    elif options.group is not None:
        console.print(render_group(chosen[0], saved), soft_wrap=not console.is_terminal)
    else:
        page(saved, console)
    return 0


def _doctor(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    from dapo_runner.preflight.doctor import examine

    _no_overrides(overrides)
    for finding in examine():
        print(f"{finding.what:<14} {finding.state}")
        if finding.advice:
            print(f"{'':<14} → {finding.advice}")
    return 0


def _print_time_split(console: Console, run: Path) -> None:
    """Where the time of a step went, all of it."""
    from dapo_runner.records.metrics import TIMINGS_FILE, read_log
    from dapo_runner.timing import PHASES, time_split

    split = time_split(read_log(run / TIMINGS_FILE)) if (run / TIMINGS_FILE).is_file() else []
    if not split:
        return
    table = Table(title=f"a step took {sum(item.seconds for item in split):.2f} s", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for item in split:
        table.add_row(item.phase, f"{item.seconds:.3f}", f"{item.share:.1%}", PHASES.get(item.phase, ""))
    console.print(table)


def _complain(text: str) -> None:
    """Once, where several ranks have the same to say."""
    from dapo_runner.parallel.watch import Watch

    if Watch().says_first(text):
        print(f"dapo: {text}", file=sys.stderr, flush=True)


def _no_overrides(overrides: list[str]) -> None:
    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}")


def _print_evaluations(console: Console, title: str, columns: dict[str, dict[str, float]]) -> None:
    if not columns:
        return
    print(title)  # not the table's own title, which is cut to its width
    table = Table()
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for key in next(iter(columns.values())):
        if key.startswith("eval/"):
            table.add_row(key.removeprefix("eval/"), *(_figure(key, column[key]) for column in columns.values()))
    console.print(table)


def _figure(key: str, value: float) -> str:
    if "@" in key or key in ("eval/truncated", "eval/no_answer"):
        return f"{value:.1%}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _keep_freed_memory() -> None:
    """Let glibc's allocator reuse what was freed. By default it gives blocks of megabytes back to the system at once,
    and decoding, which makes [rows, vocabulary] tensors for every token, spent a third of its time on page faults.
    """
    said = any(name.startswith("MALLOC_") for name in os.environ)  # by the user, who knows better
    if platform.libc_ver()[0] == "glibc" and not said:
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**31 - 1) or libc.mallopt(mmap_threshold, 2**25)  # an older glibc takes no more


def _quiet_libraries() -> None:
    """Loading bars and advice of the libraries would tear the progress display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
