"""What is logged: one JSON line per event, and the figures that go into it.

Everything in `metrics.jsonl` is a function of the configuration and the seeds, so that a run that was killed
and resumed leaves the same bytes as one that was not. Wall-clock times go to `timings.jsonl`.

Names are `area/figure`: `train/` the update, `batch/` the groups trained on, `sampling/` all that was
generated, `reward/` each of several rewards and `reflection/` the phrases of `records.reflection`, both in the
groups trained on, `sync/` engine against learner, `eval/` held-out problems.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import stdev
from types import TracebackType
from typing import Any

import torch

from dapo_runner.logging.reflection import reflection_metrics
from dapo_runner.rollout.group_buffer import SamplingStats
from dapo_runner.types import Group, Sample

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"


class MetricsLog:
    """An append-only JSONL file. A line is on the disk when ``write`` returns."""

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        """Open for appending after step ``keep_through``; later lines, and a torn last one, are cut off.

        ``keep_through=None`` starts a new file and raises FileExistsError where one with content stands.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep_through is None:
            if path.exists() and path.stat().st_size:
                raise FileExistsError(
                    f"{path}: expected no metrics of an earlier run; resume it or choose another run.name"
                )
            keep = 0
        else:
            keep = _bytes_through(path, keep_through)
        self._file = path.open("ab")
        self._file.truncate(keep)
        os.fsync(self._file.fileno())

    def write(self, step: int, kind: str, values: Mapping[str, float | int | str | None]) -> None:
        """Append one event. Numbers that JSON does not know (NaN, infinities) are written as null."""
        record = {"step": step, "kind": kind, **{key: jsonable(value) for key, value in values.items()}}
        self._file.write(json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a torn last line, which a kill may leave, is passed over."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]


def before_and_after(folder: Path) -> dict[str, dict[str, Any]]:
    """The first and the last evaluation of a run, under headings; nothing where it had no held-out problems."""
    evaluations = [event for event in read_log(folder / METRICS_FILE) if event["kind"] == "eval"]
    if not evaluations:
        return {}
    before, after = evaluations[0], evaluations[-1]
    return {f"before (step {before['step']})": before, f"after (step {after['step']})": after}


def _bytes_through(path: Path, step: int) -> int:
    """How many leading bytes of the file hold whole lines of steps up to ``step``."""
    if not path.exists():
        return 0
    size = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or json.loads(line)["step"] > step:
            break
        size += len(line)
    return size


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

    Where groups are kept by their rewards: ``varying``, those whose rewards vary, ``alike``, the rest, and ``graded``,
    of the first those all right or all wrong. ``dropped``, where more is asked than is needed: prompts without a group.
    """
    counts = {
        "rounds": stats.rounds,
        "groups": stats.groups,
        "carried_in": stats.carried_in,
        "carried_out": stats.carried_out,
        "too_old": stats.too_old,
        **({"dropped": stats.asked - stats.groups} if oversampled else {}),
    }
    if not stats.groups:
        return prefixed("sampling", counts)
    shares = {
        "all_right": stats.all_right / stats.groups,
        "all_wrong": stats.all_wrong / stats.groups,
        "mixed": stats.mixed / stats.groups,
        **(
            {
                "graded": stats.graded / stats.groups,
                "varying": stats.varying / stats.groups,
                "alike": 1 - stats.varying / stats.groups,
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
        "filtered": _mean(not sample.trains for sample in samples),
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
        figures[f"{name}_spread"] = _mean(stdev(values) if len(values) > 1 else 0.0 for values in applied if values)
    return figures


def _rule_shares(samples: list[Sample]) -> dict[str, float]:
    rules = sorted({sample.verdict.rule for sample in samples if sample.verdict.rule})
    return {f"rule_{rule}": _mean(sample.verdict.rule == rule for sample in samples) for rule in rules}


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return math.fsum(items) / len(items)
