"""Problems of reasoning-gym and their scores."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import CharTokenizer, make_completion, make_config, make_prompt
from refusals import refused
from small import Dapo, events_of, write_recipe

from dapo_runner.config import Config
from dapo_runner.data.dataset import DUPLICATES, IN_HELDOUT, Dataset, load_data
from dapo_runner.data.reasoning_gym import _generate
from dapo_runner.rewards.rule_worker import refuse_programs
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
    scorer = Scorer(config_of(SUMS, reward={"workers": 1, "timeout": 60.0, **reward}), shaped=False)
    (group,) = scorer([prompt], [[make_completion(text=text) for text in texts]])
    return group.samples


def test_problems_are_the_same_in_every_process_by_weight_and_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        own = {"config": {**SUMS.get("config", {}), "seed": None}}  # the default, not a seed at random
        found.append(load({**SUMS, **own, "weight": 3}, SETS, limit=60, eval_size=20))
    one, two = found
    assert (one.train, one.heldout) == (two.train, two.heldout)
    assert {prompt.text for prompt in one.train}.isdisjoint(prompt.text for prompt in one.heldout)
    tasks = [[json.loads(prompt.row["task"]) for prompt in prompts] for prompts in (one.train, one.heldout)]
    train, heldout = ([task["index"] for task in part if task["name"] == "chain_sum"] for part in tasks)
    assert max(heldout) < 15 <= min(train) < max(train) < 60
    assert sum(task["name"] == SETS["name"] for part in tasks for task in part) == 20
    report = one.report
    assert report["rows"] == 80 == sum(report.values()) - report["rows"]
    assert min(report[IN_HELDOUT], report[DUPLICATES]) > 0
    assert (report["train"], report["heldout"]) == (len(one.train), len(one.heldout))


def test_problems_are_generated_without_torch() -> None:
    """Whose import takes longer than the problems."""
    text = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", text, "dapo_runner.data.reasoning_gym"]
    made = subprocess.run(command, input="[]", capture_output=True, text=True, check=True)
    assert json.loads(made.stdout) == []


def prompt_of(name: str) -> Prompt:
    task = {"name": name, "config": {"seed": 0, "size": 1}, "index": 0}
    entry = reasoning_gym.create_dataset(task["name"], **task["config"])[0]
    return replace(make_prompt(answer=entry["answer"]), row={"task": json.dumps(task)})


def test_scores_are_those_of_reasoning_gym() -> None:
    prompt = prompt_of("countdown")
    task = json.loads(prompt.row["task"])
    data = reasoning_gym.create_dataset(task["name"], **task["config"])
    answers = [prompt.answer, "1", "no", f"({prompt.answer})"]
    expected = [data.score_answer(answer, data[task["index"]]) for answer in answers]
    assert (expected[0], expected[3]) == (1.0, 1.0)
    tags = ("<answer>0</answer> or <answer> {} </answer>", "in <answer> tags: <answer>{}</answer>")
    for form in (*tags, "So\nAnswer: {}", "**Answer:** ${}$\r\n", "Answer: **`{}`**", "{}"):
        samples = score(prompt, *map(form.format, answers), correct=1.0, incorrect=-1.0)
        assert [sample.base_reward for sample in samples] == pytest.approx([2 * value - 1 for value in expected])
        assert [sample.correct for sample in samples] == [True, False, False, True]


def test_numbers_that_countdown_does_not_count_do_not_score() -> None:
    prompt = prompt_of("countdown")
    data = reasoning_gym.create_dataset("countdown", seed=0, size=1)
    numbers, target = (data[0]["metadata"][name] for name in ("numbers", "target"))
    used = f"({'+'.join(map(str, numbers))})"
    ones = ["+".join([one] * target) for one in ("True", "x/x")]
    forged = [f"{hex(target)}+{used}*0x0", f"{used}*0e0+{target}e0", f"{used}*False+{ones[0]}"]
    forged.append(f"{used}*(x-x)+{ones[1]}")
    assert [data.score_answer(answer, data[0]) for answer in forged] == [1.0] * len(forged)
    assert not any(sample.correct for sample in score(prompt, *forged))


def test_an_answer_that_is_a_program_does_no_harm(tmp_path: Path) -> None:
    prompt = prompt_of("simple_integration")
    made, say = tmp_path / "made", "exec('import os\\nos.write(0, b\"1.0\")\\nos._exit(0)')"
    programs = [
        f"open({str(made)!r}, 'w').write('')",
        f"__import__('os').system('touch {made}')",
        say,
        f"(lambda: {say})()",
        f"[{say} for x in [1]]",
        'S(\'exec("import os\\\\nos.write(0, b\\\\"1.0\\\\")\\\\nos._exit(0)")\')',
        "Symbol.__init__.__globals__['sys'].modules['os'].write(0, b'1.0')",
        "exec('import os\\nfor n in range(64):\\n try: os.write(n, b\"{}\\\\n\")\\n except OSError: pass')",
        "exec('import reasoning_gym.algebra as a; a.SimpleIntegrationDataset.score_answer = lambda *_: 1.0')",
    ]
    *hostile, honest, wrong = score(prompt, *programs, prompt.answer, "1")
    assert not made.exists()
    assert not any(sample.correct for sample in (*hostile, wrong))
    assert honest.correct
    (slow,) = score(prompt, "9**9**9**9", timeout=0.5)
    assert slow.verdict.rule == "timeout"


def test_a_program_is_told_from_a_value() -> None:
    """Python 3.12 compiles a comprehension in place, with stores."""
    for text in ("[c for c in (4, 6)]", "(c := 4)", "(lambda: 4)()", "[0 for x.exp in [5]]", "open(4)"):
        with pytest.raises(ValueError, match="program"):
            refuse_programs("exec", (compile(text, "<string>", "eval"),))
    for text in ("[4, 6]", "{'x': (1, -2.5)}", "x**2 + 3"):
        refuse_programs("exec", (compile(text, "<string>", "eval"),))


def test_a_wrong_task_is_refused_and_the_reward_is_that_of_the_tasks() -> None:
    with refused("data.reasoning_gym.1.config", parts=["min_numbers"]):
        load(SUMS, {"name": "countdown", "config": {"min_numbers": 1}}, limit=4, eval_size=1)
    with pytest.raises(SystemExit, match=r"data\.reasoning_gym\.0\.name: .*chain_su"):
        _generate(0, "chain_su", {"size": 1})
    for name in ("coin_flip", "complex_arithmetic", "game_of_life_halting", "number_sorting", "puzzle24"):
        with refused("data.reasoning_gym.1.name", parts=[name]):
            config_of(SUMS, {"name": name})
    assert config_of(SUMS).reward.kind == "reasoning_gym"
    assert config_of(SUMS, reward={"kind": "integer"}).reward.kind == "integer"


def test_a_run(tmp_path: Path, model_folder: Path, dapo: Dapo) -> None:
    data = "data={reasoning_gym: [{name: chain_sum, config: {max_terms: 2, max_digits: 1}}], limit: 8, eval_size: 2}"
    model = f"model={{path: {model_folder}, dtype: float32}}"
    sizes = ["rollout.max_prompt_tokens=240", "optimizer.token_budget=512", "reward.workers=1"]
    small = ["sampler.filter_groups=null", "run.eval_every=0"]
    dapo("train", write_recipe(tmp_path, steps=1), model, data, *sizes, *small)
    run = tmp_path / "runs" / "small"
    assert [event["step"] for event in events_of(run)] == [1]
    assert "eval/avg@2" in events_of(run, "eval")[-1]
