"""The page of on-policy distillation: its commands fit each other, and its recipe runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from builders import snippets_of, write_rows

from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, apply_overrides, load_config, parse
from dapo_runner.files import read_jsonl
from dapo_runner.logging.progress import Progress
from dapo_runner.loop import train

SNIPPETS = snippets_of("distillation")
SMALL = [
    "model.dtype=float32",
    "run.steps=1",
    "run.output_dir=runs",
    "data.eval_size=4",
    "evaluation.k=2",
    "rollout={group_size: 1, max_prompt_tokens: 8, max_response_tokens: 8}",
    "sampler.prompts_per_step=8",
]
EVALUATED = "data.eval={exam: {path: questions.jsonl, split: train, columns: {prompt: question, answer: solution}}}"
UNANSWERED = ["data.columns.answer=null", "data.path=unanswered.jsonl", EVALUATED]


def test_the_second_command_starts_from_what_the_first_leaves() -> None:
    first, second = (
        load_config(find_recipe(line.split()[2]), line.split()[3:])
        for line in SNIPPETS["commands"].strip().splitlines()
    )
    assert second.reference_path == str(first.run_dir / "checkpoints" / f"step_{first.run.steps:06d}" / "model")


def test_the_recipe_runs_with_answers_and_without(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that is its own teacher has no loss."""
    monkeypatch.chdir(tmp_path)
    for name in ("teacher", "student"):
        shutil.copytree(model_folder, Path("models", name))
    write_rows(Path("questions.jsonl"), [{"question": f"{i}+1=", "solution": str(i + 1)} for i in range(24)])
    write_rows(Path("unanswered.jsonl"), [{"question": f"{i}+2="} for i in range(24)])
    for name, overrides in (("answered", []), ("unanswered", UNANSWERED)):
        recipe = apply_overrides(
            yaml.safe_load(SNIPPETS["recipe"]), [*SMALL, "data.template=plain", f"run.name={name}", *overrides]
        )
        events = read_jsonl(train(parse(recipe, Config), Progress()) / "metrics.jsonl")
        (step,) = (event for event in events if event["kind"] == "step")
        assert step["train/loss"] == pytest.approx(0, abs=1e-6)
        assert step["train/updates"] == 1
        assert step["train/entropy"] > 0
        assert all("eval/avg@2" in event for event in events if event["kind"] == "eval")
