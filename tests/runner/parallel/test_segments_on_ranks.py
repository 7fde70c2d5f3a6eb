"""Segment advantages on two ranks: whichever engine grows a tree or continues a prefix, its tokens are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from launch import TESTS, torchrun
from small import SEGMENTS, small_recipe, write_recipe

from dapo_runner.config import load_config
from dapo_runner.logging.metrics import METRICS_FILE, read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.rollout_log import read_step
from dapo_runner.run.tiny_model import ensure_tiny_model
from dapo_runner.train import train


def written(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (event,) = (event for event in read_log(run / METRICS_FILE) if event["kind"] == "step")
    groups = read_step(run / "rollouts" / "step_000001.jsonl.gz").groups
    return event, [sample for group in groups for sample in group["samples"]]


def test_two_ranks_begin_as_one(tmp_path: Path) -> None:
    model = ensure_tiny_model(load_config(write_recipe(tmp_path)), tmp_path / "model", lambda line: None)
    recipe = small_recipe(steps=1, output_dir=str(tmp_path / "ranks"))
    recipe["model"] = {"path": str(model), "dtype": "float32"}
    (path := tmp_path / "warm.yaml").write_text(yaml.safe_dump(recipe))
    done = torchrun(2, TESTS / "parallel" / "trains.py", path, *SEGMENTS)
    assert done.returncode == 0, done.stderr[-4000:]
    for kind, overrides in SEGMENTS.items():
        alone = train(load_config(path, [f"run.output_dir={tmp_path / kind}", *overrides]), Progress())
        (event, samples), (other, others) = written(alone), written(tmp_path / "ranks" / kind)
        assert event.keys() == other.keys()
        for key, value in event.items():
            exact = key == "kind" or key.startswith(("sampling/", "segments/"))
            assert other[key] == (value if exact else pytest.approx(value, rel=1e-4, abs=1e-6)), key
        for sample, again in zip(samples, others, strict=True):
            assert (sample["response"], sample["segments"]) == (again["response"], again["segments"])
