"""The stages of the first hour on a GPU: the rehearsal runs all of them, and a call resumes where the last stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.bench_ranks import recipe
from benchmarks.configs import TUNINGS
from dapo_runner.config import parse_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool | Exception]]:
    """Three stages whose outcomes a test gives: finished, unfinished, or an exception."""
    outcomes: dict[str, list[bool | Exception]] = {"one": [], "two": [], "three": []}

    def stage(name: str) -> gpu.Stage:
        def call(results: Path, seconds: float) -> bool:
            outcome = outcomes[name].pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return call

    monkeypatch.setattr(gpu, "STAGES", {name: stage(name) for name in outcomes})
    return outcomes


def statuses(results: Path, only: int | None = None) -> list[str]:
    return [stage["status"] for stage in gpu.run_stages(results, 100, only).values()]


def test_a_call_resumes_what_is_not_finished(stages: dict[str, list[bool | Exception]], tmp_path: Path) -> None:
    error = RuntimeError("no kernel image")
    stages |= {"one": [True], "two": [error, error], "three": [False, True]}
    assert statuses(tmp_path) == ["finished", "failed", "unfinished"]
    saved = json.loads((tmp_path / "gpu-state.json").read_text())["stages"]
    assert "no kernel image" in saved["two"]["reason"]
    assert statuses(tmp_path) == ["finished", "failed", "finished"]
    assert statuses(tmp_path) == ["finished", "failed", "finished"]  # a stage that failed twice is left out
    stages["two"] = [True]
    assert statuses(tmp_path, only=2) == ["finished", "finished", "finished"]


def test_another_commit_starts_anew(
    stages: dict[str, list[bool | Exception]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages |= {name: [True, True] for name in stages}
    statuses(tmp_path)
    monkeypatch.setattr(gpu.machine, "commit", lambda: "another")
    statuses(tmp_path)
    assert stages == {"one": [], "two": [], "three": []}


def test_failing_tests_and_kernels_are_named(tmp_path: Path) -> None:
    rows = [{"kind": kind, "status": status} for kind, status in (("peer", "failed"), ("ours", "ok"))]
    wrong = [*rows, {"kind": "ours", "status": "wrong"}]
    for name, found in (("gpu-card", rows), ("gpu-logits", wrong)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"records": [{"rows": found}]}))
    for name, code in (("one", 0), ("two", 1), ("three", 5)):
        gpu._log([sys.executable, "-S", "-c", f"raise SystemExit({code})"], tmp_path / f"gpu-{name}.txt", 60)
        assert gpu._is_done(tmp_path / f"gpu-{name}.txt")
    gpu._log([sys.executable, "-S", "-c", "import time; time.sleep(60)"], tmp_path / "gpu-four.txt", 0.5)
    assert not gpu._is_done(tmp_path / "gpu-four.txt")
    assert gpu.failures(tmp_path) == ["gpu-logits.json", "gpu-two.txt"]


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
    environment |= {"PYTHON": sys.executable}
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    state = json.loads((tmp_path / "gpu-state.json").read_text())["stages"]
    assert {stage["status"] for stage in state.values()} == {"finished"}
    assert list(state) == list(gpu.STAGES)
    for pattern in ("gpu-1-tests.txt", "gpu-card-*", "gpu-logits-*", "gpu-hidden-*", "gpu-tuning-*", "gpu-[456]-*"):
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


def test_the_bundle_names_sizes_and_what_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "gone" in command:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no such wheel")
        Path(command[-1], "here-1.whl").write_bytes(bytes(2 * 2**20))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gpu, "BUILD_WHEELS", ("here",))
    monkeypatch.setattr(gpu, "RUNNER_WHEELS", ())
    monkeypatch.setattr(gpu, "LONE_WHEELS", ("gone",))
    monkeypatch.setattr(gpu, "MODEL", tmp_path / "models" / "none")
    monkeypatch.setattr(gpu.subprocess, "run", download)
    for _ in range(2):
        text = gpu.bundle(tmp_path / "bundle")
        assert "2.0 MiB  here" in text
        assert "skipped  gone: ERROR: no such wheel" in text
        assert "skipped  the model" in text
    assert (tmp_path / "bundle" / "wheels" / "here-1.whl").exists()


def test_the_runner_names_what_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.machine, "version", lambda package: "absent" if package == "vllm" else "1")
    monkeypatch.setattr(gpu, "MODEL", tmp_path)
    assert gpu.runner(tmp_path, 1.0)
    assert "vllm" in (tmp_path / "gpu-5-runner.md").read_text()


def test_the_recipe_of_the_runner_is_valid(tmp_path: Path) -> None:
    parse_config(recipe("a model", str(tmp_path), 64, 4, max_response_tokens=512, engine="vllm"))
