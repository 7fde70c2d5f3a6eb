"""The `dapo` command. A user error prints one line and exits with 2, a run that cannot continue or a file that cannot
be used with 1; all other errors keep their traceback. `--help`, `recipes`, `doctor` need none of the runner's packages.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dapo_runner.commands.output import INTERRUPTED, complain, share_warnings
from dapo_runner.errors import ConfigError, RunError, is_ours
from dapo_runner.interrupt import StepAbandonedError, end_with_parent
from dapo_runner.packages import RUNNER_EXTRA, missing_for_runner, version
from dapo_runner.preflight.amx import disable_broken_amx

RUN_ERROR, USER_ERROR = 1, 2
WITHOUT_RUNNER = ("doctor", "recipes")
RESUMED = ("train", "sft", "launch", "study", "convert-answers")

Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """Return the arguments for ``ArgumentParser.add_argument``."""
    return names, options


class Command(NamedTuple):
    help: str
    arguments: tuple[Argument, ...]
    takes: str  # the usage line before [options] of a command that takes section.key=value; else ""
    function: str  # module:function in dapo_runner.commands


COMMANDS: dict[str, Command] = {}


def command(name: str, help: str, *arguments: Argument, takes: str = "", function: str = "") -> None:
    COMMANDS[name] = Command(help, arguments, takes, function or f"{name}:run")


VERSION = argument("--version", action="version", help="print the version of this package")
CONFIG = argument("config", help="a YAML file, or the name of a recipe (dapo recipes lists them)")
RUNS = argument("run", type=Path, nargs="+", help="the folder of a run")
DRY_RUN = argument("--dry-run", action="store_true", help="print the resolved settings and the preflight checks")
SIMULATE = argument("--simulate", action="store_true", help="estimate the memory of one rank with fake tensors")

command("train", "run a recipe, or resume its run", CONFIG, DRY_RUN, SIMULATE, takes="CONFIG")
command(
    "sft",
    "run supervised fine-tuning on examples or a judge's verdicts",
    argument("config", help="a YAML file: docs/sft.md"),
    argument("--dry-run", action="store_true", help="read the data, print a summary and the preflight checks"),
    takes="CONFIG",
)
command(
    "study",
    "compare variants of a recipe over several seeds",
    argument("config", metavar="STUDY", help="a YAML file, or the name of a study (dapo recipes lists them)"),
    argument("--jobs", type=int, metavar="N", help="runs at the same time (default: cores ÷ threads)"),
    argument("--dry-run", action="store_true", help="check every variant and print how many runs are done"),
    argument("--check", type=Path, metavar="FILE", help="compare a study's JSON file with the page beside it"),
)
command(
    "launch",
    "train on several GPUs with torchrun",
    CONFIG,
    argument("--gpus", type=int, required=True, metavar="N", help="processes on this machine, one per GPU"),
    argument("--nnodes", type=int, default=1, metavar="M", help="machines; run the same command on each (default: 1)"),
    argument("--rdzv-endpoint", metavar="HOST:PORT", help="one of the machines and a free port on it"),
    argument("--sft", action="store_true", help="run dapo sft instead of dapo train"),
    argument("--max-restarts", type=int, default=0, metavar="R", help="restarts after a failure (default: 0)"),
    DRY_RUN,
    takes="CONFIG --gpus N",
)
command(
    "serve",
    "start a vLLM server for the rollouts of a recipe",
    CONFIG,
    argument("--server", type=int, default=0, metavar="I", help="index into rollout.server.urls (default: 0)"),
    takes="CONFIG",
)
command(
    "eval",
    "evaluate a model on held-out problems",
    argument("target", help="the folder of a run (evaluates its newest checkpoint), a checkpoint, or a recipe"),
    argument("--json", type=Path, metavar="FILE", help="also write the metrics, and each problem, to FILE"),
    argument("--responses", type=Path, metavar="FOLDER", help="save all responses in FOLDER, for dapo show"),
    takes="RUN|CHECKPOINT|CONFIG",
    function="evaluate:run",
)
command(
    "report",
    "draw the curves of a run as a picture or a web page",
    RUNS,
    argument("--html", action="store_true", help="write a web page with curves and rollouts, in one file"),
    argument("--out", type=Path, help="output file (default: report.png or report.html in the first run's folder)"),
    argument("--max-mb", type=float, default=50.0, metavar="MB", help="size of the rollouts at most (default: 50)"),
    function="logs:report",
)
command(
    "watch",
    "serve a web page of the runs on localhost and update it while they train",
    RUNS,
    argument("--port", type=int, default=8642, help="port (default: 8642; 0: any free port)"),
    function="logs:watch",
)
command(
    "show",
    "show the rollouts of a step, group by group",
    argument("run", type=Path, help="the folder of a run"),
    argument("--eval", action="store_true", help="show the answers to held-out problems instead"),
    argument("--step", type=int, metavar="N", help="which step (default: list the steps that are saved)"),
    argument("--group", type=int, metavar="G", help="show only group G"),
    argument("--json", action="store_true", help="print one line of JSON per group"),
    function="logs:show",
)
command(
    "convert-answers",
    "rewrite problems so that their answers are integers",
    argument("source", type=Path, metavar="IN", help="a data set (file, folder or hub name): docs/convert-answers.md"),
    argument("out", type=Path, metavar="OUT", help="a .jsonl file that does not exist yet"),
    takes="IN OUT",
    function="convert_answers:run",
)
command(
    "recipes",
    "list the recipes that come with this package",
    argument("name", nargs="?", help="print this recipe: dapo recipes tiny > mine.yaml"),
)
command("doctor", "show what is installed, what is missing and how to install it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Not every locale has an arrow, and none a name that is no text. Standard output may be no file, or not seek.
    with suppress(AttributeError, OSError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return USER_ERROR
    options, overrides = parser.parse_known_args(arguments)
    _keep_freed_memory()
    gc.set_threshold(50_000)  # Python's 700 takes a tenth of a tiny run: each response makes many objects
    disable_broken_amx()
    if "LOCAL_RANK" in os.environ:  # else ranks of a killed launcher would live on and block the next attempt
        end_with_parent()
        share_warnings()
    is_dry = getattr(options, "dry_run", False) or getattr(options, "simulate", False)
    again = ". Run the same command again to resume" if options.command in RESUMED and not is_dry else ""
    try:
        return _run(options, overrides)
    except (BrokenPipeError, SystemExit) as error:  # `dapo show … | head`; rich turns it into SystemExit
        of_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        if not (of_rich or (isinstance(error, BrokenPipeError) and is_ours(error))):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports it again at exit
        if options.command in RESUMED:
            complain(f"the output was closed{again}")
        return RUN_ERROR if options.command in RESUMED else 0
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, OSError) and not is_ours(error):
            raise
        complain(str(error))
        return USER_ERROR if isinstance(error, ConfigError) else RUN_ERROR
    except (KeyboardInterrupt, StepAbandonedError):
        complain(f"interrupted{again}")
        return INTERRUPTED


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    chosen = COMMANDS[options.command]
    if overrides and not chosen.takes:
        raise ConfigError(f"dapo {options.command}: expected no further argument, got {overrides[0]!r}")
    if options.command not in WITHOUT_RUNNER and (missing := missing_for_runner()):
        raise ConfigError(f"dapo {options.command}: requires the packages {', '.join(missing)}. {RUNNER_EXTRA}")
    module, _, function = chosen.function.partition(":")
    return int(getattr(importlib.import_module(f"dapo_runner.commands.{module}"), function)(options, overrides))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO.", allow_abbrev=False)
    parser.add_argument(*VERSION[0], **VERSION[1], version=version("dapo-kernels") or "not installed")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, described in COMMANDS.items():
        added = commands.add_parser(name, help=described.help, description=described.help, allow_abbrev=False)
        for names, options in described.arguments:
            added.add_argument(*names, **options)
        if described.takes:
            added.usage = f"{added.prog} {described.takes} [options] [section.key=value …]"
    return parser


def _keep_freed_memory() -> None:
    """Let glibc's allocator reuse freed memory. By default it returns large blocks to the system at once: decoding,
    which makes [rows, vocabulary] tensors for every token, then spent a third of its time on page faults.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not is_set:
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**31 - 1) or libc.mallopt(mmap_threshold, 2**25)  # the limit of an older glibc
