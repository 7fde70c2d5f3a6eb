"""A run's folder: one process at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from small import small_recipe, write_recipe

from dapo_runner.cli import main
from dapo_runner.config import ConfigError, parse_config
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.progress import Progress
from dapo_runner.run.folder import CONFIG_FILE, LOCK_FILE, check_same_run, lock_folder, read_config, write_config
from dapo_runner.run.start import open_run

HOLDER = """
import sys, time
from pathlib import Path
from dapo_runner.run.folder import lock_folder
lock = lock_folder(Path(sys.argv[1]), print)
print("locked", flush=True)
time.sleep(600)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the folder's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_in_a_runs_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It used to train beside the first: every step stood twice in the metrics, and both ended with 0."""
    recipe, folder = write_recipe(tmp_path, steps=1), tmp_path / "runs" / "small"
    assert main(["train", str(recipe)]) == 0
    before = (folder / "metrics.jsonl").read_bytes()
    other = hold(folder)
    try:
        assert main(["train", str(recipe), "run.steps=2"]) == 2
        error = capsys.readouterr().err
        assert f"process {other.pid} on {socket.gethostname()}" in error
        assert error.count("\n") == 1
        assert (folder / "metrics.jsonl").read_bytes() == before
        # Who only reads is let in.
        assert main(["eval", str(folder)]) == 0
        assert main(["report", str(folder)]) == 0
        assert main(["show", str(folder)]) == 0
        assert main(["train", str(recipe), "--dry-run"]) == 0
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert main(["train", str(recipe), "run.steps=2"]) == 0  # the kernel has given the lock back


def test_the_lock_goes_with_the_run(tmp_path: Path) -> None:
    config = parse_config(small_recipe(output_dir=str(tmp_path)))
    with open_run(config, Progress()) as run:
        owner = json.loads((run.folder / LOCK_FILE).read_text())
        assert owner == {"pid": os.getpid(), "host": socket.gethostname()}
        with pytest.raises(ConfigError, match=str(os.getpid())):
            open_run(config, Progress())
    wrong = {**small_recipe()["data"], "template": "What is {question}?"}
    with refused("data.template"):  # what cannot be opened leaves no lock behind
        open_run(parse_config(small_recipe(output_dir=str(tmp_path), name="b") | {"data": wrong}), Progress())
    lock_folder(tmp_path / "b", print).close()
    with open_run(config, Progress()):
        pass


def test_an_owner_that_has_not_said_its_name_yet(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, print)
    (tmp_path / LOCK_FILE).write_text("")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        lock_folder(tmp_path, print)
    lock.close()
    lock_folder(tmp_path, print).close()


def test_a_launcher_that_torch_does_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, steps=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(recipe)]) == 2
    assert "WORLD_SIZE=2: " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train", str(recipe)]) == 0


def test_a_child_that_outlives_a_killed_run_does_not_keep_its_lock(tmp_path: Path) -> None:
    """As the workers of a plug-in's multiprocessing.Pool do."""
    program = f"""
import os, signal, sys, time
from pathlib import Path
from dapo_runner.run.folder import lock_folder
lock = lock_folder(Path({str(tmp_path)!r}), print)
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=str(trainer.pid)):
                lock_folder(tmp_path, print)
            trainer.kill()
            trainer.wait()
            lock_folder(tmp_path, print).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_with_an_empty_log_holds_no_run(tmp_path: Path) -> None:
    config = small_recipe(output_dir=str(tmp_path))
    (tmp_path / "small").mkdir()
    write_config(parse_config(config), tmp_path / "small")
    (tmp_path / "small" / METRICS_FILE).touch()
    assert check_same_run(parse_config(config | {"algorithm": "grpo"}), tmp_path / "small")


@pytest.mark.parametrize("content", ["run: [", "run: {steps: many}\nreward: {}"])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        read_config(tmp_path)
