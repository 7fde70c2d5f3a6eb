"""What a judge has said, kept in the folder of the run: a data set of its own, and the memory of a resumed run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dapo_runner.errors import ConfigError

VERDICTS = "verdicts"  # the file of a run; of other ranks than the first with their number


class Question(NamedTuple):
    """What the judge is shown."""

    problem: str
    reference: str
    response: str

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).digest()


class Judgement(NamedTuple):
    """``verdict`` is the word of the two that the judge said; None where it said neither."""

    verdict: str | None
    confidence: float


class VerdictLog:
    """What a judge has said, by question: in memory, and from ``keep`` on in a file, a line for each. An empty line
    ends what was written at once: of what a kill has cut, none counts.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Judgement] = {}
        self._path: Path | None = None

    def keep(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """In ``folder`` from now on, beginning with what this rank of ``ranks`` has kept there before, and with what
        ranks that there are no more of have. Raises ConfigError.
        """
        self._path = folder / (f"{VERDICTS}_rank_{rank}.jsonl" if rank else f"{VERDICTS}.jsonl")
        others = (path for path in sorted(folder.glob(f"{VERDICTS}_rank_*.jsonl")) if _rank_of(path) >= ranks)
        self._known = {}
        for path in (*others, self._path):
            self._known |= dict(_whole_rows(path))
        if self._path.is_file():
            os.truncate(self._path, len(_whole(self._path)))

    def close(self) -> None:
        self._known, self._path = {}, None

    def __contains__(self, question: Question) -> bool:
        return question.key in self._known

    def __getitem__(self, question: Question) -> Judgement:
        return self._known[question.key]

    def add(self, found: Mapping[Question, Judgement]) -> None:
        if self._path is not None and found:
            rows = ({**question._asdict(), **judgement._asdict()} for question, judgement in found.items())
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + "\n"
            size = self._path.stat().st_size if self._path.exists() else 0
            try:
                with self._path.open("ab") as file:  # a lone surrogate becomes JSON's escape of it
                    file.write(lines.encode("utf-8", "backslashreplace"))
            except OSError:
                if self._path.exists():  # what a full disk has cut would run into the next line
                    os.truncate(self._path, size)
                raise
        self._known |= {question.key: judgement for question, judgement in found.items()}


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _whole(path: Path) -> bytes:
    """Without what a kill has cut."""
    written = path.read_bytes() if path.is_file() else b""
    return written[: written.rfind(b"\n\n") + 2] if b"\n\n" in written else b""


def _whole_rows(path: Path) -> Iterator[tuple[bytes, Judgement]]:
    for number, line in enumerate(_whole(path).split(b"\n"), start=1):
        if line:
            question, judgement = _read(line, f"{path}:{number}")
            yield question.key, judgement


def _read(line: bytes, where: str) -> tuple[Question, Judgement]:
    try:
        row = json.loads(line)
        question = Question(row["problem"], row["reference"], row["response"])
        found = Judgement(row["verdict"], row["confidence"])
        if not 0 <= found.confidence <= 1:  # nor NaN
            raise ValueError
    except (ValueError, TypeError, KeyError) as error:
        shown = line[:100].decode("utf-8", "replace")
        raise ConfigError(
            f"{where}: expected a question with a verdict and a confidence, got {shown!r}; without this line the "
            "question is asked again"
        ) from error
    return question, found


def forget(folder: Path) -> None:
    """Remove what an earlier attempt has kept."""
    for path in folder.glob(f"{VERDICTS}*.jsonl"):
        path.unlink()
