"""What a person sees while a run goes on: one live block on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from dapo_runner.sampler import SamplingStats

STEP_FIGURES = (
    ("reward", "batch/reward", "{:+.2f}"),
    ("accuracy", "sampling/accuracy", "{:.0%}"),
    ("mixed", "sampling/mixed", "{:.0%}"),
    ("length", "batch/length", "{:.0f}"),
    ("entropy", "train/entropy", "{:.3f}"),
    ("grad", "train/grad_norm", "{:.2f}"),
)


class Progress(Protocol):
    def start(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def round(self, at_hand: int, stats: SamplingStats) -> None:
        """After every generation round: how many groups are at hand."""
        ...

    def step(self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class SilentProgress:
    def start(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def round(self, at_hand: int, stats: SamplingStats) -> None: ...

    def step(self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class PlainProgress(SilentProgress):
    """A line for every step and evaluation."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0

    def start(self, done: int, total: int) -> None:
        self.total = total

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        self.note(f"step {step}/{self.total}  {step_line(figures)}  {sum(seconds.values()):.1f} s")

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self.note(f"evaluation after step {step}: {evaluation_line(figures)}")


class LiveProgress(PlainProgress):
    """A bar that stays in place, with the latest figures beside it; notes and evaluations scroll by above."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        self.bar = RichProgress(*columns, console=console, speed_estimate_period=120)
        self.task = self.bar.add_task("", total=None, figures="")

    def start(self, done: int, total: int) -> None:
        super().start(done, total)
        self.bar.update(self.task, total=total, completed=done)
        self.bar.start()

    def round(self, at_hand: int, stats: SamplingStats) -> None:
        if stats.rounds > 1:
            self.bar.update(self.task, figures=f"sampling, round {stats.rounds}: {at_hand} groups at hand")

    def step(self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        self.bar.update(self.task, completed=step, figures=step_line(figures))

    def close(self) -> None:
        self.bar.stop()


def step_line(figures: Mapping[str, float]) -> str:
    shown = ((name, form, figures.get(key)) for name, key, form in STEP_FIGURES)
    return "  ".join(f"{name} {form.format(value)}" for name, form, value in shown if value is not None)


def evaluation_line(figures: Mapping[str, float]) -> str:
    shown = ", ".join(f"{key} {value:.1%}" for key, value in figures.items() if "@" in key)
    return f"{shown} on {figures['problems']:.0f} problems"


def make_progress(mode: Literal["auto", "live", "plain", "off"], console: Console) -> Progress:
    """``auto``: live on a terminal, plain lines elsewhere."""
    if mode == "off":
        return SilentProgress()
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console)
    return PlainProgress(console)
