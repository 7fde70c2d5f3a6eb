"""The `dapo` command. A mistake of the user ends in one line and exit code 2; anything else keeps its
traceback. This module, `--help`, `recipes` and `doctor` need no package of the runner's.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo_runner.commands.complain import complain
from dapo_runner.errors import ConfigError
from dapo_runner.interrupt import end_with_parent
from dapo_runner.preflight.amx import disable_broken_amx
from dapo_runner.preflight.packages import RUNNER_EXTRA, missing_for_runner

USER_ERROR, INTERRUPTED = 2, 130
COMMANDS = "dapo_runner.commands"
WITHOUT_RUNNER = ("doctor", "recipes")
WITH_OVERRIDES = ("train", "sft", "launch", "serve", "evaluate", "convert_answers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return USER_ERROR
    options, overrides = parser.parse_known_args(arguments)
    _keep_freed_memory()
    disable_broken_amx()
    if "RANK" in os.environ:
        # A launcher that is killed would leave its ranks behind, in the way of the next attempt, or waiting for a store
        # that is gone.
        end_with_parent()
    try:
        return _run(options, overrides)
    except ConfigError as error:
        complain(str(error))
        return USER_ERROR
    except BrokenPipeError:  # `dapo show … | head`: the rest is not wanted, nor a complaint as Python closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        complain("interrupted; the same command goes on from the last checkpoint")
        return INTERRUPTED


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides and options.command not in WITH_OVERRIDES:
        raise ConfigError(f"unexpected argument {overrides[0]!r}")
    if options.command not in WITHOUT_RUNNER and (missing := missing_for_runner()):
        raise ConfigError(f"expected the runner's packages, {', '.join(missing)} not installed: {RUNNER_EXTRA}")
    return int(importlib.import_module(f"{COMMANDS}.{options.command}").run(options, overrides))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=importlib.metadata.version("dapo-kernels"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe, or take up a run where it stopped", allow_abbrev=False)
    train.add_argument("config", help="a YAML file, or the name of a recipe: dapo recipes")
    train.add_argument("--dry-run", action="store_true", help="print the plan and what is missing here; no download")
    train.add_argument("--simulate", action="store_true", help="one rank of many, without memory: what fits")
    train.set_defaults(command="train")

    sft = commands.add_parser("sft", help="supervised: imitate examples, or a judge's verdicts", allow_abbrev=False)
    sft.add_argument("config", help="a YAML file: docs/sft.md")
    sft.add_argument("--dry-run", action="store_true", help="print the plan and what is missing here; no download")
    sft.set_defaults(command="sft")

    study = commands.add_parser("study", help="several variants of a recipe over several seeds, on one page")
    study.add_argument("config", metavar="STUDY", help="a YAML file, or the name of a study: dapo recipes")
    study.add_argument("--jobs", type=int, metavar="N", help="runs side by side (default: the study's)")
    study.add_argument("--dry-run", action="store_true", help="check every variant and print how many runs are done")
    study.set_defaults(command="study")

    launch = commands.add_parser("launch", help="train on several GPUs: torchrun … dapo train", allow_abbrev=False)
    launch.add_argument("config", help="a YAML file, or the name of a recipe")
    launch.add_argument("--gpus", type=int, required=True, metavar="N", help="processes of this machine, one for a GPU")
    launch.add_argument("--nnodes", type=int, default=1, metavar="M", help="machines; the same command on each")
    launch.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: on one of them, a free port")
    launch.add_argument("--sft", action="store_true", help="a recipe for dapo sft")
    launch.add_argument("--max-restarts", type=int, default=0, metavar="R", help="times to go on by itself")
    launch.add_argument("--dry-run", action="store_true", help="print the command, the plan and what is missing here")
    launch.set_defaults(command="launch")

    serve = commands.add_parser("serve", help="a vLLM server for the rollouts of a recipe", allow_abbrev=False)
    serve.add_argument("config", help="a YAML file, or the name of a recipe")
    serve.add_argument("--server", type=int, default=0, metavar="I", help="which of rollout.server.urls (default: 0)")
    serve.set_defaults(command="serve")

    evaluate = commands.add_parser("eval", help="avg@k of a model on held-out problems", allow_abbrev=False)
    evaluate.add_argument("target", help="a run's folder (its newest checkpoint), a checkpoint, or a recipe")
    evaluate.add_argument("--show", type=int, default=0, metavar="N", help="print N scored responses")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    evaluate.set_defaults(command="evaluate")

    report = commands.add_parser("report", help="draw the curves of a run: a picture, or a page", allow_abbrev=False)
    report.add_argument("run", type=Path, nargs="+", help="a run's folder; with --html several, side by side")
    report.add_argument("--html", action="store_true", help="a page with zoomable curves and the rollouts, in one file")
    report.add_argument("--out", type=Path, help="where to (default: report.png or .html in the first run's folder)")
    report.add_argument(
        "--max-mb", type=float, default=50.0, metavar="MB", help="rollouts in the page at most (default: 50)"
    )
    report.set_defaults(command="report")

    watch = commands.add_parser("watch", help="serve that page of runs under way, on localhost", allow_abbrev=False)
    watch.add_argument("run", type=Path, nargs="+", help="a run's folder")
    watch.add_argument("--port", type=int, default=8642, help="default: 8642; 0: any that is free")
    watch.set_defaults(command="watch")

    show = commands.add_parser("show", help="read the rollouts of a step, group by group", allow_abbrev=False)
    show.add_argument("run", type=Path, help="a run's folder")
    show.add_argument("--eval", action="store_true", help="the answers to held-out problems instead")
    show.add_argument("--step", type=int, metavar="N", help="which step; without it: a list of those that are kept")
    show.add_argument("--group", type=int, metavar="G", help="only the G-th group of the step")
    show.add_argument("--json", action="store_true", help="a line of JSON for each group")
    show.set_defaults(command="show")

    convert = commands.add_parser(
        "convert-answers", help="rewrite problems so that their answers are integers", allow_abbrev=False
    )
    convert.add_argument("source", type=Path, metavar="IN", help="a data set: docs/convert-answers.md")
    convert.add_argument("out", type=Path, metavar="OUT", help="a .jsonl file that is not there yet")
    convert.set_defaults(command="convert_answers")

    recipes = commands.add_parser("recipes", help="the recipes that come with this package", allow_abbrev=False)
    recipes.add_argument("name", nargs="?", help="print this one: dapo recipes tiny > mine.yaml")
    recipes.set_defaults(command="recipes")

    doctor = commands.add_parser("doctor", help="what is installed, what is missing and how to get it")
    doctor.set_defaults(command="doctor")

    for command, target in (
        (train, "CONFIG"),
        (sft, "CONFIG"),
        (launch, "CONFIG --gpus N"),
        (serve, "CONFIG"),
        (evaluate, "RUN|CHECKPOINT|CONFIG"),
        (convert, "IN OUT"),
    ):
        command.usage = f"{command.prog} {target} [options] [section.key=value …]"
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
