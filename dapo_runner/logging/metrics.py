"""The metrics of a step, and the log with one JSON line per event.

`metrics.jsonl` depends only on the configuration and the seeds: a run that was killed and resumed writes the same bytes
as an uninterrupted one. Wall-clock times go to `timings.jsonl`. Names are `area/metric`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from dapo_runner.files import append_jsonl, atomic_write, read_jsonl, to_jsonl
from dapo_runner.logging.reflection import reflection_metrics
from dapo_runner.rollout.group_buffer import SamplingStats
from dapo_runner.types import Group

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"


class MetricsLog:
    """An append-only JSONL file. When ``write`` returns, the line is on the disk."""

    def __init__(self, path: Path, *, keep_through: int = -1) -> None:
        """Remove the lines after step ``keep_through``, and an incomplete last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        events = read_jsonl(path, "step", "kind") if path.exists() else []
        atomic_write(path, to_jsonl([event for event in events if event["step"] <= keep_through]))
        self.path, self.found_through = path, max((event["step"] for event in events), default=0)
        self._last = (-1, "", 0)  # step, kind and place of the last event, which an interruption may have cut

    def write(self, step: int, kind: str, values: Mapping[str, float | int | str | None]) -> None:
        """Append one event. One of the same step and kind as the last replaces it. NaN and infinities become null."""
        if (step, kind) != self._last[:2]:
            self._last = step, kind, self.path.stat().st_size
        os.truncate(self.path, self._last[2])
        append_jsonl(self.path, [{"step": step, "kind": kind, **jsonable(values)}], sync=True)


def before_and_after(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the first and the last evaluation of a run, with a heading for each; empty without an evaluation."""
    evaluations = [event for event in read_jsonl(folder / METRICS_FILE) if event["kind"] == "eval"]
    ends = zip(("before", "after"), evaluations[:1] + evaluations[-1:], strict=False)
    return {f"{when} (step {event['step']})": event for when, event in ends}


def jsonable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with None in place of NaN and infinities, which JSON cannot represent."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def prefixed(area: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` with names `area/metric`."""
    return {f"{area}/{key}": value for key, value in values.items()}


def sampling_metrics(stats: SamplingStats, filter_on: str | None = None) -> dict[str, float]:
    """Return the metrics of all groups that a step generated, accepted or not; only counts if there are none.
    ``filter_on`` "reward" adds the shares of groups with varying and with equal rewards.
    """
    counted = ("rounds", "groups", "carried_in", "carried_out", "too_old")
    values: dict[str, float] = {name: stats[name] for name in counted}
    if stats["groups"]:
        by_reward = ("varying_reward_only", "varying_reward") if filter_on == "reward" else ()
        values |= {key: stats[key] / stats["groups"] for key in ("all_correct", "all_incorrect", "mixed", *by_reward)}
        if by_reward:
            values["equal_reward"] = 1 - values["varying_reward"]
        totals = {"accuracy": "correct", "reward": "reward", "length": "tokens", "truncated": "truncated"}
        values |= {name: stats[total] / stats["samples"] for name, total in totals.items()}
    return prefixed("sampling", values)


def batch_metrics(groups: Iterable[Group], step: int) -> dict[str, float]:
    """Return the metrics of the groups that ``step`` trains on. They are means over samples, but `generation_prob`
    (Figure 7 of the DAPO paper) is a mean over tokens, and `age` a mean over groups.
    """
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {"batch/groups": 0.0}
    lengths = [sample.completion.n_sampled for sample in samples]
    probabilities = torch.cat([sample.completion.logprobs for sample in samples]).double().exp()
    values = {
        "groups": float(len(groups)),
        "age": fmean(step - group.step for group in groups),
        "age_max": float(max(step - group.step for group in groups)),
        "reward": fmean(sample.reward for sample in samples),
        "accuracy": fmean(sample.correct for sample in samples),
        "length_penalty": fmean(sample.length_penalty for sample in samples),
        "length": fmean(lengths),
        "length_max": float(max(lengths)),
        "truncated": fmean(sample.completion.truncated for sample in samples),
        "masked": fmean(not sample.trains for sample in samples),
        "generation_prob": float(probabilities.nanmean()),
    }
    if any(sample.completion.turns for sample in samples):
        values["turns"] = fmean(len(sample.completion.policy_turns) for sample in samples)
        values["environment_tokens"] = fmean(s.completion.length - s.completion.n_sampled for s in samples)
    for rule in sorted({sample.verdict.rule for sample in samples} - {""}):
        values[f"rule_{rule}"] = fmean(sample.verdict.rule == rule for sample in samples)
    reflection = reflection_metrics([sample.completion.policy_text for sample in samples])
    return prefixed("batch", values) | prefixed("reward", _reward_parts(groups)) | prefixed("reflection", reflection)


def _reward_parts(groups: list[Group]) -> dict[str, float]:
    """Return for each of several rewards its mean over samples, and its standard deviation within a group, averaged
    over groups. A sample without that reward is left out.
    """
    figures = {}
    for name in sorted({name for group in groups for sample in group.samples for name in sample.parts}):
        applied = [[sample.parts[name] for sample in group.samples if name in sample.parts] for group in groups]
        figures[name] = fmean(value for values in applied for value in values)
        figures[f"{name}_std"] = fmean(stdev(values) if len(values) > 1 else 0.0 for values in applied if values)
    return figures
