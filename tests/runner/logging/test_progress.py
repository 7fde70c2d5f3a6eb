"""What a person sees while a run goes on."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from dapo_runner.logging.progress import TREND_WIDTH, LiveProgress, PlainProgress, Progress, make_progress, trend

FIGURES = {"batch/reward": -0.25, "sampling/accuracy": 0.5, "batch/length": 20.0, "train/entropy": 0.1234}
SECONDS = {"rollout": 6.0, "forward_backward": 3.0, "optimizer": 0.5, "sync": 0.25, "other": 0.25, "save": 0.0}
SPEED = {"ranks": 8.0, "tokens_per_second": 12345.6, "mfu": 0.41, "memory_gib": 61.5}


def make_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, legacy_windows=False)


def text_of(console: Console, what: object) -> str:
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_the_live_block_shows_figures_trends_evaluation_and_time() -> None:
    console = make_console(terminal=True)
    live = LiveProgress(console)
    live.start(0, 10)
    try:
        assert "0/10" in text_of(console, live.block())
        for step in (1, 2, 3):
            live.step(step, {**FIGURES, "batch/reward": step / 4}, SECONDS, SPEED)
        live.phase("old_logprobs")
        live.phase("other")
        live.evaluation(3, {"avg@4": 0.875, "problems": 40.0, "length": 3.0})
        block = text_of(console, live.block())
    finally:
        live.close()
    assert "3/10" in block
    assert "old logprobs" in block
    assert "reward    +0.75  ▁▅█" in block or "reward    +0.75  ▁▄█" in block
    assert "0.123" in block
    assert "held-out  step 3: avg@4 87.5% on 40 problems" in block
    assert "time  10.0 s a step: rollout 60%, forward backward 30%, optimizer 5%, sync 2%" in block
    assert "speed  8 ranks, 12,346 trained tokens/s, MFU 41%, 61.5 GiB" in block
    assert "grad" not in block  # a figure that never came


def test_the_live_block_fits_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    live = LiveProgress(console)
    live.step(1, FIGURES, SECONDS, SPEED)
    assert max(map(len, text_of(console, live.block()).splitlines())) <= 40


def test_elsewhere_there_are_plain_lines() -> None:
    console = make_console(terminal=False)
    plain = make_progress("auto", console)
    assert type(plain) is PlainProgress
    plain.start(0, 10)
    plain.phase("rollout")
    plain.step(1, FIGURES, SECONDS, SPEED)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    figures, speed = (
        "reward -0.25  accuracy 50%  length 20  entropy 0.123",
        "8 ranks, 12,346 trained tokens/s, MFU 41%, 61.5 GiB",
    )
    assert out == f"step 1/10  {figures}  10.0 s, {speed}\n"
    assert type(make_progress("auto", make_console(terminal=True))) is LiveProgress
    assert type(make_progress("off", console)) is Progress


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([5.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 7.0, 3.0], "▁█▄"),
        ([0.0, math.nan, 1.0, math.inf], "▁ █ "),
    ],
)
def test_trends(values: list[float], expected: str) -> None:
    assert trend(values) == expected


@pytest.mark.parametrize("n", [TREND_WIDTH - 1, TREND_WIDTH, TREND_WIDTH + 1, 1000])
def test_a_long_trend_is_averaged_down(n: int) -> None:
    drawn = trend([float(value) for value in range(n)])
    assert len(drawn) == min(n, TREND_WIDTH)
    assert drawn == "".join(sorted(drawn))
    assert (drawn[0], drawn[-1]) == ("▁", "█")
