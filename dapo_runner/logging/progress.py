"""What a person sees while a run goes on: one live block on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from dapo_runner.logging.speed import speed_line
from dapo_runner.rollout.group_buffer import SamplingStats

STEP_FIGURES = (
    ("reward", "batch/reward", "{:+.2f}"),
    ("accuracy", "sampling/accuracy", "{:.0%}"),
    ("mixed", "sampling/mixed", "{:.0%}"),
    ("varying", "sampling/varying", "{:.0%}"),  # with sampler.filter_on=reward, which keeps these
    ("length", "batch/length", "{:.0f}"),
    ("loss", "loss", "{:.4f}"),  # of a supervised run
    ("entropy", "train/entropy", "{:.3f}"),
    ("grad", "train/grad_norm", "{:.2f}"),
)
BLOCKS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 32  # characters
PHASES_SHOWN = 4


class Progress(Protocol):
    def start(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def phase(self, name: str) -> None:
        """What the run has just turned to, as `dapo_runner.timing` names it."""
        ...

    def round(self, at_hand: int, stats: SamplingStats) -> None:
        """After every generation round: how many groups are at hand."""
        ...

    def step(
        self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float], speed: Mapping[str, float]
    ) -> None: ...

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class SilentProgress:
    def start(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def phase(self, name: str) -> None: ...

    def round(self, at_hand: int, stats: SamplingStats) -> None: ...

    def step(
        self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float], speed: Mapping[str, float]
    ) -> None: ...

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

    def step(
        self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float], speed: Mapping[str, float]
    ) -> None:
        took = f"{sum(seconds.values()):.1f} s"
        self.note(
            f"step {step}/{self.total}  {step_line(figures)}  {', '.join(filter(None, (took, speed_line(speed))))}"
        )

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self.note(f"evaluation after step {step}: {evaluation_line(figures)}")


class LiveProgress(PlainProgress):
    """A block that stays in place: the bar and what is being done, the latest figures with how they came to be, where
    the time goes. Notes and evaluations scroll by above it.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[doing]}", style="dim"),
        )
        self.bar = RichProgress(*columns, console=console, speed_estimate_period=120)
        self.task = self.bar.add_task("", total=None, doing="")
        self.history: dict[str, list[float]] = {}
        self.heldout = self.time = self.speed = ""
        self.live = Live(console=console, refresh_per_second=5, get_renderable=self.block)

    def start(self, done: int, total: int) -> None:
        super().start(done, total)
        self.bar.update(self.task, total=total, completed=done)
        self.live.start()

    def phase(self, name: str) -> None:
        if name != "other":
            self.bar.update(self.task, doing=name.replace("_", " "))

    def round(self, at_hand: int, stats: SamplingStats) -> None:
        if stats.rounds > 1:
            self.bar.update(self.task, doing=f"sampling, round {stats.rounds}: {at_hand} groups at hand")

    def step(
        self, step: int, figures: Mapping[str, float], seconds: Mapping[str, float], speed: Mapping[str, float]
    ) -> None:
        self.bar.update(self.task, completed=step)
        for _, key, _ in STEP_FIGURES:
            if key in figures:
                self.history.setdefault(key, []).append(figures[key])
        self.time, self.speed = time_line(seconds), speed_line(speed)

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        super().evaluation(step, figures)
        self.heldout = f"step {step}: {evaluation_line(figures)}"

    def block(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, key, form in STEP_FIGURES:
            if key in self.history:
                values = self.history[key]
                table.add_row(name, Text(form.format(values[-1]), justify="right"), Text(trend(values), style="cyan"))
        told = (("held-out", self.heldout), ("time", self.time), ("speed", self.speed))
        lines = [Text(f"{label}  {text}") for label, text in told if text]
        return Group(self.bar.get_renderable(), table, *lines)

    def close(self) -> None:
        self.live.stop()


def trend(values: list[float]) -> str:
    """The course of ``values`` in blocks of different heights, all of it on ``TREND_WIDTH`` characters."""
    n = min(len(values), TREND_WIDTH)
    edges = [round(i * len(values) / n) for i in range(n + 1)] if n else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    finite = [value for value in means if value - value == 0.0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if value - value == 0.0 else " " for value in means)


def time_line(seconds: Mapping[str, float]) -> str:
    """The seconds of a step, and the phases that took most of them."""
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:PHASES_SHOWN]
    shares = ", ".join(f"{phase.replace('_', ' ')} {part / total:.0%}" for phase, part in largest if part > 0)
    return f"{total:.1f} s a step: {shares}"


def step_line(figures: Mapping[str, float]) -> str:
    shown = ((name, form, figures.get(key)) for name, key, form in STEP_FIGURES)
    return "  ".join(f"{name} {form.format(value)}" for name, form, value in shown if value is not None)


def evaluation_line(figures: Mapping[str, float]) -> str:
    """The figures of all problems, and avg@k of each evaluation set and source."""
    chosen = [key for key in figures if "@" in key and ("/" not in key or "/avg@" in key)]
    shown = ", ".join(f"{key} {figures[key]:.1%}" for key in chosen)
    return f"{shown} on {figures['problems']:.0f} problems"


def make_progress(mode: Literal["auto", "live", "plain", "off"], console: Console) -> Progress:
    """``auto``: live on a terminal, plain lines elsewhere."""
    if mode == "off":
        return SilentProgress()
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console)
    return PlainProgress(console)
