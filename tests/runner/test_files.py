"""Files that stay whole, and a run's folder: one process at a time, and what an earlier attempt left there."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from builders import file_size_limit
from forks import CONTEXT
from refusals import refused
from small import Dapo, Notes, config_in, write_recipe

from dapo_runner.config import Config, ConfigError, load_config
from dapo_runner.files import append_jsonl, drop_incomplete_line, lock_file, read_jsonl
from dapo_runner.logging.environment import this_version
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.run.folder import CONFIG_FILE, LOCK_FILE, check_same_run, lock_folder, read_config, write_config
from dapo_runner.run.start import open_run
from dapo_runner.train import train


def test_lines_round_trip_and_an_incomplete_one_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows, synced = tmp_path / "rows.jsonl", [{"a": 1}, {"b": "caf\ud800é"}], list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    append_jsonl(path, rows[:1])
    assert synced == []
    append_jsonl(path, rows[1:], sync=True)
    assert len(synced) == 1
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"c"')
    assert read_jsonl(path) == rows
    drop_incomplete_line(path)
    assert path.read_bytes() == whole
    with file_size_limit() as limit:  # a full disk
        limit(len(whole) + 9)
        with pytest.raises(OSError, match=r"rows\.jsonl"):
            append_jsonl(path, [{"b": "x" * 99}])
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"no\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3"):
        read_jsonl(path)


def test_a_lock_is_exclusive_until_it_is_closed(tmp_path: Path) -> None:
    with lock_file(tmp_path / "lock"), pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    lock_file(tmp_path / "lock").close()


def hold(folder: Path, pipe: Connection) -> None:
    lock = lock_folder(folder, print)
    child = os.fork()  # as the workers of a plug-in's multiprocessing.Pool
    if child:
        pipe.send(child)
    time.sleep(600)
    lock.close()


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """Another process that has the folder's lock and is killed in the end; a child of it lives on."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold, args=(folder, theirs))
    process.start()
    theirs.close()  # else nothing would end the wait for a process that has failed
    child = ours.recv()
    try:
        assert process.pid is not None
        yield process.pid
        process.kill()
        process.join()
        lock_folder(folder, print).close()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_second_process_in_a_runs_folder_may_only_read(start: Path, tmp_path: Path, dapo: Dapo) -> None:
    """It used to train beside the first: every step stood twice in the metrics, and both ended with 0."""
    recipe = write_recipe(tmp_path, start, steps=1)
    folder = train(load_config(recipe), Notes())
    before = (folder / "metrics.jsonl").read_bytes()
    with holder(folder) as pid:
        dapo.refuses(f"run.name: process {pid} on {socket.gethostname()}", "train", recipe, "run.steps=2")
        assert (folder / "metrics.jsonl").read_bytes() == before
        for command in (["eval", folder], ["show", folder], ["train", recipe, "--dry-run"]):
            dapo(*command)
    assert train(load_config(recipe, ["run.steps=2"]), Notes()) == folder


def test_the_lock_goes_with_the_run(start: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, start)
    with open_run(config, Notes()) as run:
        assert json.loads((run.folder / LOCK_FILE).read_text()) == {"pid": os.getpid(), "host": socket.gethostname()}
        with pytest.raises(ConfigError, match=str(os.getpid())):
            open_run(config, Notes())
        (run.folder / LOCK_FILE).write_text("")  # the owner has not written its name yet
        with refused("run.name"):
            lock_folder(run.folder, print)
    lock_folder(run.folder, print).close()


def test_an_attempt_that_failed_leaves_no_lock_and_does_not_bind_the_next(start: Path, tmp_path: Path) -> None:
    with refused("data.template"):  # of the tiny model's vocabulary
        train(config_in(tmp_path, data={"template": "What is {question}?"}), Notes())
    assert train(config_in(tmp_path, start, run={"steps": 1}), Notes()) == tmp_path / "small"


def test_a_folder_with_an_empty_log_holds_no_run(tmp_path: Path) -> None:
    folder, other = tmp_path / "small", config_in(tmp_path, algorithm="grpo")
    folder.mkdir()
    write_config(config_in(tmp_path), folder)
    (folder / METRICS_FILE).touch()
    assert check_same_run(other, folder)
    (folder / METRICS_FILE).write_text("{}\n")
    with refused("run.name"):
        check_same_run(other, folder)


def test_a_config_of_another_version_is_refused_with_that_version(tmp_path: Path) -> None:
    """A mistake in an override, or in a file of this version, is not put down to a version."""
    path = tmp_path / CONFIG_FILE
    write_config(config_in(tmp_path), tmp_path)
    written, now = path.read_text(), this_version()
    assert written.count(now) == 1
    with refused("evaluation.k") as caught:
        read_config(tmp_path, Config, ["evaluation.k=none"])
    assert str(path) not in str(caught.value)
    other = "dapo-kernels 0.0.1, commit 0123456789ab"
    for text in (written, written.replace(now, other), written.partition("\n")[2]):  # the last has no such line
        path.write_text(f"{text}gone: 1\n")
        with refused("gone", parts=[str(path)]) as caught:
            read_config(tmp_path, Config)
        assert (other in str(caught.value), now in str(caught.value)) == (other in text, False)
