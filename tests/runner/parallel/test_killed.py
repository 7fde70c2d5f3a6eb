"""Killed, and the same command again: nobody can tell from the metrics. On another number of ranks the run says so."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import trains
from launch import environment, launcher, torchrun
from safetensors.torch import load_file
from small import write_recipe

from dapo_runner.checkpoint import checkpoint_to_resume, find_checkpoints, is_whole
from dapo_runner.cli import main
from dapo_runner.logging.metrics import read_log

STEPS = 5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks: one that nothing happened to, one that writes in the background, and one killed as it did."""
    folder = tmp_path_factory.mktemp("runs")
    done = torchrun(2, trains.__file__, write_recipe(folder, steps=STEPS), "whole", "background", "killed")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr or "-9" in done.stderr, done.stderr[-4000:]
    return folder / "runs"


def test_a_save_in_the_background_changes_nothing(runs: Path) -> None:
    equal_runs(runs / "background", runs / "whole")


def test_killed_inside_a_write_and_resumed_equals_uninterrupted(runs: Path) -> None:
    found = checkpoint_to_resume(runs / "killed" / "checkpoints")
    assert found is not None
    assert found.step == trains.KILLED_IN - 1
    done = torchrun(2, "-m", "dapo_runner", "train", runs.parent / "small.yaml", "run.name=killed")
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"resuming after step {found.step}" in done.stdout
    equal_runs(runs / "killed", runs / "whole")


def test_an_engine_that_fails_on_one_rank_loses_no_step(runs: Path) -> None:
    done = torchrun(2, trains.__file__, runs.parent / "small.yaml", "failing")
    assert done.returncode == 0, done.stderr[-4000:]
    assert [found.step for found in find_checkpoints(runs / "failing" / "checkpoints")] == [trains.FAILS_AFTER]


def test_a_save_under_way_is_finished_when_one_rank_stops(runs: Path) -> None:
    torchrun(2, trains.__file__, runs.parent / "small.yaml", "saving")
    assert [found.step for found in find_checkpoints(runs / "saving" / "checkpoints")] == [1]


def equal_runs(one: Path, other: Path, steps: int = STEPS) -> None:
    """The same bytes of metrics, and of the tensors of the last checkpoint (its headers are written in any order)."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    ours, theirs = (checkpoint_to_resume(run / "checkpoints") for run in (one, other))
    assert ours is not None
    assert theirs is not None
    assert ours.step == steps
    files = [path.relative_to(theirs.path) for path in theirs.path.rglob("*.safetensors")]
    assert len(files) == 4
    for file in files:
        expected = load_file(theirs.path / file)
        got = load_file(ours.path / file)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items()), file
    assert [path.name for path in sorted((one / "checkpoints").iterdir())] == [f"step_{steps + n:06d}" for n in (-1, 0)]


def test_going_on_with_other_ranks_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(runs.parent / "small.yaml"), "run.name=background", f"run.steps={STEPS + 1}"]) == 0
    assert "ranks: 2 → 1" in capsys.readouterr().out
    changes = read_log(runs / "background" / "changes.jsonl")
    assert {"step": STEPS, "kind": "change", "key": "ranks", "before": 2, "after": 1} in changes
    steps = [event["step"] for event in read_log(runs / "background" / "metrics.jsonl") if event["kind"] == "step"]
    assert steps == list(range(1, STEPS + 2))


class Launched:
    """A run of two ranks, to be killed."""

    def __init__(self, recipe: Path, *overrides: str) -> None:
        command = launcher(2, "-m", "dapo_runner", "train", recipe, *overrides)
        self.agent = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.ranks: dict[int, int] = {}  # their process ids

    def find_ranks(self) -> None:
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
        for child in map(int, children):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            self.ranks |= {int(item[5:]): child for item in variables if item.startswith(b"RANK=")}

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Whether the run is still there after ``seconds``, or when ``until`` comes true."""
        deadline = time.monotonic() + seconds
        while self.agent.poll() is None and (len(self.ranks) < 2 or (time.monotonic() < deadline and not until())):
            if len(self.ranks) < 2:
                with suppress(OSError):
                    self.find_ranks()
            time.sleep(0.002)
        return self.agent.poll() is None

    def kill(self, victim: str, rng: random.Random) -> float:
        """Returns the seconds until nothing of the run was left."""
        ranks, began = list(self.ranks.values()), time.monotonic()
        pids = {"launcher": self.agent.pid, "rank 0": self.ranks[0], "any rank": rng.choice(ranks)}
        with suppress(ProcessLookupError):  # it has just come to its end
            os.kill(pids[victim], signal.SIGKILL)
        self.agent.wait(timeout=120)
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < began + 120, "orphans live on"
            time.sleep(0.01)
        return time.monotonic() - began


MANY_STEPS, KILLS = 40, 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nothing happened to, and how many seconds it took."""
    folder, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    done = torchrun(2, "-m", "dapo_runner", "train", write_recipe(folder, steps=MANY_STEPS))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs" / "small", time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["any rank", "rank 0", "launcher"])
def test_killed_at_random_moments(whole: tuple[Path, float], tmp_path: Path, victim: str) -> None:
    """The last of them inside of a write."""
    (uninterrupted, seconds), rng = whole, random.Random(victim)
    recipe, run = write_recipe(tmp_path, steps=MANY_STEPS), tmp_path / "runs" / "small"
    took: list[float] = []
    in_a_write = half_written = 0

    def unfinished() -> list[Path]:
        return list((run / "checkpoints").glob("*.unfinished"))

    def is_writing() -> bool:
        return bool(unfinished())

    while len(took) < KILLS or not in_a_write:
        for leftover in unfinished():
            shutil.rmtree(leftover)
        at_random = len(took) < KILLS - 1
        launched = Launched(recipe, f"run.async_save={rng.choice(['true', 'false'])}")
        if not launched.wait((lambda: False) if at_random else is_writing, rng.uniform(0.3, 1.0) * seconds):
            assert launched.agent.returncode == 0  # it came to its end before: from the first step again
            shutil.rmtree(run)
            continue
        in_a_write += is_writing()
        took.append(launched.kill(victim, rng))
        half_written += is_writing()
        assert all(is_whole(found.path) for found in find_checkpoints(run / "checkpoints"))
    print(f"{victim}: {len(took)} kills, {in_a_write} inside of a write, which {half_written} left half done;", end=" ")
    print(f"nothing of the run was left after {max(took):.1f} s at most")
    done = torchrun(2, "-m", "dapo_runner", "train", recipe)
    assert done.returncode == 0, done.stderr[-4000:]
    equal_runs(run, uninterrupted, MANY_STEPS)
