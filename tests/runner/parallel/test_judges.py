"""A judge on each rank: together they say what one says. What is distilled from its verdicts on ranks that share
weights, or positions as well, is the run that one has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch import leave, torchrun
from sft_runs import run, steps_of, write_sft_recipe
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.logging.metrics import read_log


def test_ranks_judge_and_imitate_as_one(tmp_path: Path, model_folder: Path) -> None:
    judge = [f"reward.judge.model={model_folder}", "reward.judge.answers=['5','8']"]
    asked = ["reward.judge.template='{reference}={response}?'", "reward.kind=judge", "sampler.filter_on=reward"]
    model = ["model.tiny=null", f"model.path={model_folder}"]
    recipe = write_recipe(tmp_path, steps=1, eval_every=0)
    options = ["train", str(recipe), *judge, *asked, *model]
    assert main([*options, "run.name=on1"]) == 0
    said, runs = tmp_path / "runs" / "on1" / "verdicts.jsonl", tmp_path / "runs"
    sections = {
        "run": {"output_dir": str(runs), "eval_every": 0},
        "data": {"eval_size": 5, "judge": {"template": "{reference}={response}?"}},
        "optimizer": {"mini_batch_size": 8, "warmup_steps": 1},
    }
    distilled = run(model_folder, said, **sections)
    sft = write_sft_recipe(model_folder, said, tmp_path / "sft.yaml", **sections)
    done = torchrun(2, __file__, sft, *options, "run.name=on2")
    assert done.returncode == 0, done.stderr[-4000:]

    one, two = (read_log(runs / f"on{n}" / "metrics.jsonl")[0] for n in (1, 2))
    assert two == pytest.approx(one)  # the evaluation before the first step
    files = ("on1/verdicts.jsonl", "on2/verdicts.jsonl", "on2/verdicts_rank_1.jsonl")
    alone, *of_ranks = (verdicts(runs / file) for file in files)
    for of_rank in of_ranks:
        common = alone.keys() & of_rank.keys()
        assert len(common) > 4
        assert [of_rank[question] for question in common] == pytest.approx([alone[question] for question in common])
    for name in ("weights", "positions"):
        for figure in ("train/loss", "train/grad_norm", "eval/loss"):
            assert steps_of(runs / name, figure) == pytest.approx(steps_of(distilled, figure), rel=1e-4)


def verdicts(path: Path) -> dict[tuple[str, str], float]:
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    return {(row["problem"], row["response"]): row["confidence"] for row in rows}


if __name__ == "__main__":
    recipe, *options = sys.argv[1:]
    assert main(options) == 0
    for sequence, name in ((1, "weights"), (2, "positions")):
        assert main(["sft", recipe, f"run.name={name}", f"parallel.sequence={sequence}"]) == 0
    leave()
