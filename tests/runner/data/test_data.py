"""Data sets: which rows become which prompts, what is left out and counted, and the order of the prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from builders import CharTokenizer, make_config, make_prompt, write_rows
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from refusals import refused
from talkers import CHATML, chat_tokenizer
from tokenizers.processors import TemplateProcessing

from dapo_runner.config import ArithmeticConfig, ColumnsConfig, Config, ConfigError, EnvironmentConfig
from dapo_runner.data import dataset
from dapo_runner.data.arithmetic import split_problems
from dapo_runner.data.dataset import (
    CONFLICTING,
    DUPLICATES,
    IN_HELDOUT,
    LONG,
    RECIPE_OPENING,
    DataReport,
    Dataset,
    PromptCursor,
    apply_template,
    clean,
    load_data,
    tokenize,
)
from dapo_runner.data.reading import Problem, missing_data, read_problems
from dapo_runner.environments.environment import Message
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rewards.scoring import unmatchable_answers
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.run.start import note_unstopped_end
from dapo_runner.tiny_model import make_tokenizer

ROWS = [{"q": f"Why {i}?", "a": str(i), "level": i} for i in range(4)]
COLUMNS = {"prompt": "q", "answer": "a"}
SYSTEM, TALK, LETTERED = ["system: S"], ["system: S", "user: a", "assistant: b"], "?\nA. x\nB. y"


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages, each `role: content`."""
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


def said(*texts: str) -> list[dict[str, str]]:
    """Messages in the form of ShareGPT."""
    return [{"from": one["role"], "value": one["content"]} for one in turns(*texts)]


def dapo_row(question: str, answer: Any, *before: str) -> dict[str, Any]:
    truth = {"ground_truth": answer, "style": "rule"}
    return {"data_source": "made-up", "prompt": turns(*before, f"user: {question}"), "reward_model": truth}


def gsm8k_row(question: str, answer: str) -> dict[str, str]:
    return {"question": question, "answer": f"Some steps <<1+1=2>>.\n#### {answer}"}


def config_of(path: Path | str, rows: list[dict[str, Any]] | None = None, most: int = 64, **data: Any) -> Config:
    """The configuration for a file, whose rows are written, with a limit of tokens in a prompt."""
    if rows is not None:
        write_rows(path, rows)
    data = {"format": "auto", "path": path, "eval_size": 0, **data}
    return make_config(optimizer={"token_budget": 4096}, data=data, rollout={"max_prompt_tokens": most})


def load(path: Path | str, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Dataset:
    return load_data(config_of(path, rows, **settings), CharTokenizer())


# Rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_schema_is_detected_or_its_columns_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"d{suffix}"
    dapo = load(path, [dapo_row(" What? ", "34"), dapo_row("How?", "-1")], template="plain").train
    assert [(p.text, p.answer, p.source) for p in dapo] == [(" What? ", "34", "made-up"), ("How?", "-1", "made-up")]
    assert dapo[1].token_ids == (0, *map(ord, "How?"))
    gsm8k = load(path, [gsm8k_row("How many?", "1,234"), gsm8k_row("And?", "-5")], template="plain").train
    assert [(p.text, p.answer) for p in gsm8k] == [("How many?", "1234"), ("And?", "-5")]
    own = load(path, ROWS, columns={**COLUMNS, "source": "level"}).train  # the recipe's instruction is for mathematics
    assert [(p.text, p.answer, p.source, p.row) for p in own[1:2]] == [("Why 1?", "1", "1", ROWS[1])]
    unjudged = make_config(data={"format": "auto", "path": path, "columns": {"prompt": "q"}}, reward={"kind": "a:f"})
    assert [problem.answer for problem in read_problems(path, columns=unjudged.data.columns)] == [""] * 4


@pytest.mark.parametrize(
    ("row", "context", "question", "answer"),
    [
        ({"q": " Hi ", "a": 5}, SYSTEM, " Hi ", "5"),
        ({"q": turns("user: Hi"), "a": 0.5}, SYSTEM, "Hi", "0.5"),
        ({"q": "Hi", "a": 6.0}, SYSTEM, "Hi", "6"),  # pandas makes floats of a column with a missing value
        ({"q": "Hi", "a": [7.0]}, SYSTEM, "Hi", "7"),
        ({"q": turns("system: own", "user: Hi"), "a": {"k": "é"}}, ["system: own"], "Hi", '{"k": "é"}'),
        ({"q": turns("user: a", "assistant: b", "user: c"), "a": [1, "a"]}, TALK, "c", '[1, "a"]'),
        ({"q": "?", "o": ["x", "y"], "a": 1}, SYSTEM, LETTERED, "B"),
        ({"q": "?", "o": ["x", "y"], "a": "B"}, SYSTEM, LETTERED, "B"),
        ({"q": "?", "o": ["x", "y"], "a": "y"}, SYSTEM, LETTERED, "B"),
        ({"q": "?", "o": {"text": ["x", "y"], "label": ["1", "2"]}, "a": "2"}, SYSTEM, LETTERED, "B"),
        ({"q": "?", "o": {"1": "x", "2": "y", "3": None}, "a": "2"}, SYSTEM, LETTERED, "B"),  # a column of Parquet
        ({"q": "?", "o": ["x", "y"]}, SYSTEM, LETTERED, ""),
        ({"q": turns("system: ", "user: Hi"), "a": 5}, SYSTEM, "Hi", "5"),
        ({"q": said("system: own", "human: Hi"), "a": 5}, ["system: own"], "Hi", "5"),
        ({"q": said("user: a", "gpt: b", "user: c"), "a": 5}, TALK, "c", "5"),
        ({"q": said("human: a", "assistant: b", "human: c"), "a": 5}, TALK, "c", "5"),
        ({"q": "?", "a": '["2"]'}, SYSTEM, "?", '["2"]'),  # as it is: a run of before resumes
    ],
)
def test_a_row_becomes_a_problem(
    tmp_path: Path, row: dict[str, Any], context: list[str], question: str, answer: str
) -> None:
    columns = ColumnsConfig(prompt="q", answer="a" if "a" in row else None, choices="o" if "o" in row else None)
    (problem,) = read_problems(write_rows(tmp_path / "d.jsonl", [row]), columns=columns, system="S")
    assert [f"{role}: {text}" for role, text in problem.context] == context
    assert (problem.question, problem.answer) == (question, answer)


def test_columns_may_be_fields_of_columns(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"q.text": "Hi", "q": {"text": "no"}, "a": {"b": {"c": 5}}}])
    (problem,) = read_problems(path, columns=ColumnsConfig(prompt="q.text", answer="a.b.c"))
    assert (problem.question, problem.answer) == ("Hi", "5")
    text = write_rows(tmp_path / "t.jsonl", [{"q": '{"a": {"b": 5}}', "p": "{'a': 5}"}])
    (problem,) = read_problems(text, columns=ColumnsConfig(prompt="q", answer="q.a.b"))
    assert (problem.question, problem.answer) == ('{"a": {"b": 5}}', "5")
    with refused("data.columns", parts=["no column 'p.a'"]):
        list(read_problems(text, columns=ColumnsConfig(prompt="p.a")))
    for name in ("a.b.x", "a.", "a.b.c.d", "b.c"):
        with refused("data.columns", parts=["no column"]):
            list(read_problems(path, columns=ColumnsConfig(prompt=name)))


def test_a_ground_truth_of_a_choice_is_a_letter(tmp_path: Path) -> None:
    def answers(row: dict[str, Any], **columns: str) -> list[str]:
        prompts = load(tmp_path / "d.jsonl", [row], columns={**COLUMNS, **columns}).train
        unmatchable_answers(make_config(reward={"kind": "choice"}), prompts)
        return [prompt.answer for prompt in prompts]

    row = {"q": "Which?", "o": ["x", "y"], "a": 1}
    with refused("reward.kind"):
        answers(row)
    assert answers(row, choices="o") == ["B"]  # by number, in a prompt with letters
    assert answers({"q": "Which?", "a": "(B) y"}) == ["(B) y"]


BAD_ROWS: list[tuple[dict[str, Any], str]] = [  # row, what the message has
    ({"a": "1", "b": 2}, "'q' a, b"),
    ({"q": "?"}, "'a' q"),
    ({"q": "?", "a": "1", "s": "no source"}, "'source' q, a, s"),
    ({"q": "?", "a": None}, "leave"),
    ({"q": "?", "a": "", "o": ["x", "y"]}, "leave"),
    ({"q": "?", "a": " "}, "answer"),
    ({"q": "?", "a": float("nan")}, "ValueError: nan"),
    ({"q": "\ud800", "a": "1"}, "surrogates {'q'"),
    *(
        ({"q": [{**turns("assistant: ")[0], key: "x"}, *turns("user: ?")], "a": "1"}, f"{key} {{'q'")
        for key in ("tool_calls", "reasoning", "reasoning_content", "thinking")
    ),
    ({"q": 3, "a": "1"}, "prompt"),
    ({"q": [], "a": "1"}, "prompt"),
    ({"q": [{"role": "user", "content": [{"type": "image"}]}], "a": "1"}, "prompt"),
    ({"q": turns("assistant: x"), "a": "1"}, "user"),
    ({"q": "?", "a": "W", "o": ["x", "y"]}, "'W'"),
    ({"q": "?", "a": "A", "o": ["x"]}, "data.columns.choices=o"),
    ({"q": "?", "a": "A", "o": "x, y"}, "data.columns.choices=o"),
    ({"q": "?", "a": "A", "o": [{"key": "A", "value": "x"}, {"key": "B", "value": "y"}]}, "data.columns.choices=o"),
    ({"q": said("human: y", "function_call: x", "human: z"), "a": "1"}, "human, gpt"),
    ({"text": 1}, "{'text'"),
    ({"question": "a", "answer": "12"}, "####"),
    (dapo_row("a", ""), "ground_truth"),
    (dapo_row("a", "1", "system: \ud800"), "surrogates"),
    ({"q": "?", "a": "\ud800"}, "surrogates"),
]


@pytest.mark.parametrize(("row", "parts"), BAD_ROWS, ids=str)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: dict[str, Any], parts: str) -> None:
    columns = COLUMNS | ({"choices": "o"} if "o" in row else {}) if row.keys() <= {"q", "a", "o", "b", "s"} else None
    columns = columns and columns | ({"source": "source"} if "s" in row else {})
    good = {"q": "!", "a": "1", "o": ["1", "2"], "source": "x"} if columns else gsm8k_row("a", "1")
    with refused("data.columns", parts=["d.jsonl", "row 2", *parts.split(" ", 1)]):
        load(tmp_path / "d.jsonl", [good, row], columns=columns)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.json", ' [{"q": "Why?", "a": "1, 2"},\n {"q": "Wö\\n?", "a": "3"}]'),
        ("d.json", '{"q": "Why?", "a": "1, 2"}\n{"q": "Wö\\n?", "a": "3"}\n'),
        ("d.csv", 'q,a\r\nWhy?,"1, 2"\r\n"Wö\n?",3\r\n'),
        ("d.csv", 'q,a,,\nWhy?,"1, 2",,\n"Wö\n?",3,,\n'),  # empty columns of a spreadsheet
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_and_csv_are_read(tmp_path: Path, name: str, content: str, mark: str) -> None:
    (tmp_path / name).write_text(mark + content, encoding="utf-8", newline="")
    prompts = load(tmp_path / name, columns=COLUMNS).train
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("Why?", "1, 2"), ("Wö\n?", "3")]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("d.jsonl", "{oops", "line 1"),
        ("d.jsonl", '{"q": "Why?", "a": "1"}\n{"q": "Why?"\n', "line 2, column 1: .* error: Expecting"),
        ("d.json", '[{"q": "Why?", "a": "1"},\n\n{"q"}]', "line 3, column 5: .* error: Expecting"),
        ("d.json", "[1]", "d.json"),
        ("d.csv", "q,a\n1,2,3\n", "line 2.*2 values"),
        ("d.csv", "q,a\n1\n", "line 2"),
        ("d.csv", 'q,a\n"1"x,2\n', "line 2"),
        ("d.csv", 'q,a\n"1,2\n', "d.csv"),
        ("d.csv", "q,a,a\n1,2,3\n", "line 1.*q, a, a"),
        ("d.csv", b"q,a\ncaf\xe9,2\n", "d.csv"),
        ("d.parquet", "PAR1", "d.parquet"),
        ("d.jsonl", "", "data.path"),
        ("d.jsonl", "[" * 99999, "d.jsonl"),
        ("missing.jsonl", None, "missing.jsonl"),
        ("d.txt", "q", "d.txt"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: Any, place: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=place) as caught:
        load(tmp_path / name, columns=COLUMNS)
    assert name in str(caught.value) or content == ""


@pytest.mark.parametrize("how", ["saved", "saved splits", "files"])
def test_hugging_face_folders(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder, rows = tmp_path / "set", datasets.Dataset.from_list(ROWS)
    if how == "saved":
        rows.save_to_disk(str(folder))
    elif how == "saved splits":
        datasets.DatasetDict({"train": rows.select([3]), "test": rows}).save_to_disk(str(folder))
    else:
        folder.mkdir()
        write_rows(folder / "test.jsonl", ROWS)
    assert missing_data(folder) is None
    assert [prompt.row for prompt in load(folder, split="test", columns=COLUMNS).train] == ROWS
    if how != "saved":
        with pytest.raises(ConfigError, match="'dev'"):
            load(folder, split="dev", columns=COLUMNS)


def test_a_column_of_mixed_types_keeps_its_values(tmp_path: Path) -> None:
    """datasets 5 stores it as JSON."""
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.jsonl", [{"q": "Why?", "a": 3}, {"q": "Where?", "a": "Paris"}])
    assert [prompt.answer for prompt in load(tmp_path / "set", columns=COLUMNS).train] == ["3", "Paris"]


def test_what_nobody_reads_is_not_decoded(tmp_path: Path) -> None:
    """Such as an image that is none."""
    rows = [{"q": "Why?", "a": "3", "image": {"bytes": b"none", "path": None}}]
    features = datasets.Features(q=datasets.Value("string"), a=datasets.Value("string"), image=datasets.Image())
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "set"))
    assert [prompt.answer for prompt in load(tmp_path / "set", columns=COLUMNS).train] == ["3"]


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*arguments: object, **keywords: object) -> Any:
        asked.append((arguments, keywords))
        if arguments[0] == "no/such":
            raise ConnectionError("offline")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert missing_data(Path("openai/gsm8k")) is None
    assert len(load("openai/gsm8k", subset="main", split="test", columns=COLUMNS).train) == 4
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    with pytest.raises(ConfigError, match="no/such"):
        load("no/such", columns=COLUMNS)
    with refused("data.path"):
        check_needs(config_of("no/such/folder", columns=COLUMNS))


# What is left out


Rows = list[tuple[str, int]]


@given(st.lists(st.tuples(st.sampled_from(["a b", "a  b\n", "c", "d", "e"]), st.integers(1, 2))), st.integers(1, 4))
def test_repeated_and_conflicting_rows_are_left_out_and_counted(rows: Rows, limit: int) -> None:
    """A limit counts problems, not rows: the hub's copy of DAPO-Math-17k repeats every row some hundred times."""
    for most in (None, limit):
        answers: dict[str, list[int]] = {}
        for question, answer in rows:
            key = " ".join(question.split())
            if key not in answers and sum(len(set(given)) == 1 for given in answers.values()) == most:
                break  # what was read, not the whole file
            answers.setdefault(key, []).append(answer)
        kept = [key for key, given in answers.items() if len(set(given)) == 1]
        lost = sum(len(given) for key, given in answers.items() if key not in kept)
        found = clean((Problem(question, str(answer), "") for question, answer in rows), report := DataReport(), most)
        assert [" ".join(problem.question.split()) for problem in found] == kept
        n_read = sum(map(len, answers.values()))
        assert (report["rows"], report[CONFLICTING], report[DUPLICATES]) == (n_read, lost, n_read - lost - len(kept))


class Game:
    def reset(self, row: dict[str, Any]) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 0.0, True


def test_rows_of_games_are_repeated_only_if_every_column_is(tmp_path: Path) -> None:
    """The games of a data set often have one prompt and differ in their seed."""
    path = write_rows(tmp_path / "g.jsonl", [{"q": "Guess.", "seed": seed} for seed in (1, 2, 3, 3, 4)])
    one = write_rows(tmp_path / "one.jsonl", [{"q": "Guess.", "seed": 2}])
    data = {"format": "auto", "path": path, "columns": {"prompt": "q"}, "eval": {"one": {"path": one}}}
    config = make_config(data=data, reward={"kind": "a:f"})
    game = config.model_copy(update={"env": EnvironmentConfig(kind=f"{__name__}:Game")})
    found = load_data(game, CharTokenizer())
    assert [prompt.row["seed"] for prompt in found.train] == [1, 3, 4]
    assert (found.report[DUPLICATES], found.report[IN_HELDOUT]) == (1, 1)
    assert len({prompt.id for prompt in found.train}) == 3
    with refused("data.path", parts=[f"4 {DUPLICATES}"]):
        load_data(config, CharTokenizer())


def test_long_prompts_are_left_out_and_every_row_is_counted(tmp_path: Path) -> None:
    rows = [dapo_row("a", "1"), dapo_row("a", 1), dapo_row("d", "1"), dapo_row("d", "2"), dapo_row("e", "2")]
    rows += [dapo_row("x" * 19, "1"), dapo_row("y" * 20, "1")]  # one token more for the beginning
    dataset = load(tmp_path / "d.jsonl", rows, most=20, template="plain")
    report = dataset.report
    assert [prompt.text for prompt in dataset.train] == ["a", "e", "x" * 19]
    assert (report["rows"], report[LONG]) == (7, 1)
    assert report.total() == 2 * report["rows"]
    dropped = report.describe().partition("; dropped ")[2].split(", ")
    assert set(dropped) == {f"1 {DUPLICATES}", f"2 {CONFLICTING}", f"1 {LONG}"}


def test_heldout_problems_never_train(tmp_path: Path) -> None:
    """Here both files have some, and the training file carries the recipe's instruction already."""
    wrapped = [dapo_row(apply_template("dapo", f"{i} + {i}?"), str(2 * i)) for i in range(8)]
    one = write_rows(tmp_path / "e.jsonl", [gsm8k_row(f"{i}  + {i}?", str(2 * i)) for i in range(5)])
    two = write_rows(tmp_path / "o.parquet", [{"q": f"{i} + {i}?", "a": f"{2 * i}"} for i in (5, 5, 9, 11)])
    sets = {"gsm": {"path": one, "limit": 4}, "own": {"path": two, "columns": COLUMNS}}
    dataset = load(tmp_path / "t.jsonl", wrapped, most=1000, eval=sets, template="dapo")
    heldout = [(prompt.eval_set, prompt.answer) for prompt in dataset.heldout]
    assert heldout == [*(("gsm", str(2 * i)) for i in range(4)), ("own", "10"), ("own", "18"), ("own", "22")]
    assert [prompt.answer for prompt in dataset.train] == ["8", "12", "14"]
    report = dataset.report
    assert (report["rows"], report[IN_HELDOUT], report[DUPLICATES]) == (16, 5, 1)
    with refused("data.path", parts=["data.eval", f"5 {IN_HELDOUT}"]):
        load(one, most=1000, eval={"same": {"path": one}})
    for rows, got in (([], "0 held-out"), ([gsm8k_row("?" * 1001, "1")], f"1 {LONG} in data.eval.few")):
        with refused("data.eval.few", parts=[got]):
            load(one, most=1000, eval={"few": {"path": write_rows(tmp_path / "few.jsonl", rows)}})
    mixed = write_rows(tmp_path / "mixed.jsonl", [gsm8k_row("?", "1"), gsm8k_row("?" * 1001, "1")])
    assert load(one, most=1000, eval={"m": {"path": mixed}}).report[f"{LONG} in data.eval.m"] == 1
    with refused("data.eval.own.path"):
        check_needs(config_of(tmp_path / "t.jsonl", eval={"own": {"path": "nowhere.jsonl"}}))


def test_heldout_problems_are_cut_from_the_training_file(tmp_path: Path) -> None:
    rows = [dapo_row(f"q{i}", str(i)) for i in range(50)]
    one, two = (load(tmp_path / "t.jsonl", rows, eval_size=10, limit=40, template="plain") for _ in range(2))
    assert len({p.id for p in (*one.train, *one.heldout)}) == len(one.train) + 10 == 40
    assert two.heldout == one.heldout
    with refused("data.eval_size", parts=["50"]) as caught:
        load(tmp_path / "t.jsonl", rows, eval_size=50)
    assert set(re.findall(r"data\.\w+", str(caught.value))) == {"data.eval_size", "data.eval"}  # keys of `dapo train`


def test_templates(tmp_path: Path) -> None:
    rows = [dapo_row("Why?", "1", "system: Be brief.")]

    def prompt(tokenizer: Any, **data: Any) -> Any:
        return load_data(config_of(tmp_path / "d.jsonl", rows, template="plain", **data), tokenizer).train[0]

    chat = prompt(CharTokenizer("yes"))
    assert chat.text == "<system>Be brief.<user>Why?<assistant>"
    assert chat.token_ids == tuple(map(ord, chat.text))  # no second beginning-of-sequence token
    assert prompt(CharTokenizer("yes"), chat_template="never").text == "Be brief.\n\nWhy?"
    with refused("data.chat_template"):
        prompt(CharTokenizer(), chat_template="always")
    with refused("data.chat_template", parts=["no system"]):
        prompt(StrictTokenizer("yes"))
    for unfit in ({"a": "{{ 1 + 'a' }}"}, "{{ 1 + 'a' }}"):  # several templates, none of them `default`
        tokenizer = make_tokenizer()
        tokenizer.chat_template = unfit
        with refused("data.chat_template"):
            prompt(tokenizer)
    wrapped = apply_template("dapo", r"Find \frac{a}{b}.")
    assert wrapped.startswith(RECIPE_OPENING)
    assert r"Find \frac{a}{b}." in wrapped
    assert apply_template("dapo", wrapped) == wrapped
    assert apply_template("dapo", f"\n{wrapped}") == f"\n{wrapped}"
    assert apply_template("{question}={x}", " 1+1\n") == "1+1={x}"
    assert apply_template("plain", "  if x:\n    y: ") == "  if x:\n    y: "


def test_a_chat_template_has_arguments_of_its_own(tmp_path: Path) -> None:
    thoughts = "{% if enable_thinking is false %}no thoughts{% endif %}"  # also before the turns so far
    before = f"{{% if m['role'] == 'assistant' %}}{thoughts}{{% endif %}}"
    said = CHATML.replace("{{ m['content']", before + "{{ m['content']")
    tokenizer = chat_tokenizer(said.removesuffix("{% endif %}") + thoughts + "{% endif %}")
    data = {"chat_template_kwargs": {"enable_thinking": False}}
    config = config_of(tmp_path / "d.jsonl", [dapo_row("1", "1")], template="plain", **data)
    (prompt,) = load_data(config, tokenizer).train
    opening = "<|im_end|>\n<|im_start|>assistant\nno thoughts"
    assert prompt.text == f"<|im_start|>user\n1{opening}"
    config = config.model_copy(update={"env": EnvironmentConfig(kind="talkers:Talker")})
    (prompt,) = load_data(config, tokenizer).train
    template = EpisodeRunner(config, tokenizer).template
    opened = tokenizer.decode(template.open_episode(prompt.messages, "+"))
    assert prompt.text + opened == f"<|im_start|>user\n1+{opening}"
    assert tokenizer.decode(template.reply([Message("user", "2")], 0)).endswith(f"user\n2{opening}")


@pytest.mark.parametrize(("added", "begin"), [("$A <eos>", ""), ("<pad> $A <eos>", "<pad>"), ("<pad> $A", "<pad>")])
def test_a_prompt_does_not_end_the_text(added: str, begin: str, tmp_path: Path) -> None:
    """Some tokenizers are saved so that they append the token."""
    tokenizer = make_tokenizer()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<pad>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(added, special_tokens=special)
    (prompt,) = load_data(config_of(tmp_path / "d.jsonl", [dapo_row("3+3=", "6")], template="plain"), tokenizer).train
    assert tokenizer.decode(prompt.token_ids) == f"{begin}3+3="


def test_an_end_of_the_text_in_a_row_stays(tmp_path: Path) -> None:
    rows = [dapo_row("3+3=<eos>", "6")]
    (prompt,) = load_data(config_of(tmp_path / "d.jsonl", rows, template="plain"), make_tokenizer()).train
    assert make_tokenizer().decode(prompt.token_ids) == "3+3=<eos>"


class StrictTokenizer(CharTokenizer):
    """Its template refuses, and an empty text has no tokens."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        raise TemplateError("no system")

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return super().__call__(text, add_special_tokens=False)


def test_a_prompt_without_tokens_is_left_out(tmp_path: Path) -> None:
    config = config_of(tmp_path / "d.jsonl", [dapo_row("", "1"), dapo_row("a", "2")], template="plain")
    dataset = load_data(config, StrictTokenizer())
    assert [prompt.text for prompt in dataset.train] == ["a"]
    assert dataset.report["without tokens"] == 1
    assert len(load_data(config, None).train) == 2  # unknown without a tokenizer
    game = config.model_copy(update={"env": EnvironmentConfig(kind=f"{__name__}:Game")})
    assert len(load_data(game, StrictTokenizer()).train) == 2  # it adds what its reset says


def test_a_tokenizer_that_does_not_know_the_data_is_noted(tmp_path: Path) -> None:
    """Such as that of a tiny model. Unknown letters here and there do no harm."""
    for question, is_known in (("sort: nut apple", False), ("1 + 2 + 3 = w?", True)):
        path = write_rows(tmp_path / "rows.jsonl", [{"q": question, "a": "7"}])
        config = config_of(path, columns=COLUMNS)
        assert ("into <unk>" in load_data(config, make_tokenizer()).report.describe()) != is_known


def test_long_data_is_tokenized_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same, and equal ids are one object."""
    sizes = list[int]()

    class Counting(CharTokenizer):
        def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
            sizes.append(len(text))
            return super().__call__(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(dataset, "BLOCK", 2)
    texts = ["等等", "a", "", "等", "b"]
    found = tokenize([[("user", text)] for text in texts], Counting(), make_config().data)
    assert found == [(text, (0, *map(ord, text))) for text in texts]
    assert sizes[1:] == [2, 2, 1]  # after the question whether it appends its EOS token
    assert len({id(token) for _, ids in found for token in ids if token == ord("等")}) == 1
    assert tokenize([], Counting(), make_config().data) == []


# The order of prompts


@given(before=st.integers(0, 40), after=st.integers(1, 40), n=st.integers(1, 9), seed=st.integers(0, 3))
def test_a_cursor_walks_whole_epochs_and_resumes_where_it_was(before: int, after: int, n: int, seed: int) -> None:
    prompts = [make_prompt(f"p{i}") for i in range(n)]
    cursor, other = PromptCursor(prompts, seed), PromptCursor(prompts, seed)
    taken = cursor.take(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    taken += cursor.take(after)
    for start in range(0, before + after - n + 1, n):
        assert sorted(prompt.id for prompt in taken[start : start + n]) == sorted(prompt.id for prompt in prompts)
    other.load_state_dict(state)
    assert other.take(after) == taken[before:]


def test_every_epoch_and_every_seed_has_another_order_and_other_data_are_refused() -> None:
    prompts = [make_prompt(f"p{i}") for i in range(9)]
    first, second, other = (PromptCursor(prompts, seed).take(18) for seed in (1, 1, 2))
    assert first == second != other
    assert first[:9] != first[9:]
    state = PromptCursor(prompts, seed=0, heldout=[make_prompt("a")]).state_dict()
    for changed, seed, heldout in ((prompts[1:], 0, "a"), (prompts, 1, "a"), (prompts, 0, "b")):
        with pytest.raises(ConfigError, match="seed" if seed else "data"):
            PromptCursor(changed, seed, [make_prompt(heldout)]).load_state_dict(state)


# Arithmetic


@pytest.mark.parametrize(
    "settings",
    [
        {"operators": ["+"], "train_size": 3000},
        {"operators": ["+", "-", "*"], "train_size": 3000},
        {"operands": 3, "max_digits": 3, "even_digits": True, "train_size": 3000},
        {"min_digits": 2, "max_digits": 2, "train_size": 200},
        {"max_digits": 9, "train_size": 20},
    ],
)
def test_arithmetic_splits_do_not_overlap(settings: dict[str, Any]) -> None:
    config = ArithmeticConfig.model_validate(settings)
    train, heldout = split_problems(config, 100)
    assert (len(set(train)), len(set(heldout))) == (config.train_size, 100)
    assert {problem.key for problem in heldout}.isdisjoint(problem.key for problem in train)
    assert {problem.operator for problem in heldout} == set(config.operators)
    lengths = Counter(len(str(operand)) for problem in train for operand in problem.operands)
    assert set(lengths) <= set(range(config.min_digits, config.max_digits + 1))
    if config.even_digits:  # 3 in 1000 have one digit otherwise
        assert all(0.3 < n / lengths.total() < 0.36 for n in lengths.values())
    assert split_problems(config, 100) == (train, heldout)


def test_arithmetic_is_finite_and_becomes_prompts() -> None:
    for settings, heldout in (({"train_size": 90}, 10), ({"even_digits": True, "train_size": 101}, 256)):
        with refused("data.arithmetic"):
            split_problems(ArithmeticConfig(max_digits=1, **settings), heldout)
    train, _ = split_problems(ArithmeticConfig(max_digits=1, train_size=60), 10)
    assert {operand for problem in train for operand in problem.operands} == set(range(10))
    tasks = {"operators": ["+", "-", "*"], "operands": 3, "max_digits": 2, "train_size": 20}
    config = make_config(data={"template": "{question}=", "arithmetic": tasks, "eval_size": 5})
    dataset = load_data(config, CharTokenizer())
    assert (len(dataset.train), len(dataset.heldout)) == (20, 5)
    assert len({prompt.text.strip("0123456789=")[0] for prompt in dataset.train}) == 3
    assert all(eval(prompt.text.removesuffix("=")) == int(prompt.answer) for prompt in dataset.train)


@pytest.mark.parametrize(
    ("end", "stop_ids", "stop", "is_noted"),
    [
        ("<|im_end|>\n", [3], [], False),
        ("<|im_end|>\n", [0], [], True),
        ("<|im_end|>\n", [0], ["<|im_end|>"], False),
        ("<|im_start|><|im_end|>", [3], [], False),
        ("x<|im_end|>", [0], [], False),
        ("", [0], [], False),
    ],
)
def test_an_end_of_the_chat_template_that_stops_no_response_is_noted(
    end: str, stop_ids: list[int], stop: list[str], is_noted: bool
) -> None:
    template = CHATML.replace("<|im_end|>\n", end)
    notes: list[str] = []
    for settings in ({}, {"chat_template": "never"}):
        config = make_config(rollout={"stop": stop}, data=settings)
        note_unstopped_end(config, chat_tokenizer(template), stop_ids, notes.append)
    assert len(notes) == is_noted
