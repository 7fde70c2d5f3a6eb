"""Runs every snippet of docs/training-options.md."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import save_model, write_rows
from experts import small_experts
from refusals import refused
from small import small_recipe
from test_train import Notes, config_in
from torch import Tensor

from dapo_runner.algorithms.weights import learning_rate
from dapo_runner.cli import main
from dapo_runner.config import Config, OptimizerConfig, RunConfig, load_config, parse_config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.policy.model import load_policy
from dapo_runner.policy.routing import Routing
from dapo_runner.rollout.worker import rollout_sampling
from dapo_runner.run.steps import Run
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.train import train

PAGE = (Path(__file__).parents[2] / "docs" / "training-options.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- (.+?) -->\n```\w*\n(.+?)```", PAGE, re.DOTALL))
PYTHON, COMMANDS = {"python", "python: recipe", "python: vary", "reading"}, {"resuming", "forking"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / "models" / "mine")
    write_rows(tmp_path / "questions.jsonl", [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(300)])
    recipe = small_recipe(name="mine", steps=2, keep=9)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def laid_over(name: str) -> Config:
    """The snippet over the defaults, on sums of a tiny model where it names neither."""
    return parse_config({"model": {"tiny": {}}, "data": {"format": "arithmetic"}} | yaml.safe_load(SNIPPETS[name]))


def run_commands(name: str) -> list[int]:
    lines = SNIPPETS[name].splitlines()
    assert all(line.startswith("dapo ") for line in lines)
    return [main(shlex.split(line)[1:]) for line in lines]


def test_every_snippet_is_tested() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in source.replace("SNIPPETS = ", "") for name in SNIPPETS)
    assert PAGE.count("```") == 2 * len(SNIPPETS)


def test_python() -> None:
    names: dict[str, Any] = {}
    exec(SNIPPETS["python"], names)  # the page is the test
    events = read_log(names["folder"] / "metrics.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]
    assert len(SNIPPETS["python"].strip().splitlines()) <= 15


def test_a_configuration_that_differs() -> None:
    names: dict[str, Any] = {}
    exec(SNIPPETS["python: vary"], names)
    assert names["longer"] == load_config("mine.yaml", ["run.steps=4"]) != names["config"]
    with pytest.raises(ValueError, match="frozen"):
        names["config"].run.steps = 4


def test_mixtures_of_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(small_experts(), make_tokenizer(), folder / "models" / "experts")
    raw = small_recipe(name="experts", steps=1, eval_every=0)
    raw |= {"model": {"path": str(path), "dtype": "float32"}, "loss": yaml.safe_load(SNIPPETS["experts"])["loss"]}
    raw["sampler"] = {"prompts_per_step": 4, "filter_groups": False}
    replayed = []
    follow = Routing.follow

    def note(routing: Routing, experts: Tensor | None) -> None:
        replayed.append(experts is not None)
        follow(routing, experts)

    monkeypatch.setattr(Routing, "follow", note)
    train(parse_config(raw), Notes())
    assert any(replayed)


def test_preference_pairs(folder: Path) -> None:
    """Also: a run that was interrupted goes on as if it had not been."""
    section = yaml.safe_load(SNIPPETS["preference"])["preference"]
    logs = []
    for name, stops in (("whole", [3]), ("resumed", [1, 3])):
        for steps in stops:
            raw = small_recipe(name=name, steps=steps, eval_every=1)
            raw |= {
                "preference": section | {"pairs_per_group": 2},
                "sampler": {"prompts_per_step": 4, "filter_groups": False},
            }
            raw["optimizer"] |= {"mini_batch_size": 256}
            run = train(parse_config(raw), Notes())
        logs.append((run / "metrics.jsonl").read_bytes())
        steps = [event for event in read_log(run / "metrics.jsonl") if event["kind"] == "step"]
        assert all(event["train/pairs"] + event["train/ties"] == 8 for event in steps if event["train/updates"])
        assert any(event.get("train/margin") for event in steps[1:])  # a step without a pair has none
        for saved in map(read_step, saved_steps(run / "rollouts").values()):
            given = [sample["advantage"] for group in saved.groups for sample in group["samples"]]
            assert given.count(1.0) == given.count(-1.0)
            assert set(given) <= {1.0, -1.0, 0.0}
    assert logs[0] == logs[1]


def test_python_with_a_recipe_and_reading_what_it_left(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(SNIPPETS["python: recipe"], names)
    assert names["folder"] == Path("runs/mine")
    exec(SNIPPETS["reading"], names)
    assert names["rewards"].keys() == {1, 2}
    assert len(names["evaluations"]) == 2
    assert isinstance(names["worst"], str)
    assert sum(p.numel() for p in names["model"].parameters()) > 1000


def test_python_refuses_what_the_command_refuses() -> None:
    optimizer = OptimizerConfig(schedule="linear")
    wrong = laid_over("early stop").model_copy(update={"run": RunConfig(steps=9), "optimizer": optimizer})
    with refused("optimizer.warmup_steps"):
        train(wrong, Notes())


def test_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.yaml").write_text(SNIPPETS["own model"])
    short = ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=8", "reward.overlong.cache_length=4"]
    assert main(["train", "own.yaml", *short, "--dry-run"]) == 0
    assert "300 rows → 44 training and 256 held-out prompts" in capsys.readouterr().out


def test_lora() -> None:
    pytest.importorskip("peft")
    model = parse_config({"data": {"path": "questions.jsonl"}, **yaml.safe_load(SNIPPETS["lora"])}).model
    policy = load_policy(Path("models/mine"), model, torch.device("cpu"), seed=0)
    trained = {name.split(".")[-4] for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}


def test_schedule() -> None:
    config = laid_over("schedule")
    rates = [learning_rate(config, step) for step in range(config.run.steps)]
    assert max(rates) == rates[19] == 1e-6
    assert rates[-1] == pytest.approx(1e-7, rel=0.01)


def test_sampling() -> None:
    config = laid_over("sampling")
    assert rollout_sampling(config, 0).stop == ("</answer>", "\n\n\n")
    assert (config.evaluation.top_k, config.evaluation.min_p) == (50, 0.02)


SECTIONS = [
    *("curriculum: column", "curriculum: pass rate", "early stop", "trackers"),
    *("critic", "reward kl", "reference"),
]


@pytest.mark.parametrize("name", SECTIONS)
def test_sections(name: str) -> None:
    """Every key of the snippet is a setting, and says what it says."""
    written, read = yaml.safe_load(SNIPPETS[name]), laid_over(name).model_dump(mode="json", by_alias=True)

    def check(part: Any, of: Any) -> None:
        if isinstance(part, dict):
            for key, value in part.items():
                check(value, of[key])
        else:
            assert part == of

    check(written, read)


def test_a_sampling_mask() -> None:
    config = laid_over("sampling mask")
    sampling = rollout_sampling(config, 0)
    assert (sampling.top_p, sampling.top_k, sampling.sampling_mask) == (0.95, 50, True)


def test_resuming_and_forking() -> None:
    assert run_commands("resuming") == [0, 0]
    changes = {event["key"]: event["after"] for event in read_log(Path("runs/mine/changes.jsonl"))}
    assert changes == {"run.steps": 4, "optimizer.lr": 5e-4}
    assert run_commands("forking") == [0]
    steps = [event["step"] for event in read_log(Path("runs/warmer/metrics.jsonl")) if event["kind"] == "step"]
    assert steps == [3, 4]


CHOSEN: dict[str, dict[str, object]] = {
    "optimizer": {"schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1},
    "sampler": {"curriculum": {"by": "pass_rate", "rest": 1}},
    "rollout": {"stop": ["9"], "top_k": 20, "min_p": 0.01},
}


def test_with_all_of_it_a_run_that_stopped_on_the_way_is_the_same_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config_in(folder / "whole", **CHOSEN), Notes())
    end_step = Run.end_step

    def lost(self: Run, step: int) -> None:
        end_step(self, step)
        if step == 2:
            raise KeyboardInterrupt

    config = config_in(folder / "lost", **CHOSEN)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "end_step", lost)
        with pytest.raises(KeyboardInterrupt):
            train(config, Notes())
    again = train(config, Notes())
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    rates = [event["train/lr"] for event in read_log(again / "metrics.jsonl") if event["kind"] == "step"]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4


def test_a_curriculum_may_not_change_in_a_run_a_schedule_may(folder: Path) -> None:
    first = train(config_in(folder, run={"steps": 2}), Notes())
    with refused("sampler.curriculum.by"):
        train(config_in(folder, run={"steps": 3}, sampler=CHOSEN["sampler"]), Notes())
    train(config_in(folder, run={"steps": 3}, optimizer={"schedule": "linear"}), Notes())
    fork = {"name": "fork", "from": f"{first}@2", "steps": 3}
    run = train(config_in(folder, run=fork, sampler=CHOSEN["sampler"]), Notes())
    assert read_log(run / "metrics.jsonl")[-1]["step"] == 3
