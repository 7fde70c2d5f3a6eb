"""Any data set: columns of the recipe's choice, Hugging Face folders and names, several evaluation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from builders import CharTokenizer, make_config, write_rows
from refusals import refused

from dapo_runner.config import ColumnsConfig, Config, ConfigError
from dapo_runner.data.dataset import DUPLICATES, IN_HELDOUT, load_data
from dapo_runner.data.reading import Problem, missing_data, read_problems
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rewards.scoring import unmatchable_answers

ROWS = [{"q": f"Why {i}?", "a": str(i), "level": i} for i in range(4)]


def config_of(path: Path | str | None, **data: Any) -> Config:
    return make_config(data={"format": "auto", "path": path, "eval_size": 0, "columns": {"prompt": "q"}, **data})


def columns(**names: str) -> ColumnsConfig:
    return ColumnsConfig.model_validate({"prompt": "q", **names})


def read(folder: Path, row: dict[str, Any], **names: str) -> Problem:
    (problem,) = read_problems(write_rows(folder / "d.jsonl", [row]), columns=columns(**names))
    return problem


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_are_named_in_the_recipe(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"d{suffix}", ROWS)
    config = config_of(path, columns={"prompt": "q", "answer": "a", "source": "level"})
    assert config.data.prompt_template == "plain"  # the instruction of the recipe is for mathematics
    prompts = load_data(config, CharTokenizer()).train
    assert [(p.text, p.answer, p.source, p.row) for p in prompts[1:3]] == [
        ("Why 1?", "1", "1", ROWS[1]), ("Why 2?", "2", "2", ROWS[2])
    ]  # fmt: skip


def test_no_answer_is_needed_where_the_reward_wants_none(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    with refused("data.columns.answer"):
        config_of(path)
    own = make_config(data={"format": "auto", "path": path, "columns": {"prompt": "q"}}, reward={"kind": "a:f"})
    assert own.data.columns is not None
    assert [problem.answer for problem in read_problems(path, columns=own.data.columns)] == [""] * 4


@pytest.mark.parametrize(
    ("prompt", "context", "question"),
    [
        (" Hi ", (("system", "S"),), "Hi"),
        ([{"role": "user", "content": "Hi"}], (("system", "S"),), "Hi"),
        ([{"role": "system", "content": "own"}, {"role": "user", "content": "Hi"}], (("system", "own"),), "Hi"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
            (("system", "S"), ("user", "a"), ("assistant", "b")),
            "c",
        ),
    ],
)
def test_a_prompt_is_a_text_or_messages(tmp_path: Path, prompt: Any, context: Any, question: str) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"q": prompt}])
    (problem,) = read_problems(path, columns=columns(), system="S")
    assert (problem.context, problem.question) == (context, question)


@pytest.mark.parametrize(
    ("choices", "answer", "letter"),
    [
        (["x", "y", "z"], 1, "B"),
        (["x", "y", "z"], "B", "B"),
        (["x", "y", "z"], "y", "B"),
        ({"text": ["x", "y"], "label": ["1", "2"]}, "2", "B"),
        ({"text": ["x", "y"], "label": ["A", "B"]}, "B", "B"),
    ],
)
def test_choices_get_letters(tmp_path: Path, choices: Any, answer: Any, letter: str) -> None:
    problem = read(tmp_path, {"q": "Which?", "o": choices, "a": answer}, answer="a", choices="o")
    assert problem.answer == letter
    assert problem.question.startswith("Which?\nA. x\nB. y")
    assert read(tmp_path, {"q": "Which?", "o": choices}, choices="o").answer == ""


def test_a_choice_is_of_letters(tmp_path: Path) -> None:
    path, named = (
        write_rows(tmp_path / "d.jsonl", [{"q": "Which?", "o": ["x", "y"], "a": 1}]),
        {"prompt": "q", "answer": "a"},
    )

    def load(**columns: str) -> list[str]:
        data = {"format": "auto", "path": path, "eval_size": 0, "columns": columns}
        config = make_config(data=data, reward={"kind": "choice"})
        prompts = load_data(config, CharTokenizer()).train
        unmatchable_answers(config.reward, prompts)
        return [prompt.answer for prompt in prompts]

    with refused("reward.kind"):
        load(**named)
    assert load(**named, choices="o") == ["B"]
    write_rows(path, [{"q": "Which?", "a": "(B) y"}])
    assert load(**named) == ["(B) y"]


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5"), (0.5, "0.5"), ([1, "a"], '[1, "a"]'), ({"k": "é"}, '{"k": "é"}'), (True, "true")]
)
def test_an_answer_that_is_no_text_is_written_as_json(tmp_path: Path, value: Any, text: str) -> None:
    assert read(tmp_path, {"q": "?", "a": value}, answer="a").answer == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"a": "1", "b": 2}, "'q'"),
        ({"q": "?"}, "'a'"),
        ({"q": "?", "a": None}, "answer"),
        ({"q": "?", "a": " "}, "answer"),
        ({"q": 3, "a": "1"}, "prompt"),
        ({"q": [], "a": "1"}, "prompt"),
        ({"q": [{"role": "user", "content": [{"type": "image"}]}], "a": "1"}, "prompt"),
        ({"q": [{"role": "assistant", "content": "x"}], "a": "1"}, "user"),
        ({"q": "?", "a": "W", "o": ["x", "y"]}, "'W'"),
        ({"q": "?", "a": "A", "o": ["x"]}, "data.columns.choices=o"),
        ({"q": "?", "a": "A", "o": "x, y"}, "data.columns.choices=o"),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    choices = {"choices": "o"} if "o" in row else {}
    with pytest.raises(ConfigError, match=r"d\.jsonl, row 1: .*data\.columns") as caught:
        read(tmp_path, row, answer="a", **choices)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.json", ' [{"q": "Why?", "a": "1, 2"},\n {"q": "Wö\\n?", "a": "3"}]'),
        ("d.json", '{"q": "Why?", "a": "1, 2"}\n{"q": "Wö\\n?", "a": "3"}\n'),
        ("d.csv", '\ufeffq,a\r\nWhy?,"1, 2"\r\n"Wö\n?",3\r\n'),
    ],
)
def test_json_and_csv_are_read(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="")
    assert missing_data(path) is None
    prompts = load_data(config_of(path, columns={"prompt": "q", "answer": "a"}), CharTokenizer()).train
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("Why?", "1, 2"), ("Wö\n?", "3")]


@pytest.mark.parametrize(
    ("name", "content"),
    [("d.json", "[{"), ("d.json", "[1]"), ("d.csv", "q,a\n1,2,3\n"), ("d.csv", "q,a\n1\n"), ("d.csv", 'q,a\n"1,2\n')],
)
def test_broken_json_and_csv_name_the_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        load_data(config_of(tmp_path / name, columns={"prompt": "q", "answer": "a"}), CharTokenizer())


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
    config = config_of(folder, split="test", columns={"prompt": "q", "answer": "a"})
    assert missing_data(folder) is None
    assert [prompt.row for prompt in load_data(config, CharTokenizer()).train] == ROWS
    if how != "saved":
        with pytest.raises(ConfigError, match="'dev'"):
            load_data(config_of(folder, split="dev", columns={"prompt": "q", "answer": "a"}), CharTokenizer())


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*arguments: object, **keywords: object) -> Any:
        asked.append((arguments, keywords))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = config_of("openai/gsm8k", subset="main", split="test", columns={"prompt": "q", "answer": "a"})
    assert missing_data(Path("openai/gsm8k")) is None
    assert len(load_data(config, CharTokenizer()).train) == 4
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="openai/gsm8k"):
        load_data(config, CharTokenizer())
    with refused("data.path"):
        check_needs(config_of("no/such/folder", columns={"prompt": "q", "answer": "a"}))


def test_several_evaluation_sets(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    other = write_rows(tmp_path / "o.jsonl", [{"question": name, "answer": "#### 1"} for name in "xyz"])
    same = write_rows(tmp_path / "s.jsonl", [ROWS[1], ROWS[1], {"q": "new", "a": "n"}])
    sets = {"gsm": {"path": other, "format": "gsm8k", "limit": 2}, "own": {"path": same}}
    config = config_of(path, columns={"prompt": "q", "answer": "a"}, eval=sets)
    dataset = load_data(config, CharTokenizer())
    assert [(prompt.eval_set, prompt.text) for prompt in dataset.heldout] == [
        ("gsm", "x"), ("gsm", "y"), ("own", "Why 1?"), ("own", "new")
    ]  # fmt: skip
    assert [prompt.text for prompt in dataset.train] == ["Why 0?", "Why 2?", "Why 3?"]
    report = dataset.report
    assert [report[what] for what in ("rows", DUPLICATES, IN_HELDOUT)] == [9, 1, 1]
    with refused("data.eval.own.path"):
        check_needs(config_of(path, columns={"prompt": "q", "answer": "a"}, eval={"own": {"path": "nowhere.jsonl"}}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eval": {"a/b": {"path": "x.jsonl"}}}, r"data\.eval\.a/b"),
        ({"eval": {"a": {"pth": "x.jsonl"}}}, r"data\.eval\.a\.pth: .*'path'"),
        ({"format": "dapo"}, r"data\.columns: .*data\.format=auto"),
        ({"format": "arithmetic"}, r"data\.path: .*data\.format"),
        ({"columns": {"answer": "a"}}, r"data\.columns\.prompt: "),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**{"path": "d.jsonl", "columns": {"prompt": "q", "answer": "a"}, **data})
