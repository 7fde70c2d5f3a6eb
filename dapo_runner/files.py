"""Write files that survive a kill: atomic writes, JSON lines, locks."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dapo_runner.errors import ConfigError


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path`` atomically: a kill or a power cut leaves the old content or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(_encode(content))
    force_to_disk(unfinished)
    unfinished.replace(path)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, with the modes of new files: nobody could remove the copy of a read-only one with its modes."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        (copy_folder if path.is_dir() else shutil.copyfile)(path, target / path.name)


def share(path: Path) -> None:
    """Let all who may read the folder of ``path`` read the file: safetensors lets only its owner."""
    path.chmod(path.stat().st_mode | path.parent.stat().st_mode & 0o666)


def force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line of JSON per row. Raises ValueError for NaN and infinities."""
    return _encode("".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], *, sync: bool = False) -> None:
    """Append one line per row in one write. On failure, remove an incomplete write and raise OSError."""
    content = to_jsonl(rows)
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(content) != len(content):
                raise OSError(f"{path}: expected room for {len(content)} more bytes")
            if sync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def read_jsonl(path: Path, *required: str) -> list[dict[str, Any]]:
    """Return the rows, without an incomplete last line. Raises ConfigError for a line that lacks a ``required`` key."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(row := dict(json.loads(line)))
            if not row.keys() >= set(required):
                raise ValueError(f"expected {required}")
        except (ValueError, TypeError) as error:
            keys = ", ".join((*required, "…"))
            raise ConfigError(f"{path}:{number}: expected a JSON object {{{keys}}}. Remove the line.") from error
    return rows


def drop_incomplete_line(path: Path) -> None:
    """Remove what follows the last newline of a JSONL file."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def lock_file(path: Path, note: Callable[[str], None] | None = None) -> BinaryIO:
    """Open a file and lock it until it is closed. Raises BlockingIOError where another process holds the lock. A file
    system without locks is reported to ``note``, or raises OSError.
    """
    file = path.open("ab+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if note is None or isinstance(error, BlockingIOError):
            file.close()
            raise
        note(f"{path} cannot be locked ({error}). Make sure that no other process uses it.")
    return file


def check_writable(folder: Path, key: str = "run.output_dir") -> None:
    """Raise ConfigError if a folder could not be created or written to. Creates nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"{key}: expected a folder that can be written to, got {folder}")


def _encode(content: str | bytes) -> bytes:
    # UTF-8 cannot encode a lone surrogate: write its JSON escape instead.
    return content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
