"""`kill -9` at any moment, the same command again, and nobody can tell from the metrics."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from small import write_recipe

from dapo_runner.checkpoint import find_checkpoints, is_whole
from dapo_runner.cli import main

STEPS = 6

# Real processes, forked from one that has the imports behind it: a fresh interpreter spends seconds on them.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dapo_runner.train", "dapo_runner.report", "transformers.models.llama"])


def run_command(recipe: Path) -> None:
    raise SystemExit(main(["train", str(recipe)]))


def start(recipe: Path) -> BaseProcess:
    process = CONTEXT.Process(target=run_command, args=(recipe,))
    process.start()
    return process


def run_to_the_end(recipe: Path) -> None:
    process = start(recipe)
    process.join(timeout=300)
    assert process.exitcode == 0


def kill_when(recipe: Path, log: Path, lines: int, delay: float) -> None:
    """Start a run and kill it ``delay`` seconds after its log has ``lines`` lines."""
    process = start(recipe)
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_bytes().count(b"\n") >= lines):
        assert process.is_alive(), "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    run_to_the_end(write_recipe(folder, steps=STEPS))
    return (folder / "runs" / "small" / "metrics.jsonl").read_bytes()


def test_killed_three_times_and_resumed_equals_uninterrupted(uninterrupted: bytes, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    run = tmp_path / "runs" / "small"
    log = run / "metrics.jsonl"
    kill_when(recipe, log, lines=1, delay=0.0)  # before the first checkpoint
    for lines, delay in ((3, 0.0), (6, 0.03)):  # right behind a line; some way into the step or the save
        kill_when(recipe, log, lines, delay)
        assert all(is_whole(checkpoint.path) for checkpoint in find_checkpoints(run / "checkpoints"))
    run_to_the_end(recipe)
    assert log.read_bytes() == uninterrupted


def test_killed_while_the_model_is_made(uninterrupted: bytes, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    run = tmp_path / "runs" / "small"
    kill_when(recipe, run / "config.yaml", lines=1, delay=0.2)
    run_to_the_end(recipe)
    assert (run / "metrics.jsonl").read_bytes() == uninterrupted
