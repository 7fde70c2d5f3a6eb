"""TensorBoard, W&B, MLflow and trackio: what they are given, a resume, and what is said where they are missing.

The packages are optional; stand-ins record the calls, and the real ones are tried where they are installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import make_config, make_group
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.config import Config, ConfigError
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.rollout_log import ROLLOUTS, read_step, saved_steps
from dapo_runner.logging.trackers import (
    MLflowTracker,
    TensorBoardTracker,
    Tracker,
    check_trackers,
    open_trackers,
    sample_table,
)

OFFLINE: dict[str, Any] = {"wandb": {"project": "p", "mode": "offline"}}


def config_with(**logging: Any) -> Config:
    return make_config(logging=logging, run={"name": "mine"})


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("wandb", OFFLINE),
        ("mlflow", {"mlflow": {}}),
        ("trackio", {"trackio": {}}),
    ],
)
def test_a_missing_package_is_one_clear_line(
    name: str, switch: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    expected = rf"logging\.{name}: needs the package {name}; pip install 'dapo-kernels\[{name}\]'"
    with pytest.raises(ConfigError, match=expected):
        open_trackers(config_with(**switch), tmp_path, 1)
    check_trackers(config_with().logging)
    assert open_trackers(config_with(), tmp_path, 1) == []


def test_a_dry_run_tells_of_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    assert main(["train", str(write_recipe(tmp_path)), "logging.tensorboard=true", "--dry-run"]) == 2
    assert "logging.tensorboard: needs the package tensorboard" in capsys.readouterr().err


class FakeWandb(types.ModuleType):
    """The part of wandb that is used; remembers what it was told."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.errors = types.SimpleNamespace(Error=self.Error)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[Mapping[str, Any]] = []
        self.finished = 0
        self.refuse = False

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802
        return settings

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:  # noqa: N802
        return [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, **arguments: Any) -> FakeWandb:
        if self.refuse:
            raise self.Error("No API key configured.\nUse `wandb login`.")
        self.inits.append(arguments)
        return self

    def define_metric(self, *names: str, **_: Any) -> None: ...

    def log(self, values: Mapping[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_finite_figures_and_keeps_its_id(wandb: FakeWandb, tmp_path: Path) -> None:
    config = config_with(**OFFLINE)
    for first in (1, 3):  # the second time is a resume
        (tracker,) = open_trackers(config, tmp_path, first)
        tracker.write(first, {"train/loss": 0.5, "eval/avg@2": 1, "bad": float("nan")})
        tracker.close()
    assert wandb.logged == [{"train/loss": 0.5, "eval/avg@2": 1.0, "step": step} for step in (1, 3)]
    assert wandb.finished == 2
    one, two = wandb.inits
    assert one["id"] == two["id"]
    assert (one["project"], one["name"], one["mode"], one["resume"]) == ("p", "mine", "offline", "allow")
    assert one["config"]["optimizer"]["lr"] == config.optimizer.lr
    assert one["config"]["environment"]["torch"] == importlib.metadata.version("torch")
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    open_trackers(config, elsewhere, 1)
    assert wandb.inits[-1]["id"] != one["id"]


def test_wandb_without_a_login_says_what_to_do(wandb: FakeWandb, tmp_path: Path) -> None:
    wandb.refuse = True
    with pytest.raises(ConfigError, match=r"logging\.wandb: No API key configured\. \(`wandb login`, or .*offline\)"):
        open_trackers(config_with(**OFFLINE), tmp_path, 1)


def test_a_run_tells_its_trackers_everything(wandb: FakeWandb, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, steps=2))
    assert main(["train", recipe, "logging.wandb.mode=offline", "run.name=tracked"]) == 0
    assert main(["train", recipe, "run.name=alone"]) == 0
    by_step: dict[int, set[str]] = {}
    for values in wandb.logged:
        by_step.setdefault(values["step"], set()).update(values)
    assert by_step.keys() == {0, 1, 2}
    assert {"eval/avg@2", "seconds/evaluate", "samples/eval"} <= by_step[0]
    assert {"train/loss", "batch/reward", "seconds/rollout", "reflection/en", "samples/trained"} <= by_step[1]
    assert {"train/loss", "eval/avg@2", "seconds/save", "samples/eval"} <= by_step[2]
    (table,) = (values["samples/trained"] for values in wandb.logged if values.get("step") == 1 and len(values) == 2)
    (step, *_) = [read_step(path) for path in saved_steps(tmp_path / "runs" / "tracked" / ROLLOUTS).values()]
    assert [row["response"] for row in table] == [group["samples"][0]["response"] for group in step.groups]
    answers = [values["samples/eval"] for values in wandb.logged if "samples/eval" in values]
    assert [len(rows) for rows in answers] == [8, 8]  # of 10 problems
    assert wandb.finished == 1
    tracked, alone = (tmp_path / "runs" / name / "metrics.jsonl" for name in ("tracked", "alone"))
    assert tracked.read_bytes() == alone.read_bytes()


def test_a_table_is_what_the_groups_are() -> None:
    first, second, _ = groups = [make_group("RW", "a"), make_group("TR", "b"), make_group("WW", "c")]
    table = sample_table(3, groups, 2)
    assert [(row["step"], row["prompt"], row["correct"], row["reward"]) for row in table] == [
        (3, "a", True, 1.0), (3, "b", False, -1.0)
    ]  # fmt: skip
    assert [(row["answer"], row["finish_reason"]) for row in table] == [("7", "stop"), ("7", "length")]
    assert [row["tokens"] for row in table] == [first.samples[0].completion.length, second.samples[0].completion.length]
    assert sample_table(3, groups, 0) == []


def test_without_tables_none_are_sent(wandb: FakeWandb, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, steps=1))
    assert main(["train", recipe, "logging.wandb.mode=offline", "logging.samples=0"]) == 0
    assert not any(name.startswith("samples") for values in wandb.logged for name in values)


def test_tensorboard_reads_back_what_was_written_and_a_resume_replaces(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_with(tensorboard=True)
    first = TensorBoardTracker(tmp_path, config, 0)
    for step in range(5):
        first.write(step, {"train/loss": float(step), "eval/avg@2": 0.5, "bad": float("inf")})
    first.samples(2, "samples/trained", [{"prompt": "1 < 2 | 3\n4", "correct": True}])
    first.close()
    resumed = TensorBoardTracker(tmp_path, config, 3)
    resumed.write(3, {"train/loss": 30.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/avg_at_2", "train/loss"]
    assert [(item.step, item.value) for item in events.Scalars("train/loss")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    texts = {name: events.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in events.Tags()["tensors"]}
    assert texts["samples/trained/text_summary"] == (
        "| prompt | correct |\n| --- | --- |\n| 1 &lt; 2 &#124; 3<br>4 | true |"
    )
    assert "| optimizer.lr | 1e-06 |" in texts["config/text_summary"]
    assert f"| torch | {importlib.metadata.version('torch')} |" in texts["environment/text_summary"]


def test_the_real_wandb_writes_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for first in (0, 2):
        (tracker,) = open_trackers(config_with(**OFFLINE), tmp_path, first)
        tracker.write(first, {"train/loss": 0.5, "eval/avg@2": 1.0})
        tracker.close()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size > 0 for file in files)


TABLE = [{"step": 1, "prompt": "1+1=", "reward": 1.0}]


def write_twice(tmp_path: Path, **logging: Any) -> Tracker:
    """As a run and its resume do."""
    for first in (0, 2):
        (tracker,) = open_trackers(config_with(**logging), tmp_path, first)
        tracker.write(first, {"train/loss": 0.5, "eval/avg@2": 1.0, "bad": float("nan")})
        tracker.samples(first, "samples/trained", TABLE)
        tracker.close()
    return tracker


def test_the_real_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    tracker = write_twice(tmp_path, mlflow={"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"})
    assert isinstance(tracker, MLflowTracker)
    run = tracker.client.get_run(tracker.id)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["optimizer.lr"] == "1e-06"
    assert [(m.step, m.value) for m in tracker.client.get_metric_history(tracker.id, "eval/avg_at_2")] == [
        (0, 1),
        (2, 1),
    ]
    files = {file.path for file in tracker.client.list_artifacts(tracker.id)}
    assert {"config.json", "environment.json", "samples"} <= files
    path = tracker.client.download_artifacts(tracker.id, "samples/trained/step_000002.json")
    assert json.loads(Path(path).read_text()) == {"columns": list(TABLE[0]), "data": [list(TABLE[0].values())]}


def test_the_real_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    write_twice(tmp_path, trackio={"project": "p"})
    (run,) = trackio.Api().runs("p")
    assert run.name.startswith("mine-")
    assert run.config["optimizer"]["lr"] == 1e-6


def test_a_tracker_that_cannot_be_reached_ends_no_run(
    wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path, steps=3))
    assert main(["train", recipe, "run.name=alone"]) == 0

    def gone(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    for method in ("log", "finish"):
        monkeypatch.setattr(wandb, method, gone)
    assert main(["train", recipe, "run.name=lost", "logging.wandb.mode=offline"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "no route" in line]
    assert len(lines) == 1
    assert "logging.wandb" in lines[0]
    alone, lost = (tmp_path / "runs" / name / "metrics.jsonl" for name in ("alone", "lost"))
    assert lost.read_bytes() == alone.read_bytes()
    counts = [event.get("tracker/wandb_failed", 0) for event in read_log(lost.with_name("timings.jsonl"))]
    assert counts == sorted(counts)
    assert counts[-1] >= 8  # figures, tables and times of three steps


def test_a_tracker_that_cannot_be_opened_ends_no_resumed_run(wandb: FakeWandb, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, steps=1))
    wandb.refuse = True
    assert main(["train", recipe, "logging.wandb.mode=offline"]) == 2
    wandb.refuse = False
    assert main(["train", recipe, "logging.wandb.mode=offline"]) == 0
    wandb.refuse = True
    assert main(["train", recipe, "logging.wandb.mode=offline", "run.steps=2"]) == 0
