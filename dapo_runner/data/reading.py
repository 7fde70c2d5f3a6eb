"""Read data sets as problems.

Rows come from a .jsonl, .json, .csv or .parquet file, or from a Hugging Face data set in a folder or on the hub. The
recipe names their columns (`data.columns`), or they follow one of two schemas:

    DAPO    `prompt` [{role, content}], `reward_model` {ground_truth}, `data_source`
    GSM8K   `question`, `answer` ending in `#### n`
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, TypeVar

from dapo_runner.config import ColumnsConfig, ConfigError

T = TypeVar("T")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_ROLES = {"human": "user", "gpt": "assistant"} | {one: one for one in ("user", "assistant", "system", "tool")}  # `from`


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a data set. ``context`` are the messages before the question, such as a system prompt."""

    question: str
    answer: str
    source: str
    context: tuple[tuple[str, str], ...] = ()  # (role, content)
    row: Mapping[str, Any] = field(default_factory=dict)
    is_game: bool = False  # an environment reads the row, so rows with the same text differ

    @property
    def key(self) -> str:
        """A hash that is equal for rows with the same text, apart from white space; of a game for equal rows."""
        text = "\0".join([*(f"{role}:{content}" for role, content in self.context), self.question])
        columns = json.dumps(self.row, sort_keys=True, default=_spell) if self.is_game else ""
        return hashlib.sha256(f"{' '.join(text.split())}{columns}".encode()).hexdigest()


def _spell(value: Any) -> str:
    """Return a text that is equal for equal values; the repr of an image has its address."""
    return value.tobytes().hex() if hasattr(value, "tobytes") else repr(value)


def read_problems(
    path: Path,
    format: str = "auto",
    columns: ColumnsConfig | None = None,
    subset: str | None = None,
    split: str = "train",
    system: str | None = None,
) -> Iterator[Problem]:
    """Yield the rows of a data set in order, with ``system`` if they have no system message. Raises ConfigError."""

    def convert(row: dict[str, Any]) -> Problem:
        if format == "auto" and columns is not None:
            return _from_columns(row, columns, system)
        if format == "dapo" or (format == "auto" and "reward_model" in row):
            answer = _answer_text(row["reward_model"]["ground_truth"])
            return _make_problem(row, row["prompt"], answer, row.get("data_source"), system)
        _, mark, answer = get_column(row, "answer").rpartition("####")
        if not mark:
            raise ValueError("no '#### n' in the answer")
        return _make_problem(row, get_column(row, "question"), _answer_text(answer).replace(",", ""), "gsm8k", system)

    return convert_rows(path, subset, split, convert)


def convert_rows(path: Path, subset: str | None, split: str, convert: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Yield ``convert(row)`` for each row. Raises ConfigError with the data set, the row and what was expected."""
    for n, row in enumerate(read_rows(path, subset, split), start=1):
        try:
            yield convert(row)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path}, row {n}: expected data.columns to fit ({reason}), got {row!r:.160}") from error


def missing_data(path: Path) -> str | None:
    """Return why ``path`` cannot be read, or None. A hub name is not looked up."""
    if path.suffix in _READERS:
        return None if path.is_file() else f"expected a file, found nothing at {path}"
    if path.is_dir() or (_HUB_NAME.fullmatch(str(path)) and not path.is_file()):
        return None
    return f"expected a file ({', '.join(_READERS)}), a folder or the name of a data set on the hub, got {path}"


def read_rows(path: Path, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file or of a Hugging Face data set. Raises ConfigError."""
    if (problem := missing_data(path)) is not None:
        raise ConfigError(f"{path}: {problem}")
    try:
        yield from _READERS[path.suffix](path) if path.suffix in _READERS else _load_dataset(path, subset, split)
    except ConfigError:
        raise
    except (ValueError, OSError, RecursionError) as error:  # not UTF-8, no Parquet, no permission
        text = " in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError(f"{path}: expected a readable {path.suffix} file{text}, got an error: {error}") from error


def _load_dataset(path: Path, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder written by ``save_to_disk``, of a folder of data files, or of a hub data set."""
    import datasets  # slow: takes a second

    try:
        is_saved = any((path / f"dataset_{kind}.json").is_file() for kind in ("dict", "info"))
        rows = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path), subset, split=split)
        if isinstance(rows, dict) and split not in rows:
            raise ValueError(f"it has the splits {', '.join(map(repr, rows))}")
        rows = rows[split] if isinstance(rows, dict) else rows
    except Exception as error:  # data sets, the hub and the network raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"data: expected a Hugging Face data set (a folder, or a name on the hub) with data.subset={subset!r} and "
            f"the split {split!r} (data.split, eval_split) at {path}: {reason}"
        ) from error
    for name, kind in rows.features.items():
        if isinstance(kind, datasets.Image | datasets.Audio | datasets.Video | datasets.Pdf):  # these stay undecoded
            rows = rows.cast_column(name, replace(kind, decode=False))
    yield from rows


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list, or one object per line."""
    with path.open(encoding="utf-8-sig") as file:
        is_list = path.suffix == ".json" and file.read(1000).lstrip().startswith("[")
        file.seek(0)
        for number, text in enumerate([file.read()] if is_list else file, start=1):
            if not text.strip():
                continue
            try:
                found = json.loads(text)
            except json.JSONDecodeError as error:
                where = f"{path}, line {error.lineno if is_list else number}, column {error.colno}"
                raise ConfigError(f"{where}: expected valid JSON, got an error: {error.msg}") from error
            for row in found if is_list else [found]:
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}, line {number}: expected a JSON object, got {row!r:.160}")
                yield row


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows as texts by column. The first line names the columns."""
    csv.field_size_limit(2**31 - 1)  # of a text; 131072 otherwise
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            if len(set(names := [name for name in rows.fieldnames or () if name])) < len(names):
                raise csv.Error(f"expected different names of columns, got {', '.join(names)}")
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(f"expected {len(rows.fieldnames or ())} values, as the first line names")
                yield row
        except csv.Error as error:
            place = f"{path}, line {rows.reader.line_num}"
            raise ConfigError(f"{place}: expected valid CSV, got an error: {error}") from error


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet  # comes with datasets; slow to import

    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
        yield from batch.to_pylist()


_READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _from_columns(row: Mapping[str, Any], columns: ColumnsConfig, system: str | None) -> Problem:
    prompt, shown, name = get_column(row, columns.prompt), "", columns.source
    source = row.get(name) if name == "data_source" else get_column(row, name)
    answer = None if columns.answer is None else get_column(row, columns.answer)
    if columns.choices is not None:
        choices = _choices(get_column(row, columns.choices), columns.choices)
        shown = "".join(f"\n{letter}. {text}" for letter, text, _ in choices)
        answer = None if columns.answer is None else _letter(choices, answer)
    return _make_problem(row, prompt, "" if columns.answer is None else _answer_text(answer), source, system, shown)


def _make_problem(
    row: Mapping[str, Any], prompt: Any, answer: str, source: Any, system: str | None, choices: str = ""
) -> Problem:
    *context, (role, question) = as_messages(prompt, system)
    if role != "user":
        raise ValueError("the last message must be the user's")
    "".join([*(text for _, text in context), question, choices, answer]).encode()  # refuses half of a surrogate pair
    return Problem(question.strip() + choices if choices else question, answer, str(source or ""), tuple(context), row)


def _answer_text(answer: Any) -> str:
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], str | int | float):
        (answer,) = answer
    # pandas makes floats of integers beside a missing value.
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        answer = int(answer)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, allow_nan=False)
    if answer is None or not text.strip():
        raise ValueError("the row has no answer: leave it out")
    return text.strip()


def get_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field in it: `column.field`, also in JSON text. Raises ValueError."""
    outer, _, inner = name.partition(".")
    if name not in row:
        column = row.get(outer)
        with suppress(ValueError):
            column = json.loads(column) if isinstance(column, str) and inner and column.startswith("{") else column
        if isinstance(column, Mapping):
            return get_column(column, inner)
        raise ValueError(f"no column {name!r}; columns are {', '.join(row)}")
    return row[name]


def as_messages(prompt: Any, system: str | None = None) -> list[tuple[str, str]]:
    """Return role and content of each message. Add ``system`` if there is no system message. Raises ValueError."""
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        role, content, names = ("role", "content", {}) if "role" in prompt[0] else ("from", "value", _ROLES)
        messages = [(names[message[role]] if names else message[role], message[content]) for message in prompt]
    except (TypeError, KeyError, IndexError):
        messages = []
    if not messages or not all(isinstance(part, str) for message in messages for part in message):
        raise ValueError("expected as prompt a text or messages {role, content}, or {from, value} of human, gpt, tool")
    if any(one.get(key) for one in prompt for key in ("tool_calls", "reasoning", "reasoning_content", "thinking")):
        raise ValueError("expected messages without tool_calls, reasoning, reasoning_content and thinking")
    messages = [turn for turn in messages if system is None or turn != ("system", "")]
    return messages if system is None or "system" in dict(messages) else [("system", system), *messages]


def _choices(column: Any, name: str) -> list[tuple[str, str, Any]]:
    """Return letter, text and label of each choice. Labels come from {text, label} or {label: text}, or are indices."""
    if isinstance(column, Mapping) and "text" not in column:
        column = {label: text for label, text in column.items() if text is not None}  # a column of Parquet has all
        column = {"label": list(column), "text": list(column.values())}
    texts, labels = (column["text"], column["label"]) if isinstance(column, Mapping) else (column, None)
    is_list = isinstance(texts, list) and all(isinstance(text, str | int | float) for text in texts)
    if not is_list or not 2 <= len(texts) <= len(ascii_uppercase):
        raise ValueError(f"expected a list of 2 to 26 texts in data.columns.choices={name}, got {texts!r:.40}")
    return list(zip(ascii_uppercase[: len(texts)], texts, range(len(texts)) if labels is None else labels, strict=True))


def _letter(choices: list[tuple[str, str, Any]], answer: Any) -> str:
    """Return the letter of the choice that ``answer`` names by label, letter or text, in this order."""
    found = [choice[0] for part in (2, 0, 1) for choice in choices if choice[part] == answer]
    if not found:
        raise ValueError("the row has no answer: leave it out" if answer in (None, "") else f"{answer!r} is no choice")
    return found[0]
