"""`dapo launch`: check a recipe, then start it on several processes with torchrun."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from dapo_runner.commands.output import INTERRUPTED, complain
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import ConfigError, SftConfig, apply_overrides, load_config, parse, read_recipe
from dapo_runner.parallel.world import make_layout


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run torchrun in this process. Its ranks print their own errors. Raises ConfigError."""
    for name, least in (("gpus", 1), ("nnodes", 1), ("max_restarts", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least {least}, got {getattr(options, name)}")
    if (options.nnodes > 1) != (options.rdzv_endpoint is not None):
        raise ConfigError("--rdzv-endpoint: required with --nnodes above 1, and only then. Set both or neither.")
    command = "sft" if options.sft else "train"
    if options.sft:
        config = parse(apply_overrides(read_recipe(options.config), overrides), SftConfig).training()
    else:
        config = load_config(find_recipe(options.config), overrides)
    gpus = options.gpus * options.nnodes
    make_layout(config, gpus, options.gpus)
    if config.run.device == "auto" and not torch.cuda.is_available():
        print(f"no CUDA GPU found: training on the CPU with {options.gpus} processes", file=sys.stderr)
    several = ["--nnodes", str(options.nnodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", options.rdzv_endpoint]
    several += ["--rdzv-id", config.run.name]  # two runs with one endpoint do not join
    arguments = [*(several if options.nnodes > 1 else ["--standalone"]), "--nproc-per-node", str(options.gpus)]
    arguments += ["--max-restarts", str(options.max_restarts)] if options.max_restarts else []
    arguments += ["-m", "dapo_runner", command, options.config, *overrides]
    print(f"torchrun {shlex.join(arguments)}", flush=True)
    if options.dry_run:
        options.simulate = False
        module = importlib.import_module(f"dapo_runner.commands.{command}")
        return int(module.run(options, [*overrides, f"parallel.gpus={gpus}"]))
    if options.max_restarts:  # in the launcher's store a rank may find addresses of the attempt before
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun(arguments)
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        rank, failure = _cause(error.failures)
        if failure.exitcode == INTERRUPTED:
            return INTERRUPTED
        reason = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        hint = ", which often means out of memory" if failure.exitcode == -9 else ""
        complain(f"rank {rank} (process {failure.pid}) failed first, with {reason}{hint}")
        return 2 if failure.exitcode == 2 else 1  # 2: a setting was refused, so that no scheduler tries again
    return 0


def _cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that probably ended first. Ranks that lose another may be seen to end in the same second."""
    first = min(failure.timestamp for failure in failures.values())
    together = [(rank, failure) for rank, failure in failures.items() if failure.timestamp <= first + 1]
    return min(together, key=lambda item: item[1].exitcode in (1, -signal.SIGTERM, -signal.SIGABRT, INTERRUPTED))
