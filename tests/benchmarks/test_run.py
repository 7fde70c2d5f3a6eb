"""Processes of a suite, its files, and what the pages compute."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_ranks, decide, harness, machine, report, run
from benchmarks import bench_step_vs_trl as step
from benchmarks.allocators import ALLOCATORS, BOTH, OUT_OF_THE_BOX, RAISED
from benchmarks.configs import GPU_HIDDEN, QUOTED, Config
from dapo_kernels.backends import registry
from docs import loss_picture as picture

ROOT = Path(__file__).parents[2]
WORKER = """
import json, os, sys, time
for name in sys.argv[1:]:
    print("at " + name, flush=True)
    if name == os.environ.get("DIES"):
        sys.exit("killed by " + name)
    row = {"name": "dapo_kernels", "kind": "ours", "setting": "", "status": "ok", "median_ms": 1.0, "min_ms": 1.0}
    row |= {"max_ms": 1.0, "pid": os.getpid()}
    peer = {"name": "peer", "kind": "peer", "setting": "", "status": "not reached", "reason": "no figures yet"}
    record = {"config": name, "denominators": ["copy_"], "allocator": None, "wall_s": 0, "fields": {}, "whole": False}
    print(json.dumps({**record, "rows": [row, peer]}), flush=True)
    if name == os.environ.get("HANGS"):
        time.sleep(600)
    print(json.dumps({**record, "rows": [row], "whole": True}), flush=True)
"""
SERVED = [replace(QUOTED[1], n_tokens=n) for n in (1, 2, 3, 4)]


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(suite: str, chosen: Sequence[Config]) -> list[str]:
        return [sys.executable, "-S", "-c", WORKER, *(config.name for config in chosen)]

    monkeypatch.setattr(run, "_command", command)


def served(chosen: Sequence[Config] = SERVED) -> list[dict[str, Any]]:
    records = [record for record in run.measured("sweep", chosen, float("inf")) if record["whole"] or "error" in record]
    assert [record["config"] for record in records] == [config.name for config in chosen]
    return records


def pids(records: list[dict[str, Any]]) -> list[int]:
    return [record["rows"][0]["pid"] for record in records if record["rows"]]


def test_configurations_share_a_process_only_where_they_need_the_same_environment() -> None:
    assert len(set(pids(served()))) == 1
    apart = [replace(config, allocator=name) for config, name in zip(SERVED, ALLOCATORS, strict=True)]
    assert len(set(pids(served(apart)))) == len(SERVED)


def test_a_worker_that_dies_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", SERVED[1].name)
    records = served()
    assert "killed by" in records[1]["error"]
    assert (len(pids(records)), len(set(pids(records)))) == (3, 2)


def test_a_suite_that_was_stopped_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HANGS", SERVED[1].name)
    base, finished = tmp_path / "sweep", []

    def call(seconds: float) -> list[str]:
        results = run.run_suite("sweep", SERVED, base, seconds)
        assert results == json.loads(base.with_suffix(".json").read_text())
        finished.append(run.is_finished(results, SERVED))
        return [record["config"] for record in results["records"] if record["whole"]]

    names = [config.name for config in SERVED]
    assert call(2.5) == names[:1]
    assert all(name in base.with_suffix(".md").read_text() for name in names)
    assert call(2.5) == [names[0], names[2], names[3]]  # what hung comes last
    assert call(5.0) == [names[0], names[2], names[3]]  # and is not tried a third time
    assert finished == [False, True, True]
    page = base.with_suffix(".md").read_text()  # with the contestant that was measured before it hung
    assert page.count("| dapo_kernels |  | 1.00 |") == 4
    assert "peer, 1 configurations: not reached: no figures yet" in page
    assert f"- {names[1]}: the 2 s were over" in page


def test_a_death_is_on_the_page_until_the_next_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = []
    for how, seconds in (("DIES", 60.0), ("HANGS", 1.5)):
        monkeypatch.setenv(how, SERVED[0].name)
        run.run_suite("sweep", SERVED[:1], tmp_path / "sweep", seconds)
        monkeypatch.delenv(how)
        pages.append((tmp_path / "sweep.md").read_text())
    assert ["killed by" in page for page in pages] == [True, False]
    assert ["s were over" in page for page in pages] == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_a_gpu_suite_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "gpu-logits"])
    assert run.main() == 2


@pytest.mark.parametrize("out", [["--out", "/somewhere"], ["--out=/somewhere"], []])
def test_a_page_names_its_command_but_no_folder_of_ours(monkeypatch: pytest.MonkeyPatch, out: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "full", *out, "--model", "a model"])
    assert machine.command() == "python -m benchmarks.run --suite full --model 'a model'"


def row(name: str, kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "setting": "", "status": "ok", **harness.summary([ms]), **more}


def record_of(config: Config, *rows: dict[str, Any]) -> dict[str, Any]:
    names = [row["name"] for row in rows if row["kind"] == "denominator"]
    record = {"config": config.name, "workload": config.workload, "allocator": None, "fields": vars(config)}
    return {**record, "denominators": names, "rows": list(rows), "wall_s": 1.0}


def test_the_picture_of_the_newest_results(tmp_path: Path) -> None:
    newest = sorted((ROOT / "benchmarks" / "results").glob("full-*.json"))[-1]
    picture.draw(json.loads(newest.read_text()), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_contestants_are_compared_with_our_call_that_treats_the_logits_alike() -> None:
    kinds, times = ("denominator", "ours", "ours", "eager", "peer"), (8.0, 10.0, 20.0, 80.0, 30.0)
    rows = [{"kind": kind, "destroys_logits": n in (1, 4), "median_ms": times[n]} for n, kind in enumerate(kinds)]
    harness.divide_by_ours(rows)
    assert [row["over_ours"] for row in rows] == [0.8, 1.0, 2.0, 4.0, 3.0]  # the second one and the peer overwrite them


def test_losses_and_absences_are_on_the_page() -> None:
    gone = {"name": "gone", "kind": "peer", "setting": "", "status": "absent", "reason": "x is not installed"}
    ours = row("dapo_kernels", "ours", 20.0, over={"copy_": 2.0}, over_ours=1.0)
    fast = record_of(
        GPU_HIDDEN[0], row("copy_", "denominator", 10.0), ours, row("fast", "peer", 15.0, over_ours=0.75), gone
    )
    gpu = {"name": "H200", "capability": "9.0", "multiprocessors": 132, "memory_gib": 140.4, "driver": "580.159.03"}
    gpu |= {"cuda": "13.0", "backends": {"triton": "runs"}}
    results = {"suite": "gpu-hidden", "records": [fast], "machine": machine.describe() | {"gpu": gpu}, "threads": 1}
    page = report.markdown(results | {"wall_s": 1.0})
    for cells in (f"{GPU_HIDDEN[0].name}: fast takes 0.75", "- gone, 1", "580.159.03"):
        assert cells in page
    assert "| dapo_kernels |  | 20.00 | 20.00–20.00 | 2.00 | 1.00 |" in page


def test_trl_is_quoted_at_its_best_and_ours_under_the_same() -> None:
    theirs = {OUT_OF_THE_BOX: 40.0, RAISED: 25.0, BOTH: 27.0}

    def measure(side: str, allocator: str, options: argparse.Namespace) -> dict[str, Any]:
        seconds = theirs.get(allocator, 30.0) if side == "TRL" else 10.0
        phases = {"rollout": 0.4 * seconds, "forward_backward": 0.5 * seconds, "other": 0.1 * seconds}
        steps = [bench_ranks.Step(phases, {"train/tokens": 1000})] * 2
        return {"side": side, "allocator": allocator, "steps": steps, "versions": {"trl": "1.16.0"}, "peak_gib": 1.0}

    options = argparse.Namespace(steps=2)
    results = step.measure_all(options, measure)
    assert [r["allocator"] for r in results if r["side"] == "TRL"] == list(ALLOCATORS)
    ours = [(side, RAISED) for side in step.OURS] + [("runner", OUT_OF_THE_BOX)]
    assert [(r["side"], r["allocator"]) for r in results if r["side"] != "TRL"] == ours
    page = step.page(results, options, machine.describe())
    assert "| runner | thresholds raised | 10.00 | 1000 | 100 | 2.50 |" in page  # 25 ÷ 10, not 40 ÷ 10
    assert "| TRL | out of the box | 40.00 | 1000 | 25 | 0.62 |" in page


def times(vocab: int, cuda: float | None, *, new: float = 1.0, **fields: Any) -> Any:
    """A configuration in which triton takes 1 ms; ``new``: cuda's time with a new gradient."""
    fields = {"mode": "train", "level": "logits", "dtype": "bfloat16", "entropy": False, **fields}
    medians = {decide.TRITON: 1.0, decide.CUDA: cuda}
    if fields["level"] == "logits" and fields["mode"] == "train":
        medians |= dict(zip(decide.NEW_GRADIENTS, (1.0, new), strict=True))
    rows = [{"name": n, "status": "ok" if t else "failed", "median_ms": t} for n, t in medians.items()]
    return {"fields": {**fields, "vocab": vocab}, "rows": rows}


def decided(*records: Any) -> list[tuple[str, bool, int]]:
    """The kinds of calls that cuda takes, and from which vocabulary on; of one dtype."""
    rows = decide.decide(records, (9, 0))
    assert all(row.backend == "cuda" and row.dtypes == (torch.bfloat16,) for row in rows)
    return [(*row.calls, bool(row.aligned), row.vocab) for row in rows]


def test_cuda_takes_the_kinds_of_calls_and_rows_in_which_it_is_faster() -> None:
    big, small = times(151_936, 0.8), times(32_000, 0.9)
    assert decided(big, small) == [("in place", True, 32_000)]
    assert decided(big, times(32_000, 0.99)) == [("in place", True, 151_936)]
    assert decided(times(151_936, 1.0), small) == []  # not faster above
    assert decided(big, times(151_936, 1.2)) == decided(times(151_936, 1.2), big) == []  # the worst of two sizes
    assert decided(times(151_936, None)) == decided() == []
    assert decided(big, times(151_936, 1.2, entropy=True)) == [("in place", True, 151_936)]  # is another kernel
    (row,) = decide.decide([times(151_936, 0.9, entropy=True)], (9, 0))
    assert (row.calls, row.row_bytes) == (("in place with entropy",), registry.CLUSTER_ROW_BYTES)
    # An odd vocabulary: 4 float32 logits are 16 bytes, 4 in bfloat16 are not.
    (row,) = decide.decide([times(100, 0.5, dtype="float32")], (9, 0))
    assert (row.aligned, row.row_bytes) == (True, registry.CLUSTER_ROW_BYTES)
    assert decide.decide([times(101, 1.0, new=0.5)], (9, 0))[0].row_bytes is None  # of the kernels of slices
    odd = times(50_257, 1.6, new=0.9), times(262_143, 2.3, new=0.8), times(262_143, 0.5, mode="forward")
    hidden = times(151_936, 0.98, level="hidden"), times(151_936, 0.9, level="hidden", mode="forward")
    assert set(decided(big, small, *odd, *hidden)) == {
        ("in place", True, 32_000),
        ("new gradient", False, 50_257),
        ("no gradient", False, 262_143),
        ("hidden, no gradient", True, 151_936),
    }
