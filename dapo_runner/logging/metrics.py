"""What is logged: one JSON line per event, and the figures that go into it.

Everything in `metrics.jsonl` is a function of the configuration and the seeds, so that a run that was killed
and resumed leaves the same bytes as one that was not. Wall-clock times go to `timings.jsonl`.

Names are `area/figure`: `train/` the update, `batch/` the groups trained on, `sampling/` all that was
generated, `reward/` each of several rewards and `reflection/` the phrases of `records.reflection`, both in the
groups trained on, `sync/` engine against learner, `eval/` held-out problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

import torch

from dapo_runner.errors import ConfigError
from dapo_runner.files import append_jsonl, atomic_write, read_jsonl, to_jsonl
from dapo_runner.logging.reflection import reflection_metrics
from dapo_runner.rollout.group_buffer import SamplingStats
from dapo_runner.types import Group, Sample

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"
OLD_KEYS = ("sampling/all_right", "sampling/all_wrong", "ahead/")  # of metrics that have other names now


class MetricsLog:
    """An append-only JSONL file. A line is on the disk when ``write`` returns."""

    def __init__(self, path: Path, *, keep_through: int = -1) -> None:
        """Remove the lines after step ``keep_through``, and an incomplete last one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [event for event in read_jsonl(path) if event["step"] <= keep_through] if path.exists() else []
        atomic_write(path, to_jsonl(kept), sync=True)
        self.path = path

    def write(self, step: int, kind: str, values: Mapping[str, float | int | str | None]) -> None:
        """Append one event. NaN and infinities are written as null."""
        record = {"step": step, "kind": kind, **{key: jsonable(value) for key, value in values.items()}}
        append_jsonl(self.path, [record], sync=True)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log, without an incomplete last line. Raises ConfigError for an older version's log."""
    events = read_jsonl(path)
    if old := next((key for event in events for key in event if key.startswith(OLD_KEYS)), None):
        raise ConfigError(f"{path}: expected the metrics of this version, got {old} of an older one. Start a new run.")
    return events


def before_and_after(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the first and the last evaluation of a run by their headings; empty without held-out problems."""
    evaluations = [event for event in read_log(folder / METRICS_FILE) if event["kind"] == "eval"]
    if not evaluations:
        return {}
    before, after = evaluations[0], evaluations[-1]
    return {f"before (step {before['step']})": before, f"after (step {after['step']})": after}


def jsonable(value: float | str | None) -> float | int | str | None:
    """``value``, but None for a number that JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def prefixed(area: str, values: Mapping[str, float]) -> dict[str, float]:
    """`area/figure` names, e.g. for what `dapo_kernels.summarize` returns."""
    return {f"{area}/{key}": value for key, value in values.items()}


def sampling_metrics(
    stats: SamplingStats, filter_on: str = "correctness", oversampled: bool = False
) -> dict[str, float]:
    """All that a step generated, kept or not; shares in [0, 1]. Counts only when nothing was generated.

    Where groups are accepted by their rewards, also ``varying_reward`` and ``equal_reward``; ``varying_reward_only``
    are those of the former that are all correct or all incorrect. ``dropped`` are prompts without a group, where more
    are submitted than are needed.
    """
    counts = {
        "rounds": stats.rounds,
        "groups": stats.groups,
        "carried_in": stats.carried_in,
        "carried_out": stats.carried_out,
        "too_old": stats.too_old,
        **({"dropped": stats.submitted - stats.groups} if oversampled else {}),
    }
    if not stats.groups:
        return prefixed("sampling", counts)
    shares = {
        "all_correct": stats.all_correct / stats.groups,
        "all_incorrect": stats.all_incorrect / stats.groups,
        "mixed": stats.mixed / stats.groups,
        **(
            {
                "varying_reward_only": stats.varying_reward_only / stats.groups,
                "varying_reward": stats.varying_reward / stats.groups,
                "equal_reward": 1 - stats.varying_reward / stats.groups,
            }
            if filter_on == "reward"
            else {}
        ),
        "accuracy": stats.correct / stats.samples,
        "reward": stats.reward / stats.samples,
        "length": stats.tokens / stats.samples,
        "truncated": stats.truncated / stats.samples,
    }
    return prefixed("sampling", counts | shares)


def batch_metrics(groups: Iterable[Group], step: int = 0) -> dict[str, float]:
    """The groups trained on: means over samples, except `generation_prob`, a mean over tokens, and `age`, one over
    groups: how many steps before ``step`` each was sampled.

    `batch/generation_prob` is the mean probability of the sampled tokens, Figure 7 of the DAPO paper.
    `batch/rule_<name>` says what share of the samples each reward rule judged.
    """
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {"batch/groups": 0.0}
    lengths = [sample.completion.length for sample in samples]
    probabilities = torch.cat([sample.completion.logprobs for sample in samples]).double().exp()
    values = {
        "groups": float(len(groups)),
        "age": _mean(step - group.step for group in groups),
        "age_max": float(max(step - group.step for group in groups)),
        "reward": _mean(sample.reward for sample in samples),
        "accuracy": _mean(sample.correct for sample in samples),
        "length_penalty": _mean(sample.length_penalty for sample in samples),
        "length": _mean(lengths),
        "length_max": float(max(lengths)),
        "truncated": _mean(sample.completion.truncated for sample in samples),
        "masked": _mean(not sample.trains for sample in samples),
        "generation_prob": float(probabilities.nanmean()),
        **_rule_shares(samples),
    }
    reflection = reflection_metrics(sample.completion.text for sample in samples)
    return prefixed("batch", values) | prefixed("reward", _parts(groups)) | prefixed("reflection", reflection)


def _parts(groups: list[Group]) -> dict[str, float]:
    """Of each of several rewards the mean over samples, and as its spread the mean over groups of the standard
    deviation within a group: what an advantage is made from. Samples that it does not apply to do not count.
    """
    names = sorted({name for group in groups for sample in group.samples for name in sample.parts})
    figures = {}
    for name in names:
        applied = [[sample.parts[name] for sample in group.samples if name in sample.parts] for group in groups]
        figures[name] = _mean(value for values in applied for value in values)
        figures[f"{name}_std"] = _mean(stdev(values) if len(values) > 1 else 0.0 for values in applied if values)
    return figures


def _rule_shares(samples: list[Sample]) -> dict[str, float]:
    rules = sorted({sample.verdict.rule for sample in samples if sample.verdict.rule})
    return {f"rule_{rule}": _mean(sample.verdict.rule == rule for sample in samples) for rule in rules}


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return math.fsum(items) / len(items)
