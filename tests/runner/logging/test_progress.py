"""What a person sees while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dapo_runner.logging.metrics import sampling_metrics
from dapo_runner.logging.progress import make_progress
from dapo_runner.rollout.group_buffer import SamplingStats

FIGURES = {"batch/reward": -0.25, "sampling/accuracy": 0.5, "batch/length": 20.0, "train/entropy": 0.1234}
STATS = SamplingStats(groups=8, all_correct=3, all_incorrect=3, mixed=2, varying_reward=6, samples=16)
SECONDS = {"rollout": 6.0, "forward_backward": 3.0, "optimizer": 0.5, "sync": 0.25, "other": 0.25, "save": 0.0}
SPEED = {"ranks": 8.0, "tokens_per_second": 12345.6, "mfu": 0.41, "memory_gib": 61.5}


def make_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, legacy_windows=False)


def written(mode: str, terminal: bool, figures: dict[str, float] = FIGURES) -> str:
    console = make_console(terminal)
    progress = make_progress(mode, console)  # type: ignore[arg-type]
    progress.start(0, 10)
    progress.phase("old_logprobs")
    progress.step(1, figures, SECONDS, SPEED)
    progress.evaluation(1, {"avg@4": 0.875, "exam/avg@4": 0.5, "exam/cons@4": 0.5, "problems": 40.0, "length": 3.0})
    progress.close()
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_step_and_an_evaluation_are_a_line_each() -> None:
    step, evaluation = written("auto", terminal=False).splitlines()
    for number in ("1/10", "reward -0.25", "accuracy 50%", "length 20", "entropy 0.123", "10.0 s", "rollout 60%"):
        assert number in step
    for number in ("12,346 trained tokens/s", "MFU 41%", "61.5 GiB"):
        assert number in step
    assert "grad" not in step  # it was not logged
    assert "avg@4 87.5%, exam/avg@4 50.0% on 40 problems" in evaluation
    assert "cons" not in evaluation


@pytest.mark.parametrize(
    ("filter_on", "shown", "hidden"), [("correctness", "mixed 25%", "varying"), ("reward", "varying 75%", "mixed")]
)
def test_the_share_of_groups_is_of_those_that_the_filter_accepts(filter_on: str, shown: str, hidden: str) -> None:
    step = written("plain", False, FIGURES | sampling_metrics(STATS, filter_on)).splitlines()[0]
    assert shown in step
    assert hidden not in step


def test_a_terminal_has_a_bar_below_them() -> None:
    out = written("auto", terminal=True)
    assert "step 1/10" in out
    assert "old logprobs" in out
    assert written("plain", terminal=True) == written("auto", terminal=False)
    assert "old logprobs" in written("live", terminal=False)
    assert written("off", terminal=True) == ""
