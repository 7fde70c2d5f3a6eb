"""The stages of the first hour on a GPU: the rehearsal runs all of them, and a call resumes where the last stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import gpu, machine
from benchmarks.bench_ranks import recipe
from benchmarks.configs import TUNINGS
from dapo_runner.config import parse_config

ROOT = Path(__file__).parents[2]
Outcome = bool | Exception


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Outcome]]:
    """Three stages whose outcomes a test gives: finished, unfinished, or an exception."""
    outcomes: dict[str, list[Outcome]] = {"one": [], "two": [], "three": []}

    def stage(name: str) -> gpu.Stage:
        def call(results: Path, seconds: float) -> bool:
            outcome = outcomes[name].pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return call

    monkeypatch.setattr(gpu, "STAGES", {name: stage(name) for name in outcomes})
    return outcomes


def statuses(results: Path, *only: int) -> list[str]:
    return [stage["status"] for stage in gpu.run_stages(results, 100, only or None).values()]


def test_a_call_resumes_what_is_not_finished(stages: dict[str, list[Outcome]], tmp_path: Path) -> None:
    error, absent = RuntimeError("no kernel image"), gpu.LeftOutError("no tool")
    stages |= {"one": [True], "two": [error, error], "three": [False, absent, absent, True]}
    assert statuses(tmp_path) == ["finished", "failed", "unfinished"]
    saved = json.loads((tmp_path / "gpu-state.json").read_text())["stages"]
    assert "no kernel image" in saved["two"]["reason"]
    assert statuses(tmp_path) == ["finished", "failed", "left out"]
    assert statuses(tmp_path) == ["finished", "failed", "left out"]  # a stage that failed twice is not tried again
    assert statuses(tmp_path) == ["finished", "failed", "finished"]  # one that was left out is
    stages |= {"two": [True], "one": [False]}
    assert statuses(tmp_path, 2, 1) == ["unfinished", "finished", "finished"]


def test_other_sources_start_anew(
    stages: dict[str, list[Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages |= {name: [True, True] for name in stages}
    statuses(tmp_path)
    monkeypatch.setattr(machine, "sources", lambda: "others")
    statuses(tmp_path)
    assert stages == {"one": [], "two": [], "three": []}


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def test_failing_tests_and_kernels_are_named(tmp_path: Path) -> None:
    rows = [{"kind": kind, "status": status} for kind, status in (("peer", "failed"), ("ours", "ok"))]
    wrong = [*rows, {"kind": "ours", "status": "wrong"}]
    for name, found in (("gpu-card", rows), ("gpu-logits", wrong)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"records": [{"rows": found}]}))
    commands = {tmp_path / f"gpu-{code}.txt": program(f"raise SystemExit({code})") for code in (0, 1, 5)}
    assert gpu._run_logged(commands, 60)
    assert gpu.failures(tmp_path) == ["gpu-1.txt", "gpu-logits.json"]


def test_what_was_stopped_is_resumed_once(tmp_path: Path) -> None:
    """Of several commands each has its share of the time. Those that ended are not run again."""
    quick, slow = tmp_path / "gpu-quick.txt", tmp_path / "gpu-slow.txt"
    commands = {
        slow: program("import time; time.sleep(60)"),
        quick: program(f"open({str(tmp_path / 'n')!r}, 'a').write('x')"),
    }
    assert not gpu._run_logged(commands, 3)
    assert gpu._is_done(quick)
    assert gpu.failures(tmp_path) == []  # not yet
    assert gpu._run_logged(commands, 3)  # stopped twice: not tried again
    assert gpu.failures(tmp_path) == ["gpu-slow.txt"]
    assert (tmp_path / "n").read_text() == "x"


def test_what_the_machine_interrupted_is_resumed(tmp_path: Path) -> None:
    """A log without an exit status is that of a machine that went away."""
    log, ends = tmp_path / "gpu-cut.txt", tmp_path / "n"
    log.write_text(f"sources {machine.sources()}, commit x, try 1\n..... [ 40%]\n")
    assert not gpu._is_done(log)
    assert gpu._run_logged({log: program(f"open({str(ends)!r}, 'a').write('x')")}, 60)
    assert ends.read_text() == "x"


def test_the_stage_of_the_card_waits_for_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {tmp_path / "gpu-1-slow.txt": program("import time; time.sleep(60)")}
    monkeypatch.setattr(gpu, "test_commands", lambda results: commands)
    monkeypatch.setattr(gpu, "measure", lambda suite, results, seconds: True)
    assert [gpu.card(tmp_path, 3.0) for _ in range(2)] == [False, True]


def test_every_file_with_gpu_tests_has_a_log(tmp_path: Path) -> None:
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert {path.name for path in gpu.test_commands(tmp_path)} == {
        f"gpu-1-{n}.txt" for n in names - {Path(__file__).stem}
    }


def test_what_is_absent_leaves_a_stage_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda package: "absent" if package == "pydantic" else "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    for stage, name in ((gpu.runner, "pydantic"), (gpu.sanitizer, "compute-sanitizer")):
        with pytest.raises(gpu.LeftOutError, match=name):
            stage(tmp_path, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_device_nothing_is_installed() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "CUDA" in done.stderr


@pytest.mark.elsewhere
def test_the_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    """Two minutes and more: Triton is interpreted."""
    environment = {**os.environ, "BENCHMARK_REHEARSAL": "1", "TRITON_INTERPRET": "1", "RESULTS": str(tmp_path)}
    environment |= {"PYTHON": sys.executable, "OUT": str(tmp_path), "BUDGET_S": "1200"}
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    state = json.loads((tmp_path / "gpu-state.json").read_text())["stages"]
    assert {stage["status"] for stage in state.values()} == {"finished"}
    assert list(state) == list(gpu.STAGES)
    for pattern in ("gpu-1-test_*.txt", "gpu-card-*", "gpu-logits-*", "gpu-hidden-*", "gpu-tuning-*", "gpu-[456]-*"):
        assert list(tmp_path.glob(pattern)), pattern
    for page in tmp_path.glob("*.md"):
        assert "REHEARSAL" in page.read_text(), page
    rows = [
        row
        for path in tmp_path.glob("gpu-[clht]*.json")
        for record in json.loads(path.read_text())["records"]
        for row in record["rows"]
    ]
    assert not [row for row in rows if row["status"] in ("failed", "wrong") and row["kind"] != "peer"]
    assert {"dapo_kernels, triton", *(tuning.name for tuning in TUNINGS)} <= {
        row["name"] for row in rows if row["status"] == "ok"
    }
    packed = subprocess.run(["tar", "-tzf", tmp_path / "gpu-results.tar.gz"], capture_output=True, text=True)
    assert {"gpu-state.json", "gpu-5-runner.json", "gpu-0-setup.txt"} <= set(packed.stdout.split())


def load_bundle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bundle", ROOT / ".ci" / "gpu_bundle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_are_small_and_join_to_what_they_were_cut_from(tmp_path: Path) -> None:
    sizes = {"small.whl": 30, "large.whl": 250, "other.whl": 60}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    taken = load_bundle().split([tmp_path / name for name in sizes], tmp_path / "parts", limit=100)
    assert max(taken) <= 100
    assert sum(taken) == sum(sizes.values())
    pieces = sorted((tmp_path / "parts").glob("*/large.whl.*"), key=lambda path: path.name)
    assert [path.name for path in pieces] == [f"large.whl.{n}of3" for n in (1, 2, 3)]
    assert b"".join(path.read_bytes() for path in pieces) == (tmp_path / "large.whl").read_bytes()


def test_a_copy_without_git_has_the_commit_of_its_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = machine.source_state()
    assert state["commit"] is not None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.setattr(machine, "BUNDLE", tmp_path)
    assert machine.commit().startswith("unknown")
    (tmp_path / "1").mkdir()
    for sources, suffix in ((state["sources"], ""), ("others", "+changes")):
        (tmp_path / "1" / "commit.json").write_text(json.dumps({"commit": "abc", "sources": sources}))
        assert machine.commit() == f"abc{suffix}"


def test_the_recipe_of_the_runner_is_valid(tmp_path: Path) -> None:
    parse_config(recipe("a model", str(tmp_path), 64, 4, max_response_tokens=512, engine="vllm"))


def test_an_install_that_fails_leaves_a_log_and_the_stages_go_on(tmp_path: Path) -> None:
    wheels, results = tmp_path / "wheels", tmp_path / "results"
    name = "tiny_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("tiny_thing.py", "")
        about = "tiny_thing-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    load_bundle().split([tmp_path / name], wheels, limit=100)  # more than ten pieces
    (wheels / "1" / "lost-1.0-py3-none-any.whl.1of2").write_bytes(b"half")
    (wheels / "1" / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    environment = {**os.environ, "BENCHMARK_REHEARSAL": "1", "RESULTS": str(results), "OUT": str(tmp_path)}
    environment |= {"PYTHON": sys.executable, "WHEELS": str(wheels), "BUDGET_S": "1"}  # too little for any stage
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not started") == len(gpu.STAGES)
    log = (results / "gpu-0-setup.txt").read_text()
    assert "lacks parts of lost" in log
    assert "could not install" in log
    assert name not in log
    assert (tmp_path / "gpu-results.tar.gz").exists()
