"""`dapo launch`: torchrun, with the options that a run needs and the recipe checked before any process starts."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import load_config, load_sft_config
from dapo_runner.errors import ConfigError
from dapo_runner.parallel.world import make_layout

INTERRUPTED = 130


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """torchrun's own program in this process; what stops it, its ranks have said. Raises ConfigError."""
    for name, least in (("gpus", 1), ("nnodes", 1), ("max_restarts", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least {least}, got {getattr(options, name)}")
    if (options.nnodes > 1) != (options.rdzv_endpoint is not None):
        raise ConfigError("--rdzv-endpoint: expected HOST:PORT beside --nnodes, and only there")
    if options.sft:
        config = load_sft_config(options.config, overrides).training()
    else:
        config = load_config(find_recipe(options.config), overrides)
    make_layout(config, options.gpus * options.nnodes, options.gpus)
    if config.run.device == "auto" and not torch.cuda.is_available():
        print(f"no CUDA GPU found: {options.gpus} processes train on the CPU", file=sys.stderr)
    arguments = _torchrun_arguments(options, overrides)
    print(f"torchrun {shlex.join(arguments)}", flush=True)
    if options.dry_run:
        return _dry_run(options, overrides)
    try:
        torchrun(arguments)
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return INTERRUPTED if failure.exitcode == INTERRUPTED else _failed(rank, failure)
    return 0


def _dry_run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    command, options.simulate = "sft" if options.sft else "train", False
    overrides = [*overrides, f"parallel.gpus={options.gpus * options.nnodes}"]
    return int(importlib.import_module(f"dapo_runner.commands.{command}").run(options, overrides))


def _failed(rank: int, failure: ProcessFailure) -> int:
    how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    print(f"dapo: rank {rank} (process {failure.pid}) ended first, with {how}", file=sys.stderr)
    return 1


def _torchrun_arguments(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    meeting = ["--standalone"]
    if options.nnodes > 1:
        meeting = ["--nnodes", str(options.nnodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", options.rdzv_endpoint]
    restarts = ["--max-restarts", str(options.max_restarts)] if options.max_restarts else []
    program = ["-m", "dapo_runner", "sft" if options.sft else "train", options.config, *overrides]
    return [*meeting, "--nproc-per-node", str(options.gpus), *restarts, *program]
