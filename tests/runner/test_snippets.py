"""Runs every snippet of docs/your-own.md, docs/training-options.md and docs/evaluation.md that has a mark."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import CharTokenizer, make_completion, make_group, make_prompt, snippets_of, write_rows
from refusals import refused
from small import Dapo, Notes, events_of, recipe_in, steps_of, write_recipe
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.cli import main
from dapo_runner.config import AdvantageConfig, Config, flatten, load_config, parse
from dapo_runner.config.run import EarlyStopConfig
from dapo_runner.data.dataset import load_data
from dapo_runner.files import read_jsonl
from dapo_runner.logging.metrics import before_and_after
from dapo_runner.loop import train
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.types import Group

SNIPPETS = snippets_of("your-own")
OPTIONS = snippets_of("training-options") | snippets_of("watching") | snippets_of("evaluation")
MODULES = {
    "my_rewards": "\n".join(SNIPPETS[f"reward: {name}"] for name in ("function", "trl", "async")),
    "my_advantages": SNIPPETS["advantage: function"],
    "paper_advantages": SNIPPETS["advantage: papers"],
}
QUESTIONS = [{"question": f"What is {i} + {i}?", "solution": 2 * i, "limit": 10} for i in range(8)]
CODE = {"python", "python: recipe", "python: vary", "reading", "resuming", "forking", "evaluating", "comparing"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, model_folder: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the snippets name: functions, a recipe, a model and questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in MODULES.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(code)
    shutil.copytree(model_folder, tmp_path / "models" / "mine")
    write_recipe(tmp_path, start, name="mine", steps=2, keep=9, output_dir="runs").rename("mine.yaml")
    write_rows(tmp_path / "questions.jsonl", QUESTIONS)
    write_rows(tmp_path / "easy.jsonl", [QUESTIONS[0], {"question": "What is 1?", "solution": "1", "limit": 1}])
    exam = {"task": "Which?", "options": ["this", "that"], "key": 1}
    write_rows(tmp_path / "exam.parquet", [{**exam, "data_source": "oral"}, {**exam, "task": "Who?"}])
    return tmp_path


def config_of(*snippets: str) -> Config:
    raw: dict[str, Any] = {"model": {"tiny": {}}, "data": {"format": "arithmetic"}}
    for name in snippets:
        raw |= yaml.safe_load(SNIPPETS[name])
    return parse(raw, Config)


def score(config: Config, *texts: str, source: str = "", answer: str = "7") -> Group:
    prompt = replace(make_prompt(answer=answer), source=source, row={"limit": 6})
    (group,) = Scorer(config, shaped=False)([prompt], [[make_completion(text=text) for text in texts]])
    return group


def test_every_snippet_is_tested() -> None:
    rewards = [f"reward: {name}" for name in ("function", "trl", "async")]
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in SNIPPETS if f'"{name}"' not in source] == rewards
    assert OPTIONS.keys() > CODE
    for name in ("your-own", "training-options"):
        page = Path(__file__).parents[2] / "docs" / f"{name}.md"
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(snippets_of(name))


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
def test_a_whole_recipe(snippet: str, function: str | None) -> None:
    raw = yaml.safe_load(SNIPPETS["recipe"]) | yaml.safe_load(SNIPPETS[snippet])
    if function is not None:
        raw["advantage"]["kind"] = function
    assert steps_of(train(parse(raw, Config), Notes()), "train/lr") == [1e-6, 1e-6]


def advantages_of(groups: list[Group], function: str) -> list[float]:
    return [float(one.advantages[-1]) for one in make_sequences(groups, AdvantageConfig(kind=function))]


def test_advantages_of_ones_own_and_of_papers() -> None:
    """Of GDPO one reward is the same for a whole group."""
    group = make_group("RRW")  # rewards 1, 1, −1
    assert advantages_of([group], "my_advantages:from_median") == [0.0, 0.0, -2.0]
    first, *_ = make_sequences([group], AdvantageConfig(kind="my_advantages:early_tokens"))
    n = group.samples[0].completion.length
    assert first.advantages[-n:].tolist() == pytest.approx([0.9**t for t in range(n)])
    # N / K − 1 for the K correct ones of N.
    groups = [make_group(pattern) for pattern in ("RRW", "WWR", "WWW", "RRR")]
    by_hand = [0.5, 0.5, -1, -1, -1, 2, *[0] * 6]
    assert advantages_of(groups, "paper_advantages:max_rl") == pytest.approx(by_hand)
    rewards = torch.tensor(
        [[(0.1, 1.0), (0.3, 1.0), (0.2, 1.0)], [(0.0, 30.0), (1.0, 10.0), (0.5, 70.0)]], dtype=torch.float64
    )
    normalized = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    sums = normalized[..., 0] + 0.5 * normalized[..., 1]
    expected = (sums - sums.mean()) / (sums.std() + 1e-6)
    groups = []
    for rows in rewards.tolist():
        samples = zip(make_group("RRR").samples, rows, strict=True)
        parts = tuple(replace(sample, parts={"brief": a, "sandbox": b}) for sample, (a, b) in samples)
        groups.append(Group(make_prompt(), parts))
    assert advantages_of(groups, "paper_advantages:gdpo") == pytest.approx(expected.flatten().tolist())


def test_parts_of_a_reward() -> None:
    config = config_of("reward: parts")
    assert config.sampler.filter_groups == "reward"
    for source, answer, texts in (
        ("gsm8k", "7", ("#### 7", "It is #### 7", "B")),
        ("exam", "B", ("B", "Answer: B", "#### 7")),
    ):
        group = score(config, *texts, source=source, answer=answer)
        assert [dict(sample.parts) for sample in group.samples] == [
            {"correct": 1.0, "brief": 1.0}, {"correct": 1.0, "brief": 0.0}, {"correct": -1.0, "brief": 1.0}
        ]  # fmt: skip
        assert [sample.base_reward for sample in group.samples] == pytest.approx([1.5, 1.0, -0.5])
        assert [sample.correct for sample in group.samples] == [True, True, False]
        assert group.samples[0].verdict.extracted == answer
    assert not score(config, "<think>B</think>?", source="exam", answer="B").samples[0].correct  # a thought


def test_a_reward_model(folder: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded once, on data without answers; the rewards are its scores of the whole chat."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    LlamaForSequenceClassification(made).save_pretrained(folder / "models" / "reward")
    tokenizer.save_pretrained(folder / "models" / "reward")
    (folder / "my_reward_model.py").write_text(SNIPPETS["reward: model"])
    monkeypatch.delitem(sys.modules, "my_reward_model", raising=False)
    raw = recipe_in(folder, start, **yaml.safe_load(SNIPPETS["reward: model settings"]))
    raw["data"] |= {"format": "auto", "template": "{question}", "eval_size": 2, "arithmetic": {}}
    raw["rollout"] |= {"max_prompt_tokens": 16, "max_response_tokens": 8}
    raw["run"] |= {"steps": 1, "eval_every": 0}
    evaluation = before_and_after(train(parse(raw, Config)))["after (step 1)"]
    module = sys.modules["my_reward_model"]
    assert evaluation["eval/reward"] not in (-1, 0, 1)
    prompt = replace(make_prompt(), messages=(("user", "1+2="),))
    (one,) = module.score([prompt], [make_completion(text="3")], [{}])
    inputs = module.tokenizer("1+2=3", return_tensors="pt")
    assert one == pytest.approx(module.model(**inputs).logits.item(), abs=1e-6)


def test_slow_rewards_and_those_of_trl() -> None:
    config = config_of("reward: calls")
    assert [sample.base_reward for sample in score(config, "7", "b").samples] == [1.0, 0.0]
    raw = json.loads(config.model_dump_json())
    raw["reward"]["kind"] = "my_rewards:number"
    assert [sample.base_reward for sample in score(parse(raw, Config), "a 1", "b").samples] == [1.0, 0.0]


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in CODE])
def test_every_key_of_a_snippet_is_a_setting_and_has_its_value(name: str) -> None:
    written = yaml.safe_load(OPTIONS[name])
    config = parse({"model": {"tiny": {}}, "data": {"path": "x.jsonl"}} | written, Config)
    assert flatten(written).items() <= flatten(config.model_dump(mode="json")).items()


def run_code(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(OPTIONS[name], names)  # the page is the test
    return names


def run_commands(name: str, *more: str) -> list[int]:
    lines = [shlex.split(line) for line in OPTIONS[name].splitlines()]
    assert all(program == "dapo" for program, *_ in lines)
    return [main([*arguments, *more]) for _, *arguments in lines]


def test_python_and_copies_that_are_refused_as_the_command_refuses() -> None:
    assert [event["step"] for event in events_of(run_code("python")["folder"])] == [1, 2, 3]
    names = run_code("python: vary")
    assert names["longer"] == load_config("mine.yaml", ["run.steps=4"]) != names["config"]
    with pytest.raises(ValueError, match="frozen"):
        names["config"].run.steps = 4
    run = names["config"].run.model_copy(update={"eval_every": 0, "early_stop": EarlyStopConfig()})
    with refused("run.early_stop"):
        train(names["config"].model_copy(update={"run": run}), Notes())


def test_own_model(dapo: Dapo) -> None:
    write_rows(Path("questions.jsonl"), [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(300)])
    Path("own.yaml").write_text(OPTIONS["own model"])
    short = ["rollout.max_prompt_tokens=240", "rollout.max_response_tokens=8", "reward.overlong.cache_length=4"]
    assert re.search(r"data: 300\D+44\D+256\b", dapo("train", "own.yaml", *short, "--dry-run"))


def test_a_run_is_started_read_resumed_and_forked() -> None:
    assert run_code("python: recipe")["folder"] == Path("runs/mine")
    names = run_code("reading")
    assert names["rewards"].keys() == {1, 2}
    assert len(names["evaluations"]) == 2
    assert isinstance(names["worst"], str)
    assert sum(p.numel() for p in names["model"].parameters()) > 1000
    assert run_commands("resuming") == [0, 0]
    changes = {event["key"]: event["after"] for event in read_jsonl(Path("runs/mine/changes.jsonl"))}
    assert changes == {"run.steps": 4, "optimizer.lr": 5e-4}
    assert run_commands("forking") == [0]
    assert [event["step"] for event in events_of(Path("runs/warmer"))] == [3, 4]


def test_two_models_are_evaluated_and_compared(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{i % 5}+{i % 7}", "answer": f"#### {i % 5 + i % 7}"} for i in range(35)]
    write_rows(Path("test.jsonl"), rows)
    Path("exam.yaml").write_text(OPTIONS["evaluating: recipe"].replace("Qwen/Qwen2.5-1.5B-Instruct", "models/mine"))
    shutil.copytree(start, "runs/mine/checkpoints/step_000200/model")
    short = ["data.template='{question}='", "rollout.max_prompt_tokens=8", "rollout.max_response_tokens=8"]
    assert run_commands("evaluating", *short, "run.device=cpu") == [0, 0]
    base, trained = (json.loads(Path(f"{name}.json").read_text()) for name in ("base", "trained"))
    assert {"k": 8, "top_p": 0.7, "max_response_tokens": 8}.items() <= base["evaluation"].items()
    assert base["evaluation"] == trained["evaluation"]
    capsys.readouterr()
    assert sorted(run_code("comparing")["base"]) == sorted((one["set"], one["id"]) for one in trained["problems"])
    n, mean, error = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert (n, mean) == (35, pytest.approx(100 * (trained["avg@8"] - base["avg@8"]), abs=0.05))
    pairs = zip(base["problems"], trained["problems"], strict=True)
    differences = torch.tensor([(two["correct"] - one["correct"]) / 8 for one, two in pairs], dtype=torch.float64)
    assert error == pytest.approx(100 * float(differences.std()) / 35**0.5, abs=0.05)
    assert mean > 2 * error > 0  # the second one has learned
