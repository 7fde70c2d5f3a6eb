"""The picture: every logged curve is in it, and poor logs still give one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_runner.logging.curves import collect, time_events
from dapo_runner.logging.metric_table import PANELS
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, MetricsLog
from dapo_runner.logging.report import REPORT_FILE, draw, write_report

TRAIN_KEYS = [curve.key for panel in PANELS for curve in panel.curves if not curve.key.startswith("eval/")]


def write_run(folder: Path, steps: int, evals: bool = True) -> Path:
    log = MetricsLog(folder / METRICS_FILE)
    for step in range(1, steps + 1):
        log.write(step, "train", {key: 0.3 for key in TRAIN_KEYS})
        if evals:
            log.write(step, "eval", {"eval/avg@8": 0.5, "eval/cons@8": 0.6, "eval/length": 20.0})
    return folder


@pytest.mark.parametrize(("steps", "evals"), [(30, True), (1, False)])
def test_a_picture_comes_out(tmp_path: Path, steps: int, evals: bool) -> None:
    out = write_report(write_run(tmp_path, steps, evals))
    assert out == tmp_path / REPORT_FILE
    assert out.read_bytes().startswith(b"\x89PNG")


def test_every_curve_is_drawn_with_its_values(tmp_path: Path) -> None:
    events = [{"step": step, "kind": "train", **{key: step + 0.5 for key in TRAIN_KEYS}} for step in range(3)]
    events.append({"step": 2, "kind": "eval", "eval/avg@16": 0.25})
    figure = draw(collect(events), "run")
    for panel, ax in zip(PANELS, figure.axes, strict=True):
        assert ax.get_title(loc="left") == panel.title
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        if panel.stacked:
            assert len(ax.containers) == sum(curve.key in collect(events) for curve in panel.curves)
        elif panel.title == "Held-out accuracy":
            assert [list(line.get_ydata()) for line in ax.lines] == [[0.25]]
            assert [text.get_text() for text in ax.get_legend().get_texts()] == ["avg@16"]
        else:
            drawn = [list(line.get_ydata()) for line in ax.lines]
            expected = [c for c in panel.curves if not c.key.startswith("eval/")]
            assert drawn == [[0.5, 1.5, 2.5]] * len(expected)


def test_stack_survives_steps_that_generated_nothing() -> None:
    """Steps served from the carried-over surplus have no shares to show."""
    events = [
        {"step": step, "sampling/all_correct": 0.1, "sampling/mixed": 0.6, "sampling/all_incorrect": 0.3}
        for step in (1, 3)
    ]
    events.append({"step": 2, "sampling/groups": 0})
    ax = next(a for a in draw(collect(events), "run").axes if a.get_title(loc="left") == "Dynamic sampling")
    tops = [bar.get_y() + bar.get_height() for bar in ax.containers[-1]]
    assert tops == pytest.approx([1.0, 1.0])


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=METRICS_FILE):
        write_report(tmp_path)
    (tmp_path / METRICS_FILE).touch()
    with pytest.raises(ValueError, match=METRICS_FILE):
        write_report(tmp_path)


def test_the_time_of_a_step_is_drawn_in_full(tmp_path: Path) -> None:
    """Phases are drawn together, a phase nobody has heard of is part of the rest, and nothing is lost."""
    timings = [
        {"step": 0, "kind": "start", "seconds/evaluate": 50.0},
        {"step": 1, "kind": "step", "seconds/rollout": 1.0, "seconds/forward_backward": 2.0, "seconds/optimizer": 0.5},
        {"step": 2, "kind": "step", "seconds/rollout": 1.5, "seconds/evaluate": 3.0, "seconds/surprise": 0.25},
    ]
    events = list(time_events(timings))
    assert [event["step"] for event in events] == [1, 2]
    ax = next(a for a in draw(collect(events), "run").axes if a.get_title(loc="left") == "Time")
    tops = [bar.get_y() + bar.get_height() for bar in ax.containers[-1]]
    assert tops == pytest.approx([3.5, 4.75])
    MetricsLog(write_run(tmp_path, 2) / TIMINGS_FILE).write(1, "step", {"seconds/rollout": 1.0})
    assert write_report(tmp_path).stat().st_size > 10_000


def test_groups_kept_by_their_rewards_are_drawn_as_kept() -> None:
    """Most are all right here, and trained on."""
    shares = {
        "sampling/all_correct": 0.7,
        "sampling/mixed": 0.2,
        "sampling/all_incorrect": 0.1,
        "sampling/varying_reward_only": 0.6,
    }
    events = [{"step": 1, **shares, "sampling/varying_reward": 0.8, "sampling/equal_reward": 0.2}]
    ax = next(a for a in draw(collect(events), "run").axes if a.get_title(loc="left") == "Dynamic sampling")
    assert [bars[0].get_height() for bars in ax.containers] == pytest.approx([0.2, 0.8])
    assert "accepted" in ax.containers[1].get_label()
