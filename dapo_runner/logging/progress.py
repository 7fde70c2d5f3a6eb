"""What a person sees while a run goes on: one live block on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from dapo_runner.logging.metric_table import Metric, console_metrics
from dapo_runner.logging.speed import speed_line
from dapo_runner.rollout.group_buffer import SamplingStats

BLOCKS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 32  # characters
PHASES_SHOWN = 4

Figures = Mapping[str, float]


class Progress:
    """Show nothing."""

    def start(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def phase(self, name: str) -> None:
        """Show the phase that has begun, as `dapo_runner.timing` names it."""

    def round(self, at_hand: int, stats: SamplingStats) -> None:
        """Show how many groups there are after a generation round."""

    def step(self, step: int, figures: Figures, seconds: Figures, speed: Figures) -> None: ...

    def evaluation(self, step: int, figures: Figures) -> None: ...

    def close(self) -> None: ...


class PlainProgress(Progress):
    """Print a line for every step and evaluation."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0

    def start(self, done: int, total: int) -> None:
        self.total = total

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, figures: Figures, seconds: Figures, speed: Figures) -> None:
        times = ", ".join(filter(None, (f"{sum(seconds.values()):.1f} s", speed_line(speed))))
        self.note(f"step {step}/{self.total}  {step_line(figures)}  {times}")

    def evaluation(self, step: int, figures: Figures) -> None:
        self.note(f"evaluation after step {step}: {evaluation_line(figures)}")


class LiveProgress(PlainProgress):
    """Keep a block in place: the bar, the latest figures with their trends, where the time goes. Notes and evaluations
    scroll by above it.
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
        self.history: dict[Metric, list[float]] = {}
        self.lines: dict[str, str] = {}
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

    def step(self, step: int, figures: Figures, seconds: Figures, speed: Figures) -> None:
        self.bar.update(self.task, completed=step)
        for metric in console_metrics(figures):
            self.history.setdefault(metric, []).append(figures[metric.key])
        self.lines |= {"time": time_line(seconds), "speed": speed_line(speed)}

    def evaluation(self, step: int, figures: Figures) -> None:
        super().evaluation(step, figures)
        self.lines["held-out"] = f"step {step}: {evaluation_line(figures)}"

    def block(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for metric, values in self.history.items():
            latest = Text(metric.form.format(values[-1]), justify="right")
            table.add_row(metric.console, latest, Text(trend(values), style="cyan"))
        lines = [Text(f"{label}  {text}") for label, text in self.lines.items() if text]
        return Group(self.bar.get_renderable(), table, *lines)

    def close(self) -> None:
        self.live.stop()


def trend(values: list[float]) -> str:
    """Draw ``values`` as blocks of different heights, averaged down to ``TREND_WIDTH`` characters."""
    n = min(len(values), TREND_WIDTH)
    edges = [round(i * len(values) / n) for i in range(n + 1)] if n else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in means)


def time_line(seconds: Figures) -> str:
    """Return the seconds of a step, and the phases that took most of them."""
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:PHASES_SHOWN]
    shares = ", ".join(f"{phase.replace('_', ' ')} {part / total:.0%}" for phase, part in largest if part > 0)
    return f"{total:.1f} s a step: {shares}"


def step_line(figures: Figures) -> str:
    shown = console_metrics(figures)
    return "  ".join(f"{metric.console} {metric.form.format(figures[metric.key])}" for metric in shown)


def evaluation_line(figures: Figures) -> str:
    """Return the figures of all problems, and avg@k of each evaluation set and source."""
    chosen = [key for key in figures if "@" in key and ("/" not in key or "/avg@" in key)]
    shown = ", ".join(f"{key} {figures[key]:.1%}" for key in chosen)
    return f"{shown} on {figures['problems']:.0f} problems"


def make_progress(mode: Literal["auto", "live", "plain", "off"], console: Console) -> Progress:
    """Return what ``mode`` asks for; ``auto``: live on a terminal, plain lines elsewhere."""
    if mode == "off":
        return Progress()
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console)
    return PlainProgress(console)
