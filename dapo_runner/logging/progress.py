"""Show the progress of a run: a line for every step and evaluation, above a progress bar in a terminal."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dapo_runner.logging.metric_table import console_metrics
from dapo_runner.rollout.group_buffer import SamplingStats

Figures = Mapping[str, float]
SPEED = {"tokens_per_second": "{:,.0f} tokens/s with prompts", "mfu": "MFU {:.0%}", "memory_gib": "{:.1f} GiB"}


class RunConsole(Console):
    """A console that ends the run when its output is closed, at the next line of the main thread."""

    def on_broken_pipe(self) -> None:
        if threading.current_thread() is threading.main_thread():  # no other thread can end the run
            super().on_broken_pipe()


class Progress:
    """Print lines to ``console``, or nowhere without one. ``live`` adds a progress bar below them."""

    def __init__(self, console: Console | None = None, *, live: bool = False) -> None:
        self.console = console or Console(quiet=True)
        times = (TimeElapsedColumn(), "left", TimeRemainingColumn(elapsed_when_finished=False))
        columns = ("step", MofNCompleteColumn(), BarColumn(bar_width=20), *times, "{task.fields[doing]}")
        self.bar = Bar(*columns, console=self.console, disable=not live, speed_estimate_period=86400)
        self.task = self.bar.add_task("", total=None, doing="")

    def start(self, done: int, total: int) -> None:
        self.bar.update(self.task, total=total, completed=done)
        self.bar.start()

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        """Show the phase that has started, by its name in `dapo_runner.timing`."""
        if name != "other":
            self.bar.update(self.task, doing=name.replace("_", " "))

    def round(self, at_hand: int, stats: SamplingStats) -> None:
        """Show the number of accepted groups after a generation round."""
        if stats["rounds"] > 1:
            self.bar.update(self.task, doing=f"round {stats['rounds']}: {at_hand} accepted")

    def step(self, step: int, figures: Figures, seconds: Figures, speed: Figures) -> None:
        self.bar.update(self.task, completed=step)
        shown = (f"{metric.console} {metric.form.format(figures[metric.key])}" for metric in console_metrics(figures))
        speeds = (form.format(speed[key]) for key, form in SPEED.items() if key in speed)
        times = ", ".join([time_line(seconds), *speeds])
        self.note(f"step {step}/{self.bar.tasks[0].total}  {'  '.join(shown)}  {times}")

    def evaluation(self, step: int, figures: Figures) -> None:
        """Print avg@k, cons@k, pass@k and reward of all problems, and avg@k of each evaluation set and source."""
        chosen = [key for key in figures if "@" in key and ("/" not in key or "/avg@" in key)]
        shown = ", ".join(f"{key} {figures[key]:.1%}" for key in chosen)
        reward, n = figures["reward"], figures["problems"]
        self.note(f"evaluation after step {step}: {shown}, reward {reward:+.3f} on {n:.0f} problems")

    def close(self) -> None:
        self.bar.stop()


def time_line(seconds: Figures) -> str:
    """Return the seconds of a step and its three longest phases as text."""
    total = sum(seconds.values())
    largest = sorted(seconds, key=lambda phase: -seconds[phase])[:3]
    shares = (f"{phase.replace('_', ' ')} {seconds[phase] / total:.0%}" for phase in largest if seconds[phase] > 0)
    return f"{total:.1f} s ({', '.join(shares)})"


def make_progress(mode: Literal["auto", "live", "plain", "off"], console: Console) -> Progress:
    live = mode == "live" or (mode == "auto" and console.file.isatty())  # FORCE_COLOR makes no terminal of a file
    return Progress(None if mode == "off" else console, live=live)
