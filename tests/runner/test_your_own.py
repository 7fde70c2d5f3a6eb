"""Runs every snippet of docs/your-own.md."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml
from builders import CharTokenizer, make_completion, make_group, make_prompt, snippets_of, write_rows
from refusals import refused
from small import Notes, steps_of

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.config import AdvantageConfig, Config, parse_config
from dapo_runner.data.dataset import load_data
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.train import train
from dapo_runner.types import Group

SNIPPETS = snippets_of("your-own")
WRONG = """

def short(groups):
    return [[0.0] for group in groups]

def long(groups):
    return [[[1.0] * (sample.completion.length + 1) for sample in group.samples] for group in groups]

def infinite(groups):
    return [[float("inf") for sample in group.samples] for group in groups]
"""
MODULES = {
    "my_rewards": "\n".join(SNIPPETS[f"reward: {name}"] for name in ("function", "trl", "async")),
    "my_advantages": SNIPPETS["advantage: function"] + WRONG,
    "paper_advantages": SNIPPETS["advantage: papers"],
}
QUESTIONS = [{"question": f"What is {i} + {i}?", "solution": 2 * i, "limit": 10} for i in range(8)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in MODULES.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(code)
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
    source, page = Path(__file__), Path(__file__).parents[2] / "docs" / "your-own.md"
    rewards = [f"reward: {name}" for name in ("function", "trl", "async")]
    assert [name for name in SNIPPETS if f'"{name}"' not in source.read_text(encoding="utf-8")] == rewards
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(SNIPPETS)


def test_columns_evaluation_sets_and_choices() -> None:
    dataset = load_data(config_of("data: columns"), CharTokenizer("yes"))
    assert (len(dataset.train), len(dataset.heldout)) == (6, 2)
    prompt = dataset.train[0]
    assert prompt.text == (
        f"<system>Answer in one sentence.<user>{prompt.row['question']}\nEnd with a line 'Answer: …'.<assistant>"
    )
    assert prompt.answer == str(prompt.row["solution"])
    dataset = load_data(config_of("data: evaluation sets"), CharTokenizer())
    assert [(prompt.eval_set, prompt.answer, prompt.source) for prompt in dataset.heldout] == [
        ("easy", "0", ""), ("easy", "1", ""), ("exam", "B", "oral"), ("exam", "B", "")
    ]  # fmt: skip
    assert dataset.heldout[2].text == "Which?\nA. this\nB. that"
    assert len(dataset.train) == 7
    (prompt,) = load_data(config_of("data: choice"), CharTokenizer()).train
    assert "?\nA. this\nB. that\n" in prompt.text


@pytest.mark.parametrize(
    ("snippet", "function"),
    [
        ("recipe", None),
        ("advantage: kind", "my_advantages:early_tokens"),
        ("advantage: papers recipe", "paper_advantages:gdpo"),
    ],
)
def test_a_whole_recipe(folder: Path, model_folder: Path, snippet: str, function: str | None) -> None:
    shutil.copytree(model_folder, folder / "models" / "mine")
    raw = yaml.safe_load(SNIPPETS["recipe"]) | yaml.safe_load(SNIPPETS[snippet])
    if function is not None:
        raw["advantage"]["kind"] = function
    assert steps_of(train(parse_config(raw), Notes()), "train/lr") == [1e-6, 1e-6]


@pytest.mark.parametrize("function", ["short", "long", "infinite", "absent"])
def test_wrong_advantages_are_refused(function: str) -> None:
    with refused("advantage.kind", parts=[function]):
        make_sequences([make_group("RRW")], AdvantageConfig(kind=f"my_advantages:{function}"))


def advantages_of(groups: list[Group], function: str) -> list[float]:
    return [float(one.advantages[-1]) for one in make_sequences(groups, AdvantageConfig(kind=function))]


def test_advantages_of_ones_own() -> None:
    group = make_group("RRW")  # rewards 1, 1, −1
    assert advantages_of([group], "my_advantages:from_median") == [0.0, 0.0, -2.0]
    first, *_ = make_sequences([group], AdvantageConfig(kind="my_advantages:early_tokens"))
    n = group.samples[0].completion.length
    assert first.advantages[-n:].tolist() == pytest.approx([0.9**t for t in range(n)])


def longhand_gdpo(groups: list[Group], weights: dict[str, float]) -> list[float]:
    sums = []
    for group in groups:
        of_group = [0.0] * len(group.samples)
        for name, weight in weights.items():
            rewards = [sample.parts[name] for sample in group.samples]
            for i, reward in enumerate(rewards):
                of_group[i] += weight * (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
        sums += of_group
    return [(value - fmean(sums)) / (stdev(sums) + 1e-6) for value in sums]


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
    rewards = {"RRW": [(0.1, 1.0), (0.3, 1.0), (0.2, 1.0)], "WWR": [(0.0, 30.0), (1.0, 10.0), (0.5, 70.0)]}
    groups = []
    for pattern, row in rewards.items():
        parts = [{"brief": brief, "manners": manners} for brief, manners in row]
        samples = zip(make_group(pattern).samples, parts, strict=True)
        groups.append(Group(make_prompt(), tuple(replace(sample, parts=part) for sample, part in samples)))
    expected = longhand_gdpo(groups, {"brief": 1.0, "manners": 0.5})
    assert advantages_of(groups, "paper_advantages:gdpo") == pytest.approx(expected)
    groups = [make_group(pattern) for pattern in ("RRW", "WWR", "WWW", "RRR", "WWWWWWWR", "WRCTW")]
    assert advantages_of(groups, "paper_advantages:max_rl") == pytest.approx(longhand_max_rl(groups))


def test_parts_of_a_reward() -> None:
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


def test_slow_rewards_and_those_of_trl() -> None:
    config = config_of("reward: calls")
    assert (config.reward.calls.concurrency, config.reward.deadline) == (128, 30)
    assert [sample.base_reward for sample in score(config, "7", "b").samples] == [1.0, 0.0]
    raw = json.loads(config.model_dump_json())
    raw["reward"]["kind"] = "my_rewards:number"
    assert [sample.base_reward for sample in score(parse_config(raw), "a 1", "b").samples] == [1.0, 0.0]
