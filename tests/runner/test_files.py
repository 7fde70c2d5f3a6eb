"""Files that stay whole: atomic replacement, JSON lines, locks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from dapo_runner.errors import ConfigError
from dapo_runner.files import append_jsonl, atomic_write, drop_incomplete_line, lock_file, read_jsonl


def test_lines_round_trip_and_an_incomplete_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, [{"a": 1}, {"b": "caf\ud800é"}])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"c"')
    assert read_jsonl(path) == [{"a": 1}, {"b": "caf\ud800é"}]
    drop_incomplete_line(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"no\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3"):
        read_jsonl(path)


def test_a_write_that_a_full_disk_cuts_leaves_nothing(tmp_path: Path) -> None:
    path, limit = tmp_path / "rows.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_jsonl(path, [{"a": 1}])
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limit[1]))
    try:
        with pytest.raises(OSError, match=r"rows\.jsonl|too large"):
            append_jsonl(path, [{"b": "x" * 99}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content in ("a: 1\n", b"b: 2\n"):
        atomic_write(path, content, sync=True)
    assert path.read_bytes() == b"b: 2\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_exclusive_until_it_is_closed(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    held.close()
    lock_file(tmp_path / "lock").close()
