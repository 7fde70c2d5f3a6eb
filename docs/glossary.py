"""The meaning of every metric, for docs/metrics.md (``python -m docs.generate``)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase

from dapo_runner.logging.metric_table import PANELS, SUPERVISED_PANELS, part_of_reward, read_glossary
from dapo_runner.timing import PHASES

HEADER = """\
# Metrics

Look up any metric that a run logs: its unit, its meaning, the panel of the report that shows it,
and what a healthy value looks like. `metrics.jsonl` has one line for each step and one for each
evaluation, `timings.jsonl` one line for each step.

Prerequisites: the folder of a run ([your first run](first-run.md)).

A `*` stands for a name or a number, for example the k of `avg@k`. A mean over tokens counts the
tokens that train. A metric of an update is averaged over the updates of a step. Where no healthy
value is given, the value only describes the step.

If a value looks wrong, read [troubleshooting](troubleshooting.md).

This page is generated: `python -m docs.generate`.
"""
AREAS = {
    "eval": "Evaluation (`eval/`): held-out problems",
    "batch": "Batch (`batch/`): the groups that the step trains on",
    "reward": "Rewards (`reward/`): each of several rewards, and calls of reward functions",
    "env": "Environments (`env/`, in `timings.jsonl`): calls and failures of the step",
    "sampling": "Sampling (`sampling/`): everything that the step generated, accepted or not",
    "train": "Updates (`train/`)",
    "sync": "Weight synchronization (`sync/`): rollout engine against trainer",
    "async": "Asynchronous rollouts (`async/`)",
    "segments": "Segment advantages (`segments/`)",
    "reflection": "Reflection phrases (`reflection/`)",
    "speed": "Speed (`speed/`, in `timings.jsonl`)",
    "seconds": "Time (`seconds/`, in `timings.jsonl`); the phases add up to the wall time of the step",
}


def rows() -> list[tuple[str, ...]]:
    """Return key, unit, meaning and healthy value of each metric."""
    phases = [
        (f"seconds/{phase}", "s", f"{meaning[:1].upper()}{meaning[1:]}.", "") for phase, meaning in PHASES.items()
    ]
    return [*read_glossary(), *phases]


@functools.cache  # the tests ask for every metric of every step that they log
def is_documented(key: str) -> bool:
    """Return whether a logged metric has a row."""
    return any(fnmatchcase(key, pattern) for pattern, *_ in rows())


def panel_of(key: str) -> str:
    """Return the title of the report's panel that draws a metric; empty where none does."""
    panels = {
        curve.key: panel.title for panel in (*SUPERVISED_PANELS, *PANELS, part_of_reward("*")) for curve in panel.curves
    }
    return "Time" if key.startswith("seconds/") else panels.get(key, "")


def page() -> str:
    """Return the text of docs/metrics.md."""
    return "\n".join([HEADER, *(part for area, title in AREAS.items() for part in _section(area, title))])


def _section(area: str, title: str) -> Iterator[str]:
    yield f"## {title}\n\n| metric | unit | meaning | panel | healthy value |\n|---|---|---|---|---|"
    for key, unit, meaning, healthy in rows():
        if key.startswith(f"{area}/"):
            yield f"| `{key}` | {unit} | {meaning} | {panel_of(key)} | {healthy} |"
    yield ""
