"""Problems of reasoning-gym and their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import CharTokenizer, make_completion, make_config
from refusals import refused

from dapo_runner.cli import main
from dapo_runner.config import Config, ConfigError
from dapo_runner.data.dataset import DUPLICATES, IN_HELDOUT, Dataset, load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.types import Prompt, Sample

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
SUMS = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
SETS = {"name": "polynomial_multiplication"}  # iterates over a set of strings


def config_of(*tasks: dict[str, Any], reward: Any = None, **data: Any) -> Config:
    rollout = {"max_prompt_tokens": 4000}
    settings = {"data": {"format": "auto", "reasoning_gym": list(tasks), **data}, "reward": reward or {}}
    return make_config(rollout=rollout, optimizer={"token_budget": 8192}, **settings)


def load(*tasks: dict[str, Any], **data: Any) -> Dataset:
    return load_data(config_of(*tasks, **data), CharTokenizer())


def score(prompt: Prompt, *texts: str, **reward: Any) -> tuple[Sample, ...]:
    scorer = Scorer(config_of(SUMS, reward=reward), shaped=False)
    (group,) = scorer([prompt], [[make_completion(text=text) for text in texts]])
    assert group is not None
    return group.samples


def test_problems_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(load(SUMS, SETS, limit=20, eval_size=6))
    assert found[0].train == found[1].train
    assert found[0].heldout == found[1].heldout


def test_heldout_problems_never_train_and_every_row_is_counted() -> None:
    dataset = load(SUMS, limit=120, eval_size=30)
    train, heldout = (
        [json.loads(prompt.row["task"])["index"] for prompt in p] for p in (dataset.train, dataset.heldout)
    )
    assert max(heldout) < 30 <= min(train)
    assert {prompt.text for prompt in dataset.train}.isdisjoint(prompt.text for prompt in dataset.heldout)
    report = dataset.report
    assert report["rows"] == 150 == sum(report.values()) - report["rows"]
    assert min(report[IN_HELDOUT], report[DUPLICATES]) > 0
    assert (report["train"], report["heldout"]) == (len(dataset.train), len(dataset.heldout))


def test_weights_are_shares() -> None:
    dataset = load({"name": "countdown", "weight": 3}, {"name": "gcd"}, limit=40, eval_size=8)
    for prompts, n in ((dataset.train, 40), (dataset.heldout, 8)):
        assert [sum(prompt.source == name for prompt in prompts) for name in ("countdown", "gcd")] == [3 * n / 4, n / 4]


def test_scores_are_those_of_reasoning_gym() -> None:
    prompt = load({"name": "countdown"}, limit=2, eval_size=1).train[0]
    task = json.loads(prompt.row["task"])
    data = reasoning_gym.create_dataset(task["name"], **task["config"])
    answers = [prompt.answer, "1", "no", f"({prompt.answer})"]
    expected = [data.score_answer(answer, data[task["index"]]) for answer in answers]
    assert (expected[0], expected[3]) == (1.0, 1.0)
    for form in ("<answer>0</answer> or <answer> {} </answer>", "So\nAnswer: {}", "{}"):
        samples = score(prompt, *map(form.format, answers), correct=1.0, incorrect=-1.0)
        assert [sample.base_reward for sample in samples] == pytest.approx([2 * value - 1 for value in expected])
        assert [sample.correct for sample in samples] == [True, False, False, True]


def test_an_answer_that_is_a_program_does_no_harm(tmp_path: Path) -> None:
    prompt = load({"name": "countdown"}, limit=2, eval_size=1).train[0]
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text("1")
    programs = [
        f"open({str(made)!r}, 'w').write('')",
        f"__import__('os').system('touch {made}')",
        "exec('import os\\nos.write(0, b\"1.0\")\\nos._exit(0)')",
        "(lambda: exec('import os\\nos.write(0, b\"1.0\")\\nos._exit(0)'))()",
        "[exec('import os\\nos.write(0, b\"1.0\")\\nos._exit(0)') for x in [1]]",
        'S(\'exec("import os\\\\nos.write(0, b\\\\"1.0\\\\")\\\\nos._exit(0)")\')',
        "Symbol.__init__.__globals__['sys'].modules['os'].write(0, b'1.0')",
        "exec('import os\\nfor n in range(64):\\n try: os.write(n, b\"{}\\\\n\")\\n except OSError: pass')",
        "exec('import reasoning_gym.games.countdown as c; c.CountdownDataset.score_answer = lambda *_: 1.0')",
    ]
    *hostile, honest, wrong = score(prompt, *programs, prompt.answer, "1", workers=1)
    assert not made.exists()
    assert not any(sample.correct for sample in (*hostile, wrong))
    assert honest.correct
    (slow, after) = score(prompt, "9**9**9**9", prompt.answer, workers=1, deadline=5.0)
    assert (slow.verdict.rule, after.correct) == ("timeout", True)


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ({"name": "countdwn"}, r"data\.reasoning_gym\.0\.name.*countdown"),
        ({"name": "countdown", "config": {"numbers": 3}}, r"data\.reasoning_gym\.0\.config.*numbers"),
        ({"name": "countdown", "config": {"min_numbers": 1}}, r"data\.reasoning_gym\.0\.config.*min_numbers"),
        ({"name": "countdown", "config": {"size": 3}}, r"data\.reasoning_gym\.0\.config"),
    ],
)
def test_a_wrong_task_is_refused(task: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load(task, limit=4, eval_size=1)


def test_the_reward_is_that_of_the_tasks() -> None:
    assert config_of(SUMS).reward.kind == "reasoning_gym"
    assert config_of(SUMS, reward={"kind": "integer"}).reward.kind == "integer"
    with refused("data.reasoning_gym"):
        make_config(reward={"kind": "reasoning_gym"})


def test_a_run_and_its_resumption(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {
        "run": {"name": "gym", "eval_every": 1},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"reasoning_gym": [SUMS, {"name": "spell_backward"}], "limit": 24, "eval_size": 4},
        "rollout": {"group_size": 2, "max_prompt_tokens": 248, "max_response_tokens": 8},
        "sampler": {"prompts_per_step": 2, "filter_groups": False},
        "reward": {"overlong": {"soft_punishment": False}, "workers": 1},
        "optimizer": {"warmup_steps": 0, "mini_batch_size": 4, "token_budget": 512},
        "evaluation": {"k": 1},
    }
    (tmp_path / "gym.yaml").write_text(yaml.safe_dump(recipe))
    for steps, seed in ((1, "1"), (2, "2")):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert main(["train", "gym.yaml", f"run.steps={steps}"]) == 0
    events = read_log(tmp_path / "runs" / "gym" / "metrics.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    evaluated = [event for event in events if event["kind"] == "eval"]
    assert "eval/spell_backward/avg@1" in evaluated[-1]
