"""Runs every snippet of docs/your-own.md."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml
from builders import CharTokenizer, make_completion, make_group, make_prompt, write_rows

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.cli import main
from dapo_runner.config import AdvantageConfig, Config, ConfigError, parse_config
from dapo_runner.data.dataset import load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.types import Group

PAGE = (Path(__file__).parents[2] / "docs" / "your-own.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- (.+?) -->\n```\w+\n(.+?)```", PAGE, re.DOTALL))
WRONG = """

def short(groups):
    return [[0.0] for group in groups]

def long(groups):
    return [[[1.0] * (sample.completion.length + 1) for sample in group.samples] for group in groups]

def infinite(groups):
    return [[float("inf") for sample in group.samples] for group in groups]
"""
QUESTIONS = [{"question": f"What is {i} + {i}?", "solution": 2 * i, "limit": 10} for i in range(8)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    functions = [SNIPPETS[f"reward: {name}"] for name in ("function", "trl", "async")]
    (tmp_path / "my_rewards.py").write_text("\n".join(functions))
    monkeypatch.delitem(sys.modules, "my_advantages", raising=False)
    (tmp_path / "my_advantages.py").write_text(SNIPPETS["advantage: function"] + WRONG)
    monkeypatch.delitem(sys.modules, "paper_advantages", raising=False)
    (tmp_path / "paper_advantages.py").write_text(SNIPPETS["advantage: papers"])
    importlib.invalidate_caches()
    write_rows(tmp_path / "questions.jsonl", QUESTIONS)
    write_rows(tmp_path / "easy.jsonl", [QUESTIONS[0], {"question": "What is 1?", "solution": "1", "limit": 1}])
    exam = {"task": "Which?", "options": ["this", "that"], "key": 1}
    write_rows(tmp_path / "exam.parquet", [{**exam, "data_source": "oral"}, {**exam, "task": "Who?"}])
    return tmp_path


def config_of(*snippets: str) -> Config:
    raw: dict[str, Any] = {"model": {"tiny": {}}, "data": {"format": "arithmetic"}}
    for name in snippets:
        raw |= yaml.safe_load(SNIPPETS[name])
    return parse_config(raw)


def score(config: Config, *texts: str) -> Group:
    prompt = replace(make_prompt(answer="7"), row={"limit": 6})
    (group,) = Scorer(config, shaped=False)([prompt], [[make_completion(text=text) for text in texts]])
    return group


def test_every_snippet_is_tested() -> None:
    tested = set(
        re.findall(r'"((?:data|reward|advantage): [\w ]+|recipe)"', Path(__file__).read_text(encoding="utf-8"))
    )
    assert tested | {f"reward: {name}" for name in ("function", "trl", "async")} == SNIPPETS.keys()
    assert PAGE.count("```") == 2 * len(SNIPPETS)


def test_columns() -> None:
    dataset = load_data(config_of("data: columns"), CharTokenizer("yes"))
    assert (len(dataset.train), len(dataset.heldout)) == (6, 2)
    prompt = dataset.train[0]
    number = int(prompt.answer) // 2
    asked = f"What is {number} + {number}?\nEnd with a line 'Answer: …'."
    assert prompt.messages == (("system", "Answer in one sentence."), ("user", asked))
    assert prompt.text == f"<system>Answer in one sentence.<user>{asked}<assistant>"
    assert prompt.row == QUESTIONS[number]


def test_evaluation_sets() -> None:
    dataset = load_data(config_of("data: evaluation sets"), CharTokenizer())
    assert [(prompt.eval_set, prompt.answer, prompt.source) for prompt in dataset.heldout] == [
        ("easy", "0", ""), ("easy", "1", ""), ("exam", "B", "oral"), ("exam", "B", "")
    ]  # fmt: skip
    assert dataset.heldout[2].text == "Which?\nA. this\nB. that"
    assert len(dataset.train) == 7


def test_choices() -> None:
    (prompt,) = load_data(config_of("data: choice"), CharTokenizer()).train
    assert prompt.text.endswith(
        "?\nA. this\nB. that\nEnd with a line 'Answer: X', X being the letter of the correct option."
    )


def test_a_whole_recipe(folder: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, folder / "models" / "mine")
    (folder / "mine.yaml").write_text(SNIPPETS["recipe"])
    assert main(["train", "mine.yaml"]) == 0
    events = read_log(folder / "runs" / "mine" / "metrics.jsonl")
    assert [event["train/lr"] for event in events if event["kind"] == "step"] == [1e-6, 1e-6]


@pytest.mark.parametrize(
    ("snippet", "function"),
    [
        ("advantage: kind", "my_advantages:from_median"),
        ("advantage: kind", "my_advantages:early_tokens"),
        ("advantage: papers recipe", "paper_advantages:gdpo"),
        ("advantage: papers recipe", "paper_advantages:max_rl"),
    ],
)
def test_an_advantage_of_ones_own(folder: Path, model_folder: Path, snippet: str, function: str) -> None:
    shutil.copytree(model_folder, folder / "models" / "mine")
    recipe = yaml.safe_load(SNIPPETS["recipe"]) | yaml.safe_load(SNIPPETS[snippet])
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "mine.yaml", f"advantage.kind={function}"]) == 0
    events = read_log(folder / "runs" / "mine" / "metrics.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]


@pytest.mark.parametrize("function", ["short", "long", "infinite", "absent"])
def test_wrong_advantages_are_refused(function: str) -> None:
    config = AdvantageConfig(kind=f"my_advantages:{function}")
    with pytest.raises(ConfigError, match=rf"advantage\.kind.*{function}"):
        make_sequences([make_group("RRW")], config)


def test_advantages_of_ones_own() -> None:
    group = make_group("RRW")  # rewards 1, 1, −1
    (first, _, last) = make_sequences([group], AdvantageConfig(kind="my_advantages:from_median"))
    assert (first.advantages[-1], last.advantages[-1]) == (0.0, -2.0)
    (first, _, _) = make_sequences([group], AdvantageConfig(kind="my_advantages:early_tokens"))
    n = group.samples[0].completion.length
    assert first.advantages[-n:].tolist() == pytest.approx([0.9**t for t in range(n)])


def longhand_gdpo(groups: list[Group], weights: dict[str, float]) -> list[list[float]]:
    sums: list[list[float]] = []
    for group in groups:
        sums.append([0.0] * len(group.samples))
        for name, weight in weights.items():
            rewards = [sample.parts[name] for sample in group.samples]
            for i, reward in enumerate(rewards):
                sums[-1][i] += weight * (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
    step = [value for row in sums for value in row]
    return [[(value - fmean(step)) / (stdev(step) + 1e-6) for value in row] for row in sums]


def longhand_max_rl(groups: list[Group]) -> list[float]:
    """The mean of the gradients of the K correct responses minus that of all N, written as N weights."""
    advantages = []
    for group in groups:
        n, k = len(group.samples), sum(1 for sample in group.samples if sample.correct)
        for sample in group.samples:
            of_correct = 1 / k if sample.correct else 0.0
            advantages.append(n * (of_correct - 1 / n) if k > 0 else 0.0)
    return advantages


def test_advantages_of_papers() -> None:
    """Their equations spelled out. Of GDPO one reward is the same for a whole group."""
    rewards = [[(0.1, 1.0), (0.3, 1.0), (0.2, 1.0)], [(0.0, 30.0), (1.0, 10.0), (0.5, 70.0)]]
    groups = [
        replace(group, samples=tuple(
            replace(sample, parts={"brief": brief, "manners": manners})
            for sample, (brief, manners) in zip(group.samples, row, strict=True)
        ))
        for group, row in zip([make_group("RRW"), make_group("WWR")], rewards, strict=True)
    ]  # fmt: skip
    sequences = make_sequences(groups, AdvantageConfig(kind="paper_advantages:gdpo"))
    expected = longhand_gdpo(groups, {"brief": 1.0, "manners": 0.5})
    assert [float(one.advantages[-1]) for one in sequences] == pytest.approx([x for row in expected for x in row])
    groups = [make_group(pattern) for pattern in ("RRW", "WWR", "WWW", "RRR", "WWWWWWWR", "WRCTW")]
    sequences = make_sequences(groups, AdvantageConfig(kind="paper_advantages:max_rl"))
    assert [float(one.advantages[-1]) for one in sequences] == pytest.approx(longhand_max_rl(groups))


def test_parts() -> None:
    config = config_of("reward: parts")
    assert config.filter_on == "reward"
    group = score(config, "7", "7, please", "no")
    assert [dict(sample.parts) for sample in group.samples] == [
        {"exact": 1.0, "brief": 1.0, "manners": -1.0},
        {"exact": -1.0, "brief": 0.0, "manners": 1.0},
        {"exact": -1.0, "brief": 1.0, "manners": -1.0},
    ]
    assert [sample.base_reward for sample in group.samples] == pytest.approx([1.4, -0.9, -0.6])
    assert [sample.correct for sample in group.samples] == [True, False, False]


def test_a_function_of_trl() -> None:
    raw = json.loads(config_of("reward: calls").model_dump_json())
    raw["reward"] |= {"kind": "my_rewards:number"}
    assert [sample.base_reward for sample in score(parse_config(raw), "a 1", "b").samples] == [1.0, 0.0]


def test_calls() -> None:
    config = config_of("reward: calls")
    assert (config.reward.calls.concurrency, config.reward.plugin_deadline) == (128, 30)
    assert [sample.base_reward for sample in score(config, "7", "b").samples] == [1.0, 0.0]
