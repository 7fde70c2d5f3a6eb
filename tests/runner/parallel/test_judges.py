"""A judge on each rank: together they say what one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import torchrun
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.records.metrics import read_log


def test_ranks_judge_their_shares(tmp_path: Path, model_folder: Path) -> None:
    judge = [f"reward.judge.model={model_folder}", "reward.judge.dtype=float32", "reward.judge.answers=['5','8']"]
    asked = ["reward.judge.template='{reference}={response}?'", "reward.kind=judge", "sampler.filter_on=reward"]
    model = ["model.tiny=null", f"model.path={model_folder}"]
    recipe = write_recipe(tmp_path, steps=1, eval_every=0)
    options = ["train", str(recipe), *judge, *asked, *model]
    assert main([*options, "run.name=on1"]) == 0
    done = torchrun(2, "-m", "dapo_runner", *options, "run.name=on2")
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = (read_log(tmp_path / "runs" / f"on{n}" / "metrics.jsonl")[0] for n in (1, 2))
    assert two == pytest.approx(one)  # the evaluation before the first step
    files = ("on1/verdicts.jsonl", "on2/verdicts.jsonl", "on2/verdicts_rank_1.jsonl")
    alone, *said = (verdicts(tmp_path / "runs" / file) for file in files)
    for of_rank in said:
        common = alone.keys() & of_rank.keys()
        assert len(common) > 4
        assert [of_rank[question] for question in common] == pytest.approx([alone[question] for question in common])


def verdicts(path: Path) -> dict[tuple[str, str], float]:
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    return {(row["problem"], row["response"]): row["confidence"] for row in rows}
