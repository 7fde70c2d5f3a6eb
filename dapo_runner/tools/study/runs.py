"""Run a study: several `dapo train` processes at the same time. A failed run does not affect the others."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from dapo_runner.config import Config, dump_config
from dapo_runner.interrupt import end_with_parent
from dapo_runner.logging.versions import environment
from dapo_runner.tiny_model import ensure_tiny_model
from dapo_runner.tools.study.plan import StudyRun, is_finished

POLL = 0.2  # seconds
GRACE = 60.0  # seconds for runs to save their step when the study is interrupted


class Failure(NamedTuple):
    run: StudyRun
    reason: str  # exit code and last line of output


def make_start(folder: Path, config: Config) -> str:
    """Make a start model that runs share, and its recipe beside it. Return a note."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    notes: list[str] = []
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".yaml").write_text(dump_config(config), encoding="utf-8")
    ensure_tiny_model(config, folder, notes.append)
    return f"{folder}: {notes[-1]}"


def carry_out(runs: Iterable[StudyRun], jobs: int) -> Generator[tuple[StudyRun, float, Failure | None], None, None]:
    """Start ``runs`` in order, ``jobs`` at the same time. Yield each run that ended, its seconds, and why it failed.

    Closing the generator, or an error, stops the current runs. They save their step first.
    """
    made_with = ", ".join(f"{name} {value}" for name, value in environment().items())
    waiting, running = deque(runs), dict[subprocess.Popen[bytes], tuple[StudyRun, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.popleft()
                process = _start(run, f"# {made_with}. Runs side by side: {jobs}.\n")
                running[process] = run, time.monotonic()
            for process in [process for process in running if process.poll() is not None]:
                run, since = running.pop(process)
                yield run, time.monotonic() - since, _failure(run, process.returncode)
            time.sleep(POLL)
    finally:
        _stop(list(running))


def _start(run: StudyRun, made_with: str) -> subprocess.Popen[bytes]:
    run.recipe.parent.mkdir(parents=True, exist_ok=True)
    run.recipe.write_text(made_with + dump_config(run.config), encoding="utf-8")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(run.config.run.threads))
    with run.log.open("ab") as log:
        return subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            start_new_session=True,  # the study gets Ctrl-C and passes it on once
            preexec_fn=end_with_parent,
        )


def _failure(run: StudyRun, code: int) -> Failure | None:
    if code == 0:
        return None if is_finished(run) else Failure(run, "no evaluation after its last step: set data.eval_size")
    *_, last = run.log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    return Failure(run, f"exit code {code}: {last.strip() or 'nothing printed'}")


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # not SIGINT: after a scheduler's SIGTERM to all processes it would not be the first signal
    until = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
