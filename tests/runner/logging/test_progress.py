"""What a person sees while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console

from dapo_runner.logging.progress import make_progress

FIGURES = {"batch/reward": -0.25, "sampling/accuracy": 0.5, "batch/length": 20.0, "train/entropy": 0.1234}
SECONDS = {"rollout": 6.0, "forward_backward": 3.0, "optimizer": 0.5, "sync": 0.25, "other": 0.25, "save": 0.0}
SPEED = {"ranks": 8.0, "tokens_per_second": 12345.6, "mfu": 0.41, "memory_gib": 61.5}


def make_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, legacy_windows=False)


def written(mode: str, terminal: bool) -> str:
    console = make_console(terminal)
    progress = make_progress(mode, console)  # type: ignore[arg-type]
    progress.start(0, 10)
    progress.phase("old_logprobs")
    progress.step(1, FIGURES, SECONDS, SPEED)
    progress.evaluation(1, {"avg@4": 0.875, "exam/avg@4": 0.5, "exam/cons@4": 0.5, "problems": 40.0, "length": 3.0})
    progress.close()
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_step_and_an_evaluation_are_a_line_each() -> None:
    step, evaluation = written("auto", terminal=False).splitlines()
    for number in ("1/10", "reward -0.25", "accuracy 50%", "length 20", "entropy 0.123", "10.0 s", "rollout 60%"):
        assert number in step
    for number in ("12,346", "MFU 41%", "61.5 GiB"):
        assert number in step
    assert "grad" not in step  # it was not logged
    assert "avg@4 87.5%, exam/avg@4 50.0% on 40 problems" in evaluation
    assert "cons" not in evaluation


def test_a_terminal_has_a_bar_below_them() -> None:
    out = written("auto", terminal=True)
    assert "step 1/10" in out
    assert "old logprobs" in out
    assert written("plain", terminal=True) == written("auto", terminal=False)
    assert "old logprobs" in written("live", terminal=False)
    assert written("off", terminal=True) == ""
