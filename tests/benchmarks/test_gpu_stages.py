"""The stages of the first hour on a GPU: the rehearsal runs all of them, and a call resumes where the last stopped."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dapo_kernels
from benchmarks import gpu, machine
from benchmarks.bench_ranks import recipe
from benchmarks.tuning import TUNINGS
from dapo_runner.config import Config, parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
BUNDLE: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "gpu_bundle.py"))


def test_a_stage_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def fail(error: Exception) -> bool:
        raise error

    stages: dict[str, gpu.Stage] = {
        "one": lambda state, seconds: fail(RuntimeError("no kernel image")),
        "two": lambda state, seconds: seconds < 50,
        "three": lambda state, seconds: fail(gpu.LeftOutError("no tool")),
    }
    found = gpu.run_stages(gpu.State(tmp_path), 100, None, stages)
    assert list(found.values()) == ["failed: RuntimeError: no kernel image", "unfinished", "left out: no tool"]
    found = gpu.run_stages(gpu.State(tmp_path), 40, [3, 2], stages)
    assert list(found.values()) == ["not started", "finished", "left out: no tool"]


def test_other_sources_start_anew(tmp_path: Path) -> None:
    gpu.State(tmp_path, {"gpu-tests.txt": {"tries": 1, "status": 0}}).save()
    assert gpu.State.load(tmp_path).commands
    path = tmp_path / "gpu-state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": "others"}))
    assert not gpu.State.load(tmp_path).commands


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def test_commands_that_are_not_done_are_run(tmp_path: Path) -> None:
    state = gpu.State(tmp_path, commands={"gpu-done.txt": {"tries": 1, "status": 0}})
    commands = {"gpu-done.txt": "raise SystemExit(1)", "gpu-fails.txt": "raise SystemExit(3)"}
    commands["gpu-no-test.txt"] = "raise SystemExit(5)"  # as pytest without a test
    assert not state.run_logged({name: program(text) for name, text in commands.items()}, 600)
    assert state.commands["gpu-no-test.txt"]["status"] == 5
    slow = {"gpu-slow.txt": program("import time; time.sleep(600)")}
    assert not state.run_logged(slow, 2.0)  # a command takes a second at least
    state = gpu.State.load(tmp_path)
    assert state.failures() == ["gpu-fails.txt"]
    assert state.run_logged(slow, 2.0)  # stopped twice
    rows = [{"kind": kind, "status": status} for kind, status in (("peer", "failed"), ("ours", "wrong"))]
    (tmp_path / "gpu-logits.json").write_text(json.dumps({"records": [{"rows": rows}]}))
    (tmp_path / "gpu-hidden.json").write_text(json.dumps({"records": [{"rows": rows[:1]}]}))
    assert state.failures() == ["gpu-fails.txt", "gpu-logits.json", "gpu-slow.txt"]
    commands["gpu-fails.txt"] = ""  # what it lacked was installed
    assert state.run_logged({name: program(text) for name, text in commands.items()}, 600)
    assert state.failures() == ["gpu-logits.json", "gpu-slow.txt"]


def test_a_stage_whose_command_fails_is_named_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--stage", "5", "--results", str(tmp_path)])
    for text, how in (("raise SystemExit(1)", "failed"), ("", "finished")):
        commands = {"gpu-5-run.txt": program(text)}
        stage = lambda state, seconds, commands=commands: state.run_logged(commands, seconds)  # noqa: E731
        monkeypatch.setitem(gpu.STAGES, "runner", stage)
        assert gpu.main() == (how == "failed")
        assert re.findall(r"stage 5 runner +(\w+)", capsys.readouterr().out) == [how]


def test_what_is_absent_leaves_a_stage_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(gpu.LeftOutError, match="compute-sanitizer"):
        gpu.sanitizer(gpu.State(tmp_path), 1.0)


def test_the_stages_start_without_the_packages_of_the_runner() -> None:
    absent = "import sys; sys.modules |= dict.fromkeys(['pydantic', 'transformers', 'datasets', 'rich', 'scipy'])"
    subprocess.run([sys.executable, "-c", f"{absent}; import benchmarks.gpu, benchmarks.harness"], cwd=ROOT, check=True)


def call_script(script: Path = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run([script], env=environment, capture_output=True, text=True)


@pytest.mark.elsewhere
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_device_nothing_is_installed() -> None:
    done = call_script()
    assert done.returncode != 0
    assert "CUDA" in done.stderr


@pytest.mark.elsewhere
def test_the_rehearsal_runs_every_stage(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A minute and more: Triton is interpreted, and twelve processes import torch. With --smoke, three short stages."""
    files = {1: "gpu-1-test_*.txt", 2: "gpu-logits-*", 3: "gpu-hidden-*", 4: "gpu-4-*", 5: "gpu-5-run.txt"}
    files |= {6: "gpu-6-*", 7: "gpu-7-*"}
    is_smoke = pytestconfig.getoption("--smoke")
    stages, only = ([1, 6, 7], "1,6,7") if is_smoke else (list(files), "")
    rehearsal = {"BENCHMARK_REHEARSAL": "1", "TRITON_INTERPRET": "1", "BUDGET_S": "1200", "STAGE": only}
    done = call_script(**rehearsal, RESULTS=str(tmp_path), OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    finished = re.findall(r"^stage (\d) \w+ +finished$", done.stdout, re.MULTILINE)
    assert [int(stage) for stage in finished] == stages, done.stdout
    assert [stage for stage in stages if not list(tmp_path.glob(files[stage]))] == []
    packed = subprocess.run(["tar", "-tzf", tmp_path / "gpu-results.tar.gz"], capture_output=True, text=True)
    commands = gpu.State.load(tmp_path).commands
    assert len(commands) >= 3
    assert {"gpu-state.json", "gpu-0-setup.txt", *commands} <= set(packed.stdout.split())
    assert all("REHEARSAL" in page.read_text() for page in tmp_path.glob("*.md"))
    records = [
        record for path in tmp_path.glob("gpu-[lht]*.json") for record in json.loads(path.read_text())["records"]
    ]
    rows = [row for record in records for row in record["rows"]]
    assert not [row for row in rows if row["status"] in ("failed", "wrong") and row["kind"] != "peer"]
    measured = {row["name"] for row in rows if row["status"] == "ok"}
    assert is_smoke or {"dapo_kernels, triton", *(tuning.name for tuning in TUNINGS)} <= measured


def test_a_copy_without_git_has_the_commit_of_its_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.git_commit()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert machine.commit(tmp_path).startswith("unknown")
    (tmp_path / "1").mkdir()
    for sources, suffix in ((machine.sources(), ""), ("others", "+changes")):
        (tmp_path / "1" / "commit.json").write_text(json.dumps({"commit": "abc", "sources": sources}))
        assert machine.commit(tmp_path) == f"abc{suffix}"


def test_the_bundle_has_what_the_build_and_the_tests_need() -> None:
    needed = {"ninja", *re.findall(r'"(\w+)>=\d+"', SCRIPT.read_text())}
    assert needed >= {"ninja", "pybind11", "pytest"}
    assert needed <= {*BUNDLE["WHOLE"], *BUNDLE["ALONE"]}
    assert "cloudpickle" in (ROOT / "benchmarks" / "gpu-peers.txt").read_text().split()  # verl's tensordict imports it


def test_a_call_has_less_room_beside_a_larger_checkout(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    empty = BUNDLE["room"](tmp_path)
    for name, size in ((".gitignore", 8), ("ignored", 1000), ("travels", 1000)):
        (tmp_path / name).write_text("ignored\n" * (size // 8))
    assert empty - BUNDLE["room"](tmp_path) == 1008
    assert empty == 60 * 2**20
    small, large = [tmp_path / "a.whl", tmp_path / "b.whl"], tmp_path / "c.whl"
    for path, size in zip([*small, large], (9, 9, 25), strict=True):
        path.write_bytes(bytes(size))
    with pytest.raises(SystemExit, match="part 1"):
        BUNDLE["split"](small, tmp_path / "parts", limit=18)
    assert BUNDLE["split"]([*small, large], tmp_path / "parts", limit=40) == [18, 22, 3]
    assert {path.name for path in (tmp_path / "parts" / "1").iterdir()} == {"a.whl", "b.whl"}


def test_the_recipe_of_the_runner_is_valid(tmp_path: Path) -> None:
    parse(recipe("a model", str(tmp_path), 64, 4, max_response_tokens=512, engine="vllm"), Config)


def test_a_build_without_a_fit_nvcc_leaves_the_cuda_module_out(tmp_path: Path) -> None:
    """In a copy of what the build reads. The CUDA device and the compilers are stubs, and there is no pip."""
    copied = ("benchmarks/gpu.sh", "benchmarks/__init__.py", "dapo_kernels/__init__.py", "README.md", "LICENSE")
    for name in (*copied, "dapo_kernels/backends/sources.py", "pyproject.toml", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "benchmarks" / "gpu.py").write_text("import shutil; print('the stages', shutil.which('tool'))")
    device = "class cuda:\n    is_available = lambda: True\n    get_device_capability = lambda: (9, 0)\n"
    (tmp_path / "torch.py").write_text(device)
    stubs = {
        "nvcc": f'echo "$DAPO_KERNELS_CUDA_ARCHS" >>{tmp_path}/archs; echo release 11.8',
        "g++": 'until [ "$1" = -o ]; do shift; done; touch "$2" "$2.d"',
        "python": f'[ "$1 $2" != "-m pip" ] || exit 1; exec {sys.executable} "$@"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    tool = tmp_path / "toolkit" / "bin" / "tool"  # found without a PATH that names its folder
    tool.parent.mkdir(parents=True)
    tool.touch(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = {"PATH": path, "CXX": "g++", "CUDA_HOME": "", "DAPO_KERNELS_CUDA_ARCHS": ""}
    environment["CUDA_PATH"] = str(tmp_path / "toolkit")
    environment["PYTHON"] = str(tmp_path / "python")
    script = tmp_path / "benchmarks" / "gpu.sh"
    (tmp_path / "build" / "gpu-bundle" / "2").mkdir(parents=True)  # sent without part 1
    done = call_script(script, RESULTS=str(tmp_path), **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "lacks part 1" in done.stderr
    shutil.rmtree(tmp_path / "build")
    done = call_script(script, RESULTS=str(tmp_path), **environment)
    log = (tmp_path / "gpu-0-setup.txt").read_text()
    assert done.stdout.endswith(f"the stages {tool}\n"), done.stderr + log
    assert "nvcc" in log
    assert "no pip from version 22.3 on" in log
    assert "no pip" in done.stdout
    assert set((tmp_path / "archs").read_text().split()) == {"90a"}
    assert [path.name.partition(".")[0] for path in (tmp_path / "dapo_kernels").glob("*.so")] == ["_C"]
    version = re.search(r"^Version: (.+)$", (tmp_path / "dapo_kernels.egg-info" / "PKG-INFO").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == dapo_kernels.__version__


@pytest.mark.elsewhere
def test_an_install_that_fails_leaves_a_log_and_the_stages_go_on(tmp_path: Path) -> None:
    wheels, results = tmp_path / "wheels", tmp_path / "results"
    name = "tiny_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("tiny_thing.py", "")
        about = "tiny_thing-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (tmp_path / "small-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    small, *pieces = BUNDLE["split"]([tmp_path / name, tmp_path / "small-1.0-py3-none-any.whl"], wheels, limit=50)
    assert max(pieces) <= 50 - small == 42
    assert len(pieces) > 10  # so that their names do not sort as numbers do
    (wheels / "1" / "lost-1.0-py3-none-any.whl.2of2").write_bytes(b"half")
    (wheels / "1" / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    too_little = {"BENCHMARK_REHEARSAL": "1", "BUDGET_S": "1"}  # for any stage
    done = call_script(**too_little, RESULTS=str(results), OUT=str(tmp_path), WHEELS=str(wheels))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not started") == len(gpu.STAGES)
    log = (results / "gpu-0-setup.txt").read_text()
    assert "lacks parts of lost" in log
    assert "small" in log
    assert "broken" in log
    assert name not in log
    assert (tmp_path / "gpu-results.tar.gz").exists()
