"""Runs with the advantages of segments: a checkpoint between changes nothing, and they say what they cost."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import SEGMENTS, write_recipe

from dapo_runner.config import load_config, parse_config
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.rollout_log import read_step
from dapo_runner.preflight.dry_run import departures
from dapo_runner.train import train

FEWER = ["sampler.prompts_per_step=2"]  # surplus groups are carried over


def run(folder: Path, kind: str) -> dict[str, Any]:
    """Metrics and rollouts of a run that begins, or goes on, in ``folder``."""
    run = train(load_config(write_recipe(folder, steps=3, eval_every=0, keep=9), [*FEWER, *SEGMENTS[kind]]), Progress())
    return {"metrics": read_log(run / METRICS_FILE)} | {p.name: read_step(p) for p in (run / "rollouts").iterdir()}


@pytest.mark.parametrize("kind", SEGMENTS)
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path: Path, kind: str) -> None:
    whole = run(tmp_path, kind)
    folder = tmp_path / "runs" / "small"
    timings = read_log(folder / TIMINGS_FILE)
    for step in (2, 3):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    assert run(tmp_path, kind) == whole

    steps = [event for event in whole.pop("metrics") if event["kind"] == "step"]
    assert any(event["segments/advantage"] > 0 for event in steps)
    if kind == "tree":
        assert steps[0]["segments/tokens"] > 0
        assert steps[0]["sampling/carried_out"]  # groups came out of the checkpoint, whole ones
        assert steps[0]["segments/waiting"]  # and parts
        assert steps[1]["batch/age_max"] == 1
    else:
        assert all(event["seconds/segments"] > 0 for event in timings if event["kind"] == "step")
        assert all(event["segments/continuations"] == 3 * event["segments/prefixes"] for event in steps)
    samples = [sample for step in whole.values() for group in step.groups for sample in group["samples"]]
    for sample in samples:
        assert sum(segment["length"] for segment in sample["segments"]) == sample["tokens"]
        assert sample["segments"][-1]["after"] == pytest.approx(sample["reward"])


def test_figures_are_those_of_whole_trees(tmp_path: Path) -> None:
    """However many of its responses the step itself trains on."""
    figures = []
    for per_step in ("1", "null"):
        folder = tmp_path / per_step
        folder.mkdir()
        recipe = write_recipe(folder, steps=1, eval_every=0)
        settings = [*FEWER, *SEGMENTS["tree"], f"advantage.segments.per_step={per_step}", "sampler.max_age=3"]
        (step,) = (
            event
            for event in read_log(train(load_config(recipe, settings), Progress()) / METRICS_FILE)
            if event["kind"] == "step"
        )
        figures.append({name: step[f"segments/{name}"] for name in ("per_response", "advantage", "zero")})
    assert figures[0] == figures[1]
    assert 0 < figures[0]["zero"] < 1


def test_the_settings_of_the_page_and_the_cost_it_states() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spo.md").read_text(encoding="utf-8")
    snippets = dict(re.findall(r"<!-- (.+?) -->\n```yaml\n(.+?)```", page, re.DOTALL))
    assert snippets.keys() == SEGMENTS.keys()
    sizes_of_the_paper = {
        "chain": {"sampler": {"prompts_per_step": 64}, "rollout": {"group_size": 8}},
        "tree": {"sampler": {"prompts_per_step": 16}, "rollout": {"group_size": 216}},
    }
    for kind, snippet in snippets.items():
        recipe = {"model": {"path": "a/model"}, "data": {"path": "train.jsonl"}}
        config = parse_config(recipe | yaml.safe_load(snippet))
        assert not departures(parse_config(recipe | {"algorithm": f"spo_{kind}"} | sizes_of_the_paper[kind]))
        if kind == "tree":
            assert config.tree is not None
            alone, size = 216 * 2048, config.tree.tokens
            assert (6 + 36) * size + 216 * (2048 - 2 * size) == 208368  # 6 · 6 · 6 children
            assert "208,368 tokens, 0.47" in " ".join(page.split())
            assert round(208368 / alone, 2) == 0.47
