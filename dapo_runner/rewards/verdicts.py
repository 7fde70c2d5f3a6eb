"""The verdicts of a judge, kept in the run's folder: a data set, and what a resumed run need not ask again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dapo_runner.errors import ConfigError
from dapo_runner.files import append_jsonl, drop_incomplete_line, read_jsonl

VERDICTS = "verdicts"


class Question(NamedTuple):
    """What the judge is shown."""

    problem: str
    reference: str
    response: str

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).digest()


class Judgement(NamedTuple):
    """``verdict`` is the word of the two that the judge answered; None where it answered neither."""

    verdict: str | None
    confidence: float


class VerdictLog:
    """Verdicts by question: in memory, and after ``open`` in a file of JSON lines."""

    def __init__(self) -> None:
        self._known: dict[bytes, Judgement] = {}
        self._path: Path | None = None

    def open(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Keep verdicts in ``folder``, and read those there of this rank and of ranks that are gone.

        Raises:
            ConfigError: A line cannot be read.
        """
        self._path = folder / (f"{VERDICTS}_rank_{rank}.jsonl" if rank else f"{VERDICTS}.jsonl")
        self._known = {}
        for path in sorted(folder.glob(f"{VERDICTS}*.jsonl")):
            number = path.stem.removeprefix(f"{VERDICTS}_rank_")
            if path == self._path or (number.isdecimal() and int(number) >= ranks):
                self._read(path)
        if self._path.is_file():
            drop_incomplete_line(self._path)

    def close(self) -> None:
        self._known, self._path = {}, None

    def __contains__(self, question: Question) -> bool:
        return question.key in self._known

    def __getitem__(self, question: Question) -> Judgement:
        return self._known[question.key]

    def add(self, found: Mapping[Question, Judgement]) -> None:
        if self._path is not None and found:
            append_jsonl(self._path, [{**question._asdict(), **found[question]._asdict()} for question in found])
        self._known |= {question.key: judgement for question, judgement in found.items()}

    def _read(self, path: Path) -> None:
        for number, row in enumerate(read_jsonl(path), start=1):
            try:
                question = Question(row["problem"], row["reference"], row["response"])
                self._known[question.key] = Judgement(row["verdict"], row["confidence"])
            except KeyError as error:
                raise ConfigError(f"{path}:{number}: expected {error}. Remove the line to ask again.") from error


def remove_verdicts(folder: Path) -> None:
    """Remove the verdicts of an earlier attempt."""
    for path in folder.glob(f"{VERDICTS}*.jsonl"):
        path.unlink()
