"""TensorBoard and W&B: what they are given, a resume, and what is said where they are missing.

The packages are optional; stand-ins record the calls, and the real ones are tried where they are installed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.config import Config, ConfigError
from dapo_runner.records.trackers import TensorBoardTracker, check_trackers, open_trackers

OFFLINE: dict[str, Any] = {"wandb": {"project": "p", "mode": "offline"}}


def config_with(**logging: Any) -> Config:
    return make_config(logging=logging, run={"name": "mine"})


@pytest.mark.parametrize(("name", "switch"), [("tensorboard", {"tensorboard": True}), ("wandb", OFFLINE)])
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
    assert {"eval/avg@2", "seconds/evaluate"} <= by_step[0]
    assert {"train/loss", "batch/reward", "seconds/rollout", "reflection/en"} <= by_step[1]
    assert {"train/loss", "eval/avg@2", "seconds/save"} <= by_step[2]
    assert wandb.finished == 1
    tracked, alone = (tmp_path / "runs" / name / "metrics.jsonl" for name in ("tracked", "alone"))
    assert tracked.read_bytes() == alone.read_bytes()


def test_tensorboard_reads_back_what_was_written_and_a_resume_replaces(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path, 0)
    for step in range(5):
        first.write(step, {"train/loss": float(step), "eval/avg@2": 0.5, "bad": float("inf")})
    first.close()
    resumed = TensorBoardTracker(tmp_path, 3)
    resumed.write(3, {"train/loss": 30.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/avg_at_2", "train/loss"]
    assert [(item.step, item.value) for item in events.Scalars("train/loss")] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_the_real_wandb_writes_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for first in (0, 2):
        (tracker,) = open_trackers(config_with(**OFFLINE), tmp_path, first)
        tracker.write(first, {"train/loss": 0.5, "eval/avg@2": 1.0})
        tracker.close()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size > 0 for file in files)
