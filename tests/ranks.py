"""Processes that are the ranks of a group over gloo, as torchrun would start them on one machine without a GPU."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import forks
import torch
import torch.distributed as dist


def on_ranks(n_ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call ``function(rank, *args)`` on every rank, a function of a module; an exception on one is raised here.
    Their environment is the one that the first fork had, and this process keeps their store, as a launcher does.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(
        _rank, (n_ranks, store.port, function, args), n_ranks, start_method=forks.METHOD
    )


def _rank(rank: int, n_ranks: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_tests, daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # collections leave out what all ranks have
    gc.set_threshold(50_000)
    for who in ("", "LOCAL_"):
        os.environ |= {f"{who}RANK": str(rank), f"{who}WORLD_SIZE": str(n_ranks)}
    # Fabric and accelerate want to see torchrun, or to start processes of their own.
    launcher = {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**launcher, "GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    store = dist.PrefixStore("ranks", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=datetime.timedelta(minutes=10))
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads, where they outlive the interpreter, abort the process


def _end_with_tests() -> None:
    """Leave when the tests' process is gone, which cannot end its ranks if it is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
