"""Read data sets as problems.

Rows come from a .jsonl, .json, .csv or .parquet file, from a Hugging Face data set in a folder, or from one of the hub.
The recipe names their columns (`data.columns`), or they follow one of two schemas:

    DAPO    `prompt` [{role, content}], `reward_model` {ground_truth}, `data_source`
    GSM8K   `question`, `answer` ending in `#### n`
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from dapo_runner.config import ColumnsConfig, ConfigError

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a data set. ``context`` holds the messages before the question (a system prompt, say)."""

    question: str
    answer: str
    source: str
    context: tuple[tuple[str, str], ...] = ()  # (role, content)
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> str:
        """What makes two rows the same problem: their text, apart from white space."""
        text = "\0".join([*(f"{role}:{content}" for role, content in self.context), self.question])
        return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


def read_problems(
    path: Path,
    format: str = "auto",
    *,
    columns: ColumnsConfig | None = None,
    subset: str | None = None,
    split: str = "train",
    system: str | None = None,
) -> Iterator[Problem]:
    """Yield the rows of a data set, in order. Raises ConfigError with the data set, the row and what was expected.

    Args:
        columns: What the columns are, with format auto.
        system: A system message for prompts that have none.
    """
    for number, row in enumerate(read_rows(path, subset, split), start=1):
        if format == "auto":
            format = "columns" if columns is not None else _detect_format(path, row)
        try:
            problem = _FORMATS[format](row) if columns is None or format != "columns" else _from_columns(row, columns)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            expected = _EXPECTED.get(format) or f"data.columns to fit ({type(error).__name__}: {error})"
            raise ConfigError(f"{path}, row {number}: expected {expected}, got {shorten(row)}") from error
        if system is not None and "system" not in dict(problem.context):
            problem = replace(problem, context=(("system", system), *problem.context))
        yield problem


def missing_data(path: Path) -> str | None:
    """Return why nothing can be read from ``path``, as far as this machine can tell; None where it can."""
    if path.suffix in _READERS:
        return None if path.is_file() else f"expected a file, found nothing at {path}"
    if path.is_dir() or (_HUB_NAME.fullmatch(str(path)) and not path.is_file()):
        return None
    return f"expected a file ({', '.join(FILES)}), a folder or the name of a data set on the hub, got {path}"


def read_rows(path: Path, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file or of a Hugging Face data set. Raises ConfigError."""
    if path.is_file() and path.suffix in _READERS:
        yield from _READERS[path.suffix](path)
    elif (problem := missing_data(path)) is not None:
        raise ConfigError(f"data.path: {problem}")
    else:
        yield from _load_dataset(path, subset, split)


def _load_dataset(path: Path, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of what ``save_to_disk`` wrote, of a folder of data files, or of a data set of the hub."""
    import datasets  # takes a second

    try:
        if (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            if split not in splits:
                raise ValueError(f"it has the splits {', '.join(map(repr, splits))}")
            rows = splits[split]
        elif (path / "dataset_info.json").is_file():
            rows = datasets.load_from_disk(str(path))
        else:
            rows = datasets.load_dataset(str(path), subset, split=split)
    except Exception as error:  # whatever a data set, the hub or the network does
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"data: expected a Hugging Face data set (a folder, or a name on the hub) with the subset {subset!r} and "
            f"the split {split!r} at {path}: {reason}"
        ) from error
    yield from rows


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list, or one of each line."""
    with path.open(encoding="utf-8") as lines:
        is_list = path.suffix == ".json" and lines.read(1000).lstrip().startswith("[")
        lines.seek(0)
        if is_list:
            rows: Iterable[tuple[str, Any]] = [
                (f"{path}, row {i}", row) for i, row in enumerate(_parse_json(path, lines.read()), start=1)
            ]
        else:
            rows = _parse_lines(path, lines)
        for where, row in rows:
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: expected a JSON object, got {shorten(row)}")
            yield row


def _parse_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parse_json(where, line)


def _parse_json(where: object, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yield texts by the columns that the first line names."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(f"expected {len(rows.fieldnames or ())} values, as the first line names")
                yield row
        except csv.Error as error:
            raise ConfigError(f"{path}, line {rows.line_num}: not valid CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet  # comes with datasets; slow to import

    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
        yield from batch.to_pylist()


_READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
FILES = tuple(_READERS)


def _detect_format(path: Path, row: Mapping[str, Any]) -> str:
    if {"prompt", "reward_model"} <= row.keys():
        return "dapo"
    if {"question", "answer"} <= row.keys():
        return "gsm8k"
    raise ConfigError(
        f"{path}: expected the columns 'prompt' and 'reward_model' (DAPO) or 'question' and 'answer' "
        f"(GSM8K), got {', '.join(row)}; data.columns names others"
    )


def _from_dapo(row: Mapping[str, Any]) -> Problem:
    *context, question = [(message["role"], message["content"]) for message in row["prompt"]]
    if question[0] != "user":
        raise ValueError("the last message must be the user's")
    answer = row["reward_model"]["ground_truth"]
    if answer is None or not str(answer).strip():
        raise ValueError("empty ground truth")
    return Problem(question[1].strip(), str(answer).strip(), str(row.get("data_source") or ""), tuple(context), row)


def _from_gsm8k(row: Mapping[str, Any]) -> Problem:
    _, mark, answer = row["answer"].rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("no '#### n'")
    return Problem(row["question"].strip(), answer.strip().replace(",", ""), "gsm8k", row=row)


_FORMATS = {"dapo": _from_dapo, "gsm8k": _from_gsm8k}
_EXPECTED = {
    "dapo": "prompt [{role, content}] and reward_model {ground_truth}",
    "gsm8k": "question and an answer ending in '#### n'",
}


def _from_columns(row: Mapping[str, Any], columns: ColumnsConfig) -> Problem:
    """Return a row as a problem. Raises ValueError for a column that is missing or holds something else."""
    *context, (role, question) = as_messages(get_column(row, columns.prompt))
    if role != "user":
        raise ValueError("the last message must be the user's")
    choices = None if columns.choices is None else _choices(get_column(row, columns.choices), columns.choices)
    if choices is not None:
        question = "\n".join([question.strip(), *(f"{letter}. {text}" for letter, text, _ in choices)])
    answer = ""
    if columns.answer is not None:
        given = get_column(row, columns.answer)
        given = given if choices is None else _letter(choices, given)
        answer = given if isinstance(given, str) else "" if given is None else json.dumps(given, ensure_ascii=False)
        if not answer.strip():
            raise ValueError("no answer")
    return Problem(question.strip(), answer.strip(), str(row.get(columns.source) or ""), tuple(context), row)


def get_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column. Raises ValueError."""
    if name not in row:
        raise ValueError(f"no column {name!r}; columns are {', '.join(row)}")
    return row[name]


def as_messages(prompt: Any) -> list[tuple[str, str]]:
    if isinstance(prompt, str):
        return [("user", prompt)]
    try:
        messages = [(message["role"], message["content"]) for message in prompt]
    except (TypeError, KeyError):
        messages = []
    if not messages or not all(isinstance(part, str) for message in messages for part in message):
        raise ValueError("expected a text or a list of messages {role, content} as prompt")
    return messages


def _choices(column: Any, name: str) -> list[tuple[str, str, Any]]:
    """Return letter, text and label of each. A label is the data set's own ({text, label}, as in ARC), or the index."""
    texts, labels = (column["text"], column["label"]) if isinstance(column, Mapping) else (column, None)
    if not isinstance(texts, list):
        raise ValueError(f"expected a list of texts in data.columns.choices={name}, got {shorten(texts, 40)}")
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise ValueError(f"expected 2 to {len(ascii_uppercase)} choices, found {len(texts)}")
    return list(zip(ascii_uppercase[: len(texts)], texts, range(len(texts)) if labels is None else labels, strict=True))


def _letter(choices: list[tuple[str, str, Any]], answer: Any) -> str:
    """Return the letter of the choice that ``answer`` names by label, letter or text, in this order."""
    for named in (lambda choice: choice[2], lambda choice: choice[0], lambda choice: choice[1]):
        for choice in choices:
            if named(choice) == answer:
                return choice[0]
    raise ValueError(f"the answer {answer!r} is none of the choices")


def shorten(value: Any, width: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
