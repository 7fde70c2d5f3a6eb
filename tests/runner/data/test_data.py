"""Data: both schemas in both file types, what is dropped and counted, the cursor, the arithmetic split."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import CharTokenizer, make_config, make_prompt, write_rows
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from dapo_runner.config import ArithmeticConfig, Config, ConfigError
from dapo_runner.data.arithmetic import ArithmeticProblem, split_problems
from dapo_runner.data.dataset import (
    CONFLICTING,
    DUPLICATES,
    IN_HELDOUT,
    RECIPE_OPENING,
    PromptCursor,
    apply_template,
    load_data,
)
from dapo_runner.data.reading import read_problems


def dapo_row(question: str, answer: Any, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    truth = {"ground_truth": answer, "style": "rule"}
    return {"data_source": "made-up", "prompt": messages, "reward_model": truth, "extra_info": {"index": 0}}


def gsm8k_row(question: str, answer: str) -> dict[str, str]:
    return {"question": question, "answer": f"Some steps <<1+1=2>>.\n#### {answer}"}


def data_config(path: Path, max_prompt_tokens: int = 64, **values: Any) -> Config:
    data = {"format": "auto", "path": path, "eval_size": 0, "template": "plain", **values}
    rollout = {"group_size": 4, "max_prompt_tokens": max_prompt_tokens, "max_response_tokens": 64}
    return make_config(data=data, rollout=rollout)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_dapo_schema(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"d{suffix}", [dapo_row(" What? ", "34"), dapo_row("How?", "-1")])
    dataset = load_data(data_config(path), CharTokenizer())
    assert [(p.text, p.answer, p.source) for p in dataset.train] == [
        ("What?", "34", "made-up"),
        ("How?", "-1", "made-up"),
    ]
    assert dataset.train[1].token_ids == (0, *map(ord, "How?"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_gsm8k_schema(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"g{suffix}", [gsm8k_row("How many?", "1,234"), gsm8k_row("And?", "-5")])
    dataset = load_data(data_config(path), CharTokenizer())
    assert [(p.text, p.answer) for p in dataset.train] == [("How many?", "1234"), ("And?", "-5")]


def test_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [dapo_row("a b", "1"), dapo_row("a  b\n", "1"), dapo_row("c", "2"), dapo_row("a b", 1)]
    dataset = load_data(data_config(write_rows(tmp_path / "d.jsonl", rows)), CharTokenizer())
    assert [p.text for p in dataset.train] == ["a b", "c"]
    assert (dataset.report["rows"], dataset.report[DUPLICATES]) == (4, 2)


@pytest.mark.parametrize("order", ["each at a time", "over and over"])
def test_a_limit_counts_problems_not_rows(tmp_path: Path, order: str) -> None:
    """The hub's copy of DAPO-Math-17k repeats every row some hundred times."""
    names = [f"q{i}" for i in range(30)]
    repeated = [name for name in names for _ in range(100)] if order == "each at a time" else names * 100
    path = write_rows(tmp_path / "d.jsonl", [dapo_row(name, "1") for name in repeated])
    dataset = load_data(data_config(path, limit=10), CharTokenizer())
    assert [p.text for p in dataset.train] == names[:10]
    report = dataset.report
    assert report["rows"] == report[DUPLICATES] + report["train"]  # what was read, which is not the whole file
    assert len(load_data(data_config(path, limit=31), CharTokenizer()).train) == 30


def test_a_problem_that_conflicts_does_not_count_within_the_limit(tmp_path: Path) -> None:
    rows = [dapo_row("a", "1"), dapo_row("a", "2"), *(dapo_row(name, "1") for name in "bbccdd")]
    config = data_config(write_rows(tmp_path / "d.jsonl", rows), limit=2)
    assert [p.text for p in load_data(config, CharTokenizer()).train] == ["b", "c"]


def test_conflicting_answers(tmp_path: Path) -> None:
    rows = [dapo_row("a", "1"), dapo_row("a", "2"), dapo_row("c", "2"), dapo_row("a", "1")]
    dataset = load_data(data_config(write_rows(tmp_path / "d.jsonl", rows)), CharTokenizer())
    assert [(p.text, p.answer) for p in dataset.train] == [("c", "2")]
    assert dataset.report[CONFLICTING] == 3
    assert f"3 {CONFLICTING}" in dataset.report.describe()


def test_long_prompts_are_counted(tmp_path: Path) -> None:
    rows = [dapo_row("x" * 19, "1"), dapo_row("y" * 20, "1")]  # one token more for the beginning
    path = write_rows(tmp_path / "d.jsonl", rows)
    dataset = load_data(data_config(path, max_prompt_tokens=20), CharTokenizer())
    assert [p.text for p in dataset.train] == ["x" * 19]
    assert dataset.report["longer than rollout.max_prompt_tokens"] == 1


def test_evaluation_file_never_trains(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "t.jsonl", [dapo_row(name, "1") for name in "abcd"])
    heldout = write_rows(tmp_path / "e.parquet", [gsm8k_row(name, "1") for name in "dcxyz"])
    dataset = load_data(data_config(train, eval={"own": {"path": heldout, "limit": 3}}), CharTokenizer())
    assert [p.text for p in dataset.heldout] == ["d", "c", "x"]
    assert [p.text for p in dataset.train] == ["a", "b"]
    report = dataset.report
    assert (report["rows"], report[IN_HELDOUT]) == (7, 2)
    assert report.total() == 2 * report["rows"]


def test_a_row_that_renders_to_a_heldout_prompt_is_not_trained_on(tmp_path: Path) -> None:
    """The training file carries the recipe's instruction already, the evaluation file gets it from the template."""
    wrapped = [dapo_row(apply_template("dapo", f"{i} + {i}?"), str(2 * i)) for i in range(8)]
    train = write_rows(tmp_path / "t.jsonl", wrapped)
    heldout = write_rows(tmp_path / "e.jsonl", [gsm8k_row(f"{i}  + {i}?", str(2 * i)) for i in range(5)])
    data = {"format": "auto", "path": train, "eval": {"own": {"path": heldout}}, "template": "dapo"}
    config = make_config(data=data, rollout={"max_prompt_tokens": 1000}, optimizer={"token_budget": 2048})
    dataset = load_data(config, CharTokenizer())
    assert [p.answer for p in dataset.heldout] == ["0", "2", "4", "6", "8"]
    assert [p.answer for p in dataset.train] == ["10", "12", "14"]
    assert (dataset.report[IN_HELDOUT], dataset.report["rows"]) == (5, 13)


def test_heldout_is_cut_from_the_training_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [dapo_row(f"q{i}", str(i)) for i in range(50)])
    one = load_data(data_config(path, eval_size=10), CharTokenizer())
    assert len(one.heldout) == 10
    assert len(one.train) == 40
    assert not {p.id for p in one.heldout} & {p.id for p in one.train}
    two = load_data(data_config(path, eval_size=10), CharTokenizer())
    assert two.heldout == one.heldout
    with refused("data.eval_size"):
        load_data(data_config(path, eval_size=50), CharTokenizer())


def test_chat_template_is_used_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [dapo_row("Why?", "1", system="Be brief.")])
    chat = load_data(data_config(path), CharTokenizer("yes")).train[0]
    assert chat.text == "<system>Be brief.<user>Why?<assistant>"
    assert chat.token_ids == tuple(map(ord, chat.text))  # no second beginning-of-sequence token
    never = load_data(data_config(path, chat_template="never"), CharTokenizer("yes")).train[0]
    assert never.text == "Be brief.\n\nWhy?"
    with pytest.raises(ConfigError, match="chat template"):
        load_data(data_config(path, chat_template="always"), CharTokenizer())


def test_templates() -> None:
    wrapped = apply_template("dapo", r"Find \frac{a}{b}.")
    assert wrapped.startswith(RECIPE_OPENING)
    assert r"Find \frac{a}{b}." in wrapped
    assert apply_template("dapo", wrapped) == wrapped
    assert apply_template("plain", "q") == "q"
    assert apply_template("{question}={x}", "1+1") == "1+1={x}"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("d.jsonl", "{oops", ["d.jsonl, line 1"]),
        ("d.jsonl", "[1]", ["line 1", "expected a JSON object"]),
        ("d.jsonl", '{"text": 1}', ["row 1", "data.columns", "got {'text'"]),
        ("d.jsonl", '{"question": "a", "answer": "12"}', ["row 1", "#### n"]),
        ("d.jsonl", '{"prompt": "a", "reward_model": {}}', ["row 1", "ground_truth"]),
        ("d.jsonl", json.dumps(dapo_row("a", "")), ["row 1", "ground_truth"]),
        ("d.csv", "a,b\n1,2", ["d.csv", "row 1"]),
        ("d.jsonl", "", ["data.path"]),
        ("missing.jsonl", None, ["nothing at"]),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, name: str, content: str | None, parts: list[str]) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_data(data_config(tmp_path / name), CharTokenizer())
    for part in parts:
        assert part in str(caught.value)


def test_a_bad_row_is_named_by_its_number(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [gsm8k_row("a", "1"), {"question": "b", "answer": None}])
    with pytest.raises(ConfigError, match="row 2"):
        list(read_problems(path))


def test_cursor_walks_whole_epochs_in_new_orders() -> None:
    prompts = [make_prompt(f"p{i}") for i in range(7)]
    cursor = PromptCursor(prompts, seed=1)
    ids = [prompt.id for prompt in cursor.take(4) + cursor.take(5) + cursor.take(5)]
    assert sorted(ids[:7]) == sorted(ids[7:]) == [f"p{i}" for i in range(7)]
    assert ids[:7] != ids[7:]
    assert [p.id for p in PromptCursor(prompts, seed=1).take(14)] == ids
    assert [p.id for p in PromptCursor(prompts, seed=2).take(14)] != ids
    assert len(cursor.take(100)) == 100


@given(before=st.integers(0, 40), after=st.integers(1, 40))
def test_cursor_resumes_where_it_was(before: int, after: int) -> None:
    prompts = [make_prompt(f"p{i}") for i in range(9)]
    cursor = PromptCursor(prompts, seed=3)
    cursor.take(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    expected = cursor.take(after)
    resumed = PromptCursor(prompts, seed=3)
    resumed.load_state_dict(state)
    assert resumed.take(after) == expected


def test_cursor_refuses_other_data() -> None:
    state = PromptCursor([make_prompt("a")], seed=0).state_dict()
    with pytest.raises(ValueError, match="data"):
        PromptCursor([make_prompt("b")], seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed"):
        PromptCursor([make_prompt("a")], seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("operator", "operands", "question", "answer"),
    [("+", (17, 5), "17+5", "22"), ("-", (3, 5, 1), "3-5-1", "-3"), ("*", (2, 3, 4), "2*3*4", "24")],
)
def test_arithmetic_answers(operator: str, operands: tuple[int, ...], question: str, answer: str) -> None:
    problem = ArithmeticProblem(operator, operands)
    assert (problem.question, problem.answer) == (question, answer)


@pytest.mark.parametrize("operators", [["+"], ["+", "-", "*"]])
def test_arithmetic_split_cannot_overlap(operators: list[str]) -> None:
    config = ArithmeticConfig.model_validate({"operators": operators, "train_size": 3000})
    train, heldout = split_problems(config, 500)
    assert (len(train), len(heldout)) == (3000, 500)
    assert len({p.question for p in train + heldout}) == 3500
    assert not {p.key for p in heldout} & {p.key for p in train}
    assert {p.operator for p in heldout} == set(operators)
    assert split_problems(config, 500) == (train, heldout)


def test_arithmetic_knows_its_limits() -> None:
    config = ArithmeticConfig(max_digits=1, train_size=90)
    with pytest.raises(ConfigError, match="digits"):
        split_problems(config, 10)
    low = ArithmeticConfig(min_digits=2, max_digits=2, train_size=200)
    assert min(min(p.operands) for p in split_problems(low, 10)[0]) >= 10
    wide = ArithmeticConfig(operands=2, max_digits=9, train_size=20)
    assert len(split_problems(wide, 10)[0]) == 20


def test_even_digits_are_even() -> None:
    config = ArithmeticConfig(operands=3, max_digits=3, even_digits=True, train_size=3000)
    train, heldout = split_problems(config, 100)
    lengths = Counter(len(str(operand)) for problem in train for operand in problem.operands)
    assert all(0.3 < lengths[n] / lengths.total() < 0.36 for n in (1, 2, 3))  # 3 in 1000 have one digit otherwise
    assert len(set(train)) == 3000
    assert not {problem.key for problem in train} & {problem.key for problem in heldout}
    with refused("data.arithmetic"):
        split_problems(ArithmeticConfig(max_digits=1, even_digits=True, train_size=101), 256)


def test_arithmetic_becomes_prompts() -> None:
    config = make_config(data={"template": "{question}=", "arithmetic": {"train_size": 20}, "eval_size": 5})
    dataset = load_data(config, CharTokenizer())
    assert (len(dataset.train), len(dataset.heldout)) == (20, 5)
    first = dataset.train[0]
    left, right = first.text.removesuffix("=").split("+")
    assert int(left) + int(right) == int(first.answer)
