"""The metrics file after a kill, and the figures that go into it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from builders import make_group, make_prompt, make_sample

from dapo_runner.errors import ConfigError
from dapo_runner.logging.metrics import MetricsLog, batch_metrics, prefixed, read_log, sampling_metrics
from dapo_runner.rollout.group_buffer import SamplingStats
from dapo_runner.types import Group


def write_steps(log: MetricsLog, steps: range) -> None:
    for step in steps:
        log.write(step, "train", {"train/loss": 1 / (step + 1), "name": "ü"})
        if step % 2 == 0:
            log.write(step, "eval", {"eval/avg@4": step / 10})


def test_killed_and_resumed_file_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl"
    write_steps(MetricsLog(straight), range(8))
    write_steps(MetricsLog(resumed), range(6))
    with resumed.open("ab") as file:
        file.write(b'{"step": 6, "ki')  # the kill came in the middle of a line
    write_steps(MetricsLog(resumed, keep_through=3), range(4, 8))
    assert resumed.read_bytes() == straight.read_bytes()


def test_resume_after_the_last_line_or_before_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(MetricsLog(path), range(3))
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"step": 3, "ki')
    MetricsLog(path, keep_through=99)
    assert path.read_bytes() == content
    MetricsLog(path, keep_through=-1)
    assert path.read_bytes() == b""


def test_a_log_of_an_older_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "step", "sampling/all_right": 0.5}\n')
    with pytest.raises(ConfigError, match="sampling/all_right"):
        read_log(path)


def test_lines_are_on_disk_at_once_and_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).write(1, "train", {"loss": math.nan, "norm": math.inf, "n": 3})
    assert json.loads(path.read_text()) == {"step": 1, "kind": "train", "loss": None, "norm": None, "n": 3}
    with path.open("ab") as file:
        file.write(b'{"torn')
    assert len(read_log(path)) == 1


def test_batch_metrics_by_hand() -> None:
    samples = (
        make_sample(True, length=2),
        make_sample(False, length=4, truncated=True, penalty=-1.0, trains=False),
    )
    values = batch_metrics([Group(make_prompt(), samples, step=3)], step=5)
    probabilities = [math.exp(-i / 8) for i in (1, 2, 1, 2, 3, 4)]
    expected = {
        "groups": 1,
        "age": 2,
        "age_max": 2,
        "reward": -0.5,
        "accuracy": 0.5,
        "length_penalty": -0.5,
        "length": 3,
        "length_max": 4,
    }
    expected |= {
        "truncated": 0.5,
        "masked": 0.5,
        "generation_prob": sum(probabilities) / 6,
        "rule_answer-line": 1,
    }
    reflection = {"reflection/responses": 0.0, "reflection/en": 0.0, "reflection/zh": 0.0}
    assert values == pytest.approx(prefixed("batch", expected) | reflection)
    assert batch_metrics([]) == {"batch/groups": 0}


def test_sampling_metrics_by_hand() -> None:
    stats = SamplingStats(rounds=2, carried_in=1, carried_out=3, too_old=5)
    stats.count([make_group("RW"), make_group("RR"), make_group("TT"), make_group("WW")])
    values = sampling_metrics(stats)
    expected = {
        "rounds": 2,
        "groups": 4,
        "carried_in": 1,
        "carried_out": 3,
        "too_old": 5,
        "all_correct": 0.25,
        "all_incorrect": 0.5,
    }
    expected |= {"mixed": 0.25, "accuracy": 3 / 8, "reward": -0.25, "length": 4, "truncated": 0.25}
    assert values == pytest.approx(prefixed("sampling", expected))
    empty = sampling_metrics(SamplingStats(carried_in=4))
    assert empty["sampling/carried_in"] == 4
    assert "sampling/mixed" not in empty
