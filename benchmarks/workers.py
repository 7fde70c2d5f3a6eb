"""Configurations measured in processes of their own, so that one that dies leaves the others' figures.

One process serves one configuration after another, as long as they want the same environment, until it dies; a new one
goes on with the next. What has to be in force from a process's start is its environment: the allocator, the instruction
set. On the CPU that process only holds the inputs and forks for every contestant (``harness.py``).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import allocators
from benchmarks.configs import Config
from benchmarks.gpu_configs import SUITES

ROOT = Path(__file__).resolve().parent.parent
# The instruction set an older processor would give: to dapo_kernels, to eager PyTorch and to torch.compile.
_ISA_ENVIRONMENT = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_CPP_SIMDLEN": "256"},
    "portable": {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CPP_SIMDLEN": "1"},
}
_LAST_LINES = 3

Record = dict[str, Any]
Progress = Callable[[Config, str], None]


def measured(
    suite: str, configs: Sequence[Config], threads: int, seconds: float | None, progress: Progress
) -> Iterator[Record]:
    """The records of configurations of one suite, in order, each as soon as it is there.

    Args:
        seconds: time for all of them. What is under way then is stopped; it and the rest have a "not_run" reason in
            place of figures. ``None``: no limit.
        progress: told what a worker is doing.
    """
    began = time.monotonic()
    left = list(configs)
    while left:
        remaining = None if seconds is None else seconds - (time.monotonic() - began)
        if remaining is not None and remaining <= 0:
            break
        served = sum(1 for _ in itertools.takewhile(lambda config: _kind(config) == _kind(left[0]), left))
        for record in _in_worker(suite, left[:served], threads, remaining, progress):
            left.pop(0)
            yield record
    for config in left:
        yield {"config": config.name, "rows": [], "not_run": f"the {seconds:.0f} s of this run were over"}


def _in_worker(
    suite: str, configs: Sequence[Config], threads: int, seconds: float | None, progress: Progress
) -> Iterator[Record]:
    """Records until the worker ends: of all configurations, or with an "error" for the one it died in.

    A worker whose time is over is stopped, and the configuration it was at has no record at all.
    """
    done = 0
    overdue = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(
            _command(suite, configs, threads),
            cwd=ROOT,
            env=_environment(configs[0], threads),
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
        )

        def stop() -> None:
            overdue.set()
            worker.kill()

        timer = threading.Timer(seconds or 0.0, stop)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        assert worker.stdout is not None
        for line in worker.stdout:
            message: dict[str, Any] = json.loads(line) if line.startswith("{") else {"progress": line.strip()}
            if "record" in message:
                done += 1
                yield message["record"]
            else:
                progress(configs[min(done, len(configs) - 1)], message["progress"])
        code = worker.wait()
        timer.cancel()
        log.seek(0)
        last_words = " | ".join(log.read().splitlines()[-_LAST_LINES:])
    if done < len(configs) and not overdue.is_set():
        yield {"config": configs[done].name, "rows": [], "error": f"worker ended with {code}: {last_words}"}


def _command(suite: str, configs: Sequence[Config], threads: int) -> list[str]:
    indices = [str(SUITES[suite].index(config)) for config in configs]
    return [sys.executable, "-m", "benchmarks.worker", suite, str(threads), *indices]


def _kind(config: Config) -> tuple[str, ...]:
    """Configurations of one kind can be served by one process."""
    return ("cuda",) if config.device == "cuda" else (config.allocator, config.isa or "")


def _environment(config: Config, threads: int) -> dict[str, str]:
    environment = dict(os.environ) if config.device == "cuda" else allocators.environment(config.allocator)
    environment["OMP_NUM_THREADS"] = str(threads)
    # Inductor's pool of compiling processes would be forked from ours; there is one kernel to compile at a time.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(ROOT) if not path else f"{ROOT}{os.pathsep}{path}"
    if config.isa is not None:
        environment |= {"DAPO_KERNELS_ISA": config.isa, **_ISA_ENVIRONMENT[config.isa]}
    return environment
