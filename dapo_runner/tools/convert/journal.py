"""What is settled, a line for each problem, and what is made of it in the end. No file is written over."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError


def beside(out: Path, what: str) -> Path:
    """`sums.jsonl` → `sums.rejected.jsonl`."""
    return out.with_name(f"{out.stem}.{what}{out.suffix}")


class Journal:
    """Open for one process at a time. Its first line says what it was begun with."""

    def __init__(self, out: Path, begun_with: Mapping[str, Any]) -> None:
        """Raises ConfigError where another process has it, where it was begun with something else, or where ``out`` is
        there and no journal beside it.
        """
        self.out, self.rejected, self.path = out, beside(out, "rejected"), beside(out, "journal")
        for path in (self.out, self.rejected):
            if path.exists() and not self.path.exists():
                raise ConfigError(f"{path}: expected nothing there, it is not written over")
        try:
            self._file = self.path.open("ab+")
        except OSError as error:
            raise ConfigError(f"{out}: expected a folder that can be written to: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"{self.path}: another process works on it") from error
        first, *rest = self._whole_lines() or [dict(begun_with)]
        if first != begun_with:
            self._file.close()
            changed = sorted(key for key in first.keys() | begun_with.keys() if first.get(key) != begun_with.get(key))
            raise ConfigError(
                f"{self.path} was begun with other settings ({', '.join(changed)}): go on with those, choose another "
                "OUT, or remove it"
            )
        if not self._file.tell():
            self._write(begun_with)
        self.settled: dict[str, dict[str, Any]] = {line["key"]: line for line in rest}

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, key: str, row: Mapping[str, Any], rejected: str | None) -> None:
        """``row`` is what goes into a file in the end; ``rejected`` is why into that of the rejected."""
        self.settled[key] = {"key": key, "rejected": rejected, "row": row}
        self._write(self.settled[key])

    def finish(self, keys: Iterable[str]) -> None:
        """Both files, their rows in the order of ``keys``; the journal is removed. Raises ConfigError where others are
        there.
        """
        lines = [self.settled[key] for key in keys]
        for path, kept in ((self.rejected, False), (self.out, True)):
            _write_new(path, [line["row"] for line in lines if (line["rejected"] is None) == kept])
        self.path.unlink()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(_as_line(line))
        self._file.flush()

    def _whole_lines(self) -> list[dict[str, Any]]:
        """Without a last one that a kill has cut."""
        self._file.seek(0)
        written = self._file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]


def _as_line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _write_new(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Whole or not at all. What a kill has left to be done again is the same to the byte."""
    content, unfinished = b"".join(map(_as_line, rows)), path.with_name(path.name + ".unfinished")
    if path.exists() and path.read_bytes() == content:
        return
    with unfinished.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    try:
        os.link(unfinished, path)  # never over a file that is there
    except FileExistsError as error:
        raise ConfigError(f"{path}: expected nothing there, it is not written over") from error
    finally:
        unfinished.unlink()
