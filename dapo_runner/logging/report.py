"""`dapo report RUN`: the curves of a run as one picture, small multiples over the rollout step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from dapo_runner.timing import seconds_by_phase

REPORT_FILE = "report.png"
COLUMNS = 3

# Okabe-Ito: told apart by colour-blind readers and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"

Points = dict[str, tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Curve:
    key: str  # the name in the log; a trailing * stands for any rest, e.g. the k of avg@k
    label: str
    color: str


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    share: bool = False  # an axis from 0 to 1
    from_zero: bool = False
    stacked: bool = False


PANELS = (
    Panel(
        "Held-out accuracy",
        "share of problems",
        (
            Curve("eval/avg@*", "avg", BLUE),
            Curve("eval/cons@*", "cons", GREEN),
        ),
        share=True,
    ),
    Panel(
        "Reward",
        "per response",
        (
            Curve("batch/reward", "trained on", BLUE),
            Curve("sampling/reward", "generated", ORANGE),
        ),
    ),
    Panel(
        "Training accuracy",
        "share of responses",
        (
            Curve("batch/accuracy", "trained on", BLUE),
            Curve("sampling/accuracy", "generated", ORANGE),
        ),
        share=True,
    ),
    Panel(
        "Response length",
        "tokens",
        (
            Curve("batch/length", "mean", BLUE),
            Curve("batch/length_max", "longest", GREY),
            Curve("eval/length", "held-out", ORANGE),
        ),
    ),
    Panel("Entropy", "nats per token", (Curve("train/entropy", "entropy", BLUE),)),
    Panel(
        "Mean generation probability",
        "of sampled tokens",
        (Curve("batch/generation_prob", "probability", BLUE),),
    ),
    Panel(
        "Clipped tokens",
        "share of tokens",
        (
            Curve("train/clip_low", "low", ORANGE),
            Curve("train/clip_high", "high", BLUE),
            Curve("train/clip_dual", "dual", GREY),
        ),
    ),
    Panel(
        "Dynamic sampling",
        "share of groups generated",
        (
            Curve("sampling/all_wrong", "all wrong", RED),
            Curve("sampling/mixed", "mixed (kept)", BLUE),
            Curve("sampling/all_right", "all right", GREEN),
            Curve("sampling/alike", "rewards alike", RED),
            Curve("sampling/varying", "rewards vary (kept)", BLUE),
        ),
        share=True,
        stacked=True,
    ),
    Panel("Gradient norm", "before clipping", (Curve("train/grad_norm", "norm", BLUE),)),
    Panel(
        "Reflection",
        "phrases per response",
        (
            Curve("reflection/en", "English", BLUE),
            Curve("reflection/zh", "Chinese", ORANGE),
        ),
        from_zero=True,
    ),
    Panel(
        "Engine against learner",
        "mean |Δ log-prob|",
        (
            Curve("train/rollout_gap", "rollouts", BLUE),
            Curve("sync/gap", "after sync", GREEN),
        ),
        from_zero=True,
    ),
    Panel(
        "Time",
        "seconds of a step",
        (
            Curve("time/rollout", "rollout", ORANGE),
            Curve("time/update", "update", BLUE),
            Curve("time/old_logprobs", "log-probs", GREEN),
            Curve("time/evaluate", "held-out", RED),
            Curve("time/rest", "rest", GREY),
        ),
        stacked=True,
    ),
)
SUPERVISED_PANELS = (  # of `dapo sft`
    Panel("Loss", "nats per token", (Curve("train/loss", "update", BLUE), Curve("eval/loss", "held-out", ORANGE))),
    *(panel for panel in PANELS if panel.title in ("Entropy", "Gradient norm", "Time")),
)
# What the last panel draws together; any other phase is the rest.
TIME_GROUPS = {
    "rollout": "rollout",
    "forward_backward": "update",
    "optimizer": "update",
    "critic": "update",
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "old_logprobs",
    "values": "old_logprobs",
    "evaluate": "evaluate",
}


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Draw the run's `metrics.jsonl` into ``out`` (default: `report.png` beside it) and return where it lies.

    Raises FileNotFoundError without a log, ValueError when there is nothing in it yet.
    """
    log = run_dir / METRICS_FILE
    if not log.is_file():
        raise FileNotFoundError(f"{log}: expected the metrics of a run, found nothing there")
    events = read_log(log)
    if not events:
        raise ValueError(f"{log}: expected at least one step, the log is still empty")
    out = out or run_dir / REPORT_FILE
    timings = run_dir / TIMINGS_FILE
    times = time_events(read_log(timings)) if timings.is_file() else []
    draw(collect(events + times), title=run_dir.name).savefig(out)
    return out


def time_events(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The seconds of each step as they are drawn: every curve has a value at every step."""
    events = []
    for event in timings:
        if event["kind"] == "step":
            parts = dict.fromkeys([*TIME_GROUPS.values(), "rest"], 0.0)
            for phase, seconds in seconds_by_phase(event).items():
                parts[TIME_GROUPS.get(phase, "rest")] += seconds
            events.append({"step": event["step"], "kind": "time"} | {f"time/{key}": parts[key] for key in parts})
    return events


def collect(events: list[dict[str, Any]]) -> Points:
    """From log lines to curves: name → (steps, values). What was logged as null leaves a gap."""
    points: Points = {}
    for event in events:
        for key, value in event.items():
            if key not in ("step", "kind") and not isinstance(value, str):
                steps, values = points.setdefault(key, ([], []))
                steps.append(event["step"])
                values.append(float("nan") if value is None else float(value))
    if "sampling/varying" in points:  # with sampler.filter_on=reward, groups are not kept by correctness
        for key in ("sampling/all_wrong", "sampling/mixed", "sampling/all_right"):
            points.pop(key, None)
    return points


def draw(points: Points, title: str) -> Figure:
    """All panels of a run, or of a supervised one; one without data says so: the picture always has the same shape."""
    supervised = "eval/loss" in points or ("train/loss" in points and "batch/reward" not in points)
    panels, step_is = (SUPERVISED_PANELS, "update") if supervised else (PANELS, "rollout step")
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(4.3 * COLUMNS, 2.9 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes = figure.subplots(rows, COLUMNS).flat
    steps = [step for key in points for step in points[key][0]]
    for panel, ax in zip_longest(panels, axes):
        if panel is None:
            ax.remove()
            continue
        ax.set_xlabel(step_is, fontsize=8)
        _draw_panel(ax, panel, points, (min(steps), max(steps)))
    return figure


def _draw_panel(ax: Axes, panel: Panel, points: Points, steps: tuple[int, int]) -> None:
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.set_ylabel(panel.unit, fontsize=8)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    margin = max(0.5, 0.03 * (steps[1] - steps[0]))
    ax.set_xlim(steps[0] - margin, steps[1] + margin)
    found = [(curve, *match) for curve in panel.curves if (match := _find(points, curve.key)) is not None]
    if panel.share:
        ax.set_ylim(-0.02, 1.02)
    if not found:
        ax.set_yticks([])
        ax.text(
            0.5,
            0.5,
            "nothing logged",
            transform=ax.transAxes,
            ha="center",
            va="center",
            color=GREY,
            fontsize=9,
        )
        return
    (_draw_stack if panel.stacked else _draw_lines)(ax, found)
    if panel.from_zero:
        ax.set_ylim(bottom=0)
    if len(found) > 1:  # above the axes, where it hides no curve
        ax.legend(
            fontsize=7,
            frameon=False,
            ncols=len(found),
            loc="lower right",
            bbox_to_anchor=(1.02, 0.98),
            handlelength=1.2,
            columnspacing=1.0,
        )


Found = list[tuple[Curve, str, list[int], list[float]]]


def _draw_lines(ax: Axes, found: Found) -> None:
    for curve, suffix, steps, values in found:
        # Few points are shown as points: a line through one of them would be invisible.
        marker = "o" if len(steps) <= 40 else ""
        ax.plot(
            steps,
            values,
            color=curve.color,
            label=curve.label + suffix,
            linewidth=1.4,
            marker=marker,
            markersize=3,
        )
    if len(found) == 1 and found[0][1]:
        ax.set_ylabel(f"{found[0][0].label}{found[0][1]}", fontsize=8)


def _draw_stack(ax: Axes, found: Found) -> None:
    steps = found[0][2]
    bottom = [0.0] * len(steps)
    for curve, _, _, values in found:
        ax.bar(steps, values, bottom=bottom, width=1.0, color=curve.color, label=curve.label, linewidth=0)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]


def _find(points: Points, key: str) -> tuple[str, list[int], list[float]] | None:
    """The curve logged under ``key``: what the star stood for, steps, values."""
    if not key.endswith("*"):
        return ("", *points[key]) if key in points else None
    stem = key[:-1]
    name = next((name for name in points if name.startswith(stem)), None)
    return None if name is None else (f"{stem[-1]}{name.removeprefix(stem)}", *points[name])
