"""`kill -9` at any moment, the same command again, and nobody can tell from the metrics nor from the rollouts."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import CONTEXT
from safetensors.torch import load_file
from small import write_recipe

from dapo_runner.checkpoint import checkpoint_to_resume, files, find_checkpoints, is_whole, optimizer
from dapo_runner.cli import main

STEPS = 6


def run_command(recipe: Path) -> None:
    raise SystemExit(main(["train", str(recipe), "logging.rollouts.per_token=true"]))


def run_and_die(recipe: Path, name: str, function: str, call: int) -> None:
    """The same, killed as it enters ``function`` of a checkpoint's module for the ``call``-th time."""
    module = importlib.import_module(name)
    original, calls = getattr(module, function), iter(range(1, 10**6))

    def deadly(*arguments: object) -> object:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(module, function, deadly)
    run_command(recipe)


def start(recipe: Path) -> BaseProcess:
    process = CONTEXT.Process(target=run_command, args=(recipe,))
    process.start()
    return process


def records(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "metrics.jsonl", *(run / "rollouts").iterdir())}


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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    run_to_the_end(write_recipe(folder, steps=STEPS))
    return records(folder / "runs" / "small")


def test_killed_three_times_and_resumed_equals_uninterrupted(uninterrupted: dict[str, bytes], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    run = tmp_path / "runs" / "small"
    log = run / "metrics.jsonl"
    kill_when(recipe, log, lines=1, delay=0.0)  # before the first checkpoint
    for lines, delay in ((3, 0.0), (6, 0.03)):  # right behind a line; some way into the step or the save
        kill_when(recipe, log, lines, delay)
        assert all(is_whole(checkpoint.path) for checkpoint in find_checkpoints(run / "checkpoints"))
    run_to_the_end(recipe)
    assert records(run) == uninterrupted


# Between model and optimizer; with all files but the manifest; in the midst of it; before the folder gets its name.
@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        (optimizer, "_file_of_each", 3),
        pytest.param(files, "finish", 2, marks=pytest.mark.slow),
        pytest.param(files, "_digest", 9, marks=pytest.mark.slow),
        (files, "force_to_disk", 14),
    ],
)
def test_killed_inside_a_checkpoint_write(
    uninterrupted: dict[str, bytes], tmp_path: Path, module: ModuleType, function: str, call: int
) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    run = tmp_path / "runs" / "small"
    process = CONTEXT.Process(target=run_and_die, args=(recipe, module.__name__, function, call))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint_to_resume(run / "checkpoints") is not None
    run_to_the_end(recipe)
    assert records(run) == uninterrupted
    assert not list((run / "checkpoints").glob("*.unfinished"))


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    steps, rng = 25, random.Random(0)
    whole = write_recipe(tmp_path, steps=steps, name="whole")
    start_time = time.monotonic()
    run_to_the_end(whole)
    seconds = time.monotonic() - start_time
    recipe = write_recipe(tmp_path, steps=steps)
    run = tmp_path / "runs" / "small"
    kills = 0
    while kills < 10:
        process = start(recipe)
        process.join(timeout=rng.uniform(0.05, 0.3) * seconds)
        if not process.is_alive():  # it came to its end before ten: from the first step again
            assert process.exitcode == 0
            shutil.rmtree(run)
            continue
        process.kill()
        process.join(timeout=60)
        kills += 1
        assert all(is_whole(found.path) for found in find_checkpoints(run / "checkpoints"))
    run_to_the_end(recipe)
    expected = (tmp_path / "runs" / "whole" / "metrics.jsonl").read_bytes()
    assert (run / "metrics.jsonl").read_bytes() == expected
    tensors = [checkpoint_to_resume(folder / "checkpoints") for folder in (run, tmp_path / "runs" / "whole")]
    file = "optimizer/shard-00001-model-00001-of-00001.safetensors"
    one, two = (load_file(found.path / file) for found in tensors if found is not None)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_killed_while_the_model_is_made(uninterrupted: dict[str, bytes], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    run = tmp_path / "runs" / "small"
    kill_when(recipe, run / "config.yaml", lines=1, delay=0.2)
    run_to_the_end(recipe)
    assert records(run) == uninterrupted
