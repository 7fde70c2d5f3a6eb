"""TensorBoard, W&B, MLflow and trackio: what they are given, a resume, and what is said where they are missing.

The packages are optional; a stand-in records the calls, and the real ones are tried where they are installed.
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
import yaml
from builders import make_config, make_group
from refusals import refused
from small import Dapo, write_recipe

from dapo_runner.errors import RunError
from dapo_runner.files import read_jsonl
from dapo_runner.logging.rollout_log import ROLLOUTS, read_step, saved_steps
from dapo_runner.logging.trackers import Trackers
from docs.glossary import is_documented


def open_one(name: str, folder: Path, first: int = 1, is_resumed: bool = False) -> Trackers:
    run = {"name": "mine", "output_dir": str(folder)}
    config = make_config(logging={"trackers": [name], "project": "p"}, run=run)
    config.run_dir.mkdir(exist_ok=True)
    return Trackers(config, first, print, is_resumed)


def test_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dapo: Dapo) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    command = ["train", write_recipe(tmp_path), "logging.trackers=[mlflow]", "--dry-run"]
    dapo.refuses("logging.trackers: [mlflow]", *command)


class FakeWandb(types.ModuleType):
    """The part of wandb that accelerate uses; remembers what it was told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[Mapping[str, Any]] = []
        self.exit_codes: list[int] = []
        self.refuse = self.is_offline = False
        self.failures: list[int] = []
        self.config: dict[str, Any] = {}

    def Table(self, columns: list[str], data: list[list[Any]], dataframe: Any) -> list[dict[str, Any]]:  # noqa: N802
        return [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, **arguments: Any) -> FakeWandb:
        if self.refuse:
            raise RuntimeError("No API key configured.\nUse `wandb login`.")
        self.inits.append(arguments)
        return self

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if self.is_offline:
            self.failures.append(step)
            raise ConnectionError("no route to host")
        self.logged.append({**values, "step": step})

    def finish(self, exit_code: int = 0) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_keeps_its_id_and_gets_finite_figures_once_per_start(wandb: FakeWandb, tmp_path: Path) -> None:
    for steps, error in (((1, 2), RunError()), ((2, 3), KeyboardInterrupt())):  # with a resume
        trackers = open_one("wandb", tmp_path, steps[0])
        for step in steps:
            trackers.write(step, "step", {"train/loss": 0.5, "eval/avg@2": 1, "bad": float("nan")})
            trackers.write(step, "seconds", {"seconds/rollout": 2.0})
            trackers.write(step, "seconds", {"seconds/rollout": 2.0})
        trackers.close(error)  # only the first one is a failure
    figures = [values for values in wandb.logged if "train/loss" in values]
    assert figures == [{"train/loss": 0.5, "eval/avg_at_2": 1.0, "step": step} for step in (1, 2, 2, 3)]
    assert [values["step"] for values in wandb.logged if "seconds/rollout" in values] == [1, 2, 2, 3]
    one, two = wandb.inits
    assert (one["id"], wandb.exit_codes) == (two["id"], [1, 0])
    assert (one["project"], one["name"], one["resume"]) == ("p", "mine", "allow")
    assert wandb.config["optimizer.lr"] == "1e-06"
    assert wandb.config["environment.torch"] == importlib.metadata.version("torch")


def test_a_tracker_that_cannot_be_opened(wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused for a new run, left out of a resumed one."""
    wandb.refuse = True
    with refused("logging.trackers"):
        open_one("wandb", tmp_path)
    open_one("wandb", tmp_path, is_resumed=True).write(1, "step", {})
    wandb.refuse = False
    for _ in range(2):  # ended before anything is sent
        open_one("wandb", tmp_path)
    one, two = wandb.inits
    assert one["id"] == two["id"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "wandb" in line
    assert "No API key configured." in line


def test_a_run_tells_its_trackers_everything(wandb: FakeWandb, tmp_path: Path, start: Path, dapo: Dapo) -> None:
    dapo("train", write_recipe(tmp_path, start, steps=2), "logging.trackers=[wandb]")
    run, by_step = tmp_path / "runs" / "small", dict[int, set[str]]()
    for values in wandb.logged:
        by_step.setdefault(values["step"], set()).update(values)
    assert by_step.keys() == {0, 1, 2}
    assert {"eval/avg_at_2", "seconds/evaluate", "samples/eval"} <= by_step[0]
    assert {"train/loss", "batch/reward", "seconds/rollout", "reflection/en", "samples/trained"} <= by_step[1]
    assert {"train/loss", "eval/avg_at_2", "seconds/save", "samples/eval"} <= by_step[2]
    (table,) = (values["samples/trained"] for values in wandb.logged if values["step"] == 1 and len(values) == 2)
    step = read_step(saved_steps(run / ROLLOUTS)[1])
    assert [row["response"] for row in table] == [group["samples"][0]["response"] for group in step.groups]
    answers = [values["samples/eval"] for values in wandb.logged if "samples/eval" in values]
    assert [len(rows) for rows in answers] == [8, 8]  # of 10 problems
    assert wandb.exit_codes == [0]
    keys = {key for event in read_jsonl(run / "timings.jsonl") for key in event}
    assert {"speed/tokens_per_second", "seconds/rollout"} <= keys
    assert [key for key in keys - {"step", "kind"} if not is_documented(key)] == []
    wandb.refuse = True
    dapo("train", write_recipe(tmp_path, start, steps=3), "logging.trackers=[wandb]")  # resumes without it


def test_a_tracker_that_fails_ends_no_run(wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wandb.is_offline = True
    trackers = open_one("wandb", tmp_path)
    for step in range(5):
        trackers.write(step, "step", {"train/loss": 1.0})
    trackers.close()
    assert wandb.failures == [0, 1, 2]  # then it is given up
    first, last = capsys.readouterr().out.splitlines()
    assert "no route to host" in first
    assert "wandb" in last


def test_tensorboard_gets_a_step_once_per_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the steps that are trained again; one whose line is written again is not one of them."""
    sent: list[int] = []
    tracker = types.SimpleNamespace(name="tensorboard", log=lambda values, step: sent.append(step))
    monkeypatch.setattr("dapo_runner.logging.trackers._start", lambda *_: tracker)
    for steps in ((1, 2, 2), (2, 3)):
        trackers = open_one("tensorboard", tmp_path, steps[0])
        for step in steps:
            trackers.write(step, "step", {"train/loss": 0.5})
    assert sent == [1, 2, 2, 3]


def test_the_real_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The first time there is no checkpoint of it, so the run starts anew; the third time is a resume after step 1.
    for steps, loss in ((range(5), 1.0), (range(3), 0.5), (range(2, 4), 0.25)):
        trackers = open_one("tensorboard", tmp_path, steps[0])
        for step in steps:
            trackers.write(step, "step", {"train/loss": loss, "eval/avg@2": 1.0, "bad": float("nan")})
            trackers.samples(step, "samples/trained", [make_group("RW", "1 < 2 | 3\n4")])
        trackers.close()
        assert not trackers.failures
    events = EventAccumulator(str(tmp_path / "mine" / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/avg_at_2", "train/loss"]
    expected = [(0, 0.5), (1, 0.5), (2, 0.25), (3, 0.25)]
    assert [(item.step, item.value) for item in events.Scalars("train/loss")] == expected
    (text,) = events.Tensors("samples/trained/text_summary")[0].tensor_proto.string_val
    (row,) = json.loads(text.decode())
    assert (row["step"], row["prompt"], row["reward"]) == (0, "1 < 2 | 3\n4", 1.0)
    (settings,) = (tmp_path / "mine" / "tensorboard").glob("*/hparams.yml")
    assert yaml.safe_load(settings.read_text())["optimizer.lr"] == "1e-06"
