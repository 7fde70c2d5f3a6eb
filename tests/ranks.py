"""Processes that are the ranks of a group over gloo, as torchrun would start them on one machine without a GPU."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

import forks
import torch
import torch.distributed as dist


def on_ranks(n_ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call ``function(rank, *args)`` on every rank, a function of a module; an exception on one is raised here.
    Their environment is the one that the first fork had.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, (n_ranks, folder, function, args), n_ranks, start_method=forks.METHOD
        )


def _rank(rank: int, n_ranks: int, folder: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    for who in ("", "LOCAL_"):
        os.environ |= {f"{who}RANK": str(rank), f"{who}WORLD_SIZE": str(n_ranks)}
    # Fabric and accelerate want to see torchrun, or to start processes of their own; nobody listens at the port.
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "tests",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    os.environ["ACCELERATE_USE_CPU"] = "true"
    store = dist.FileStore(f"{folder}/store", n_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=datetime.timedelta(seconds=60))
    function(rank, *args)
    dist.barrier()  # who leaves first takes the store with it
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads, where they outlive the interpreter, abort the process
