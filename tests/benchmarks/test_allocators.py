"""The allocator of every figure: set before the process starts, seen to be in force, and the page quotes the best."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allocators, bars, cpu_report, harness, report, workers
from benchmarks.allocators import ALLOCATORS, BOTH, HUGE_PAGES, OUT_OF_THE_BOX, RAISED
from benchmarks.configs import HEADLINE, SUITES, TINY, Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run
from benchmarks.gpu_peers import GPU_PEERS
from benchmarks.peers import PEERS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, find_truth

ROOT = Path(__file__).parents[2]
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMALL = Config("logits", "float32", 32, 512, rounds=3, min_rounds=3)


def _faults(setting: str) -> dict[str, float]:
    program = "import json; from benchmarks.allocators import faults; print(json.dumps(faults()._asdict()))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=allocators.environment(setting), cwd=ROOT, capture_output=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="this system gives no huge pages")
@pytest.mark.parametrize("setting", ALLOCATORS)
def test_a_setting_is_in_force(setting: str) -> None:
    found = _faults(setting)
    keeps, huge = setting in (RAISED, BOTH), setting in (HUGE_PAGES, BOTH)
    assert found["malloc"] < 1 if keeps else found["malloc"] > 200
    assert found["fresh_tensor"] < 64 if huge else found["fresh_tensor"] > 200


@pytest.mark.parametrize("setting", ALLOCATORS)
def test_a_worker_gets_its_setting_and_no_other(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {"MALLOC_TRIM_THRESHOLD_": "1", "THP_MEM_ALLOC_ENABLE": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    found = workers._environment(replace(SMALL, allocator=setting), threads=1)
    assert allocators.mismatch(setting, found) is None
    for other in set(ALLOCATORS) - {setting}:
        assert "differ" in (allocators.mismatch(other, found) or "")
    assert "GLIBC_TUNABLES" in (allocators.mismatch(setting, {**found, "GLIBC_TUNABLES": "x"}) or "")


def test_figures_under_a_wrong_name_are_refused() -> None:
    with pytest.raises(RuntimeError, match="this process does not run huge pages"):
        harness.measure(replace(SMALL, allocator=HUGE_PAGES), 1, lambda text: None)


def test_every_side_of_the_headline_goes_through_every_setting() -> None:
    for config in HEADLINE:
        assert config.contestants is None
        for setting in ALLOCATORS:
            assert replace(config, allocator=setting) in SUITES["full"]
            assert replace(config, allocator=setting) in SUITES["headline"]
    for config in SUITES["full"]:
        assert config.headline or config.allocator == HUGE_PAGES
        assert config.allocator in config.name
    assert {c.name for c in PEERS if c.for_gpus} == {
        "TRL selective_log_softmax",
        "TRL chunked log-probs",
        "Liger GRPO",
    }


def _noting_its_process(name: str, kind: str) -> Contestant:
    def make(problem: Problem) -> Run:
        def run() -> Result:
            with open(os.environ["NOTES"], "a") as notes:
                print(os.getpid(), name, file=notes)
            ours = next(c for c in CONTESTANTS if c.name == "dapo_kernels, new gradient")
            return Result() if kind == "denominator" else ours.make(problem)()

        return run

    return Contestant(name, "", kind, make)


def test_a_side_takes_turns_with_its_denominator_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    field = [_noting_its_process(n, k) for n, k in (("pass", "denominator"), ("a", "ours"), ("b", "peer"))]
    monkeypatch.setattr(harness, "field_of", lambda config: field)
    record = harness.measure(SMALL, 1, lambda text: None)
    lines = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    of = {name: {pid for pid, who in lines if who == name} for name in ("pass", "a", "b")}
    assert len(of["a"]) == len(of["b"]) == 1
    assert of["a"] != of["b"]
    assert of["pass"] == of["a"] | of["b"]
    assert str(os.getpid()) not in of["pass"]
    for name in ("a", "b"):
        turns = [who for pid, who in lines if {pid} == of[name]]
        assert turns[-6:] == ["pass", name] * 3
    rows = {row["name"]: row for row in record["rows"]}
    assert len(rows["pass"]["times_ms"]) == 6  # of both processes
    for name in ("a", "b"):
        assert rows[name]["over_denominator"] == rows[name]["over"]["pass"]
    assert record["allocator"] == OUT_OF_THE_BOX
    assert set(record["page_faults_per_mib"]) == {"malloc", "fresh_tensor"}


def test_few_live_tokens_have_both_denominators() -> None:
    config = Config("hidden", "float32", 32, 512, hidden=64, live=0.5, n_sequences=2, rounds=3, min_rounds=3)
    record = harness.measure(
        replace(config, contestants=("three GEMMs", "three GEMMs, live tokens", "dapo_kernels")), 1, lambda text: None
    )
    ours = next(row for row in record["rows"] if row["name"] == "dapo_kernels")
    assert list(ours["over"]) == ["three GEMMs", "three GEMMs, live tokens"]
    page = report.table(record)
    assert "÷ three GEMMs | ÷ three GEMMs, live tokens |" in page
    live = next(c for c in CONTESTANTS if c.name == "mul_, live rows")
    problem = build(replace(config, level="logits", hidden=0))
    assert problem.logits is not None
    problem.logits.fill_(float("nan"))  # a pass over dead rows would not show in zeros
    for rows in problem.live_rows():
        problem.logits[rows] = 1.0
    live.make(problem)()
    assert (~problem.logits.isnan()).all(1).equal(problem.tokens.mask)


def test_problems_of_one_input_differ_in_what_is_asked() -> None:
    first, second = build(SMALL), build(replace(SMALL, clipped=0.5, live=0.5))
    assert first.pristine is second.pristine
    assert first.logits is not second.logits
    find_truth(first)
    assert second.exact is first.exact
    assert not first.tokens.old_logprobs.equal(second.tokens.old_logprobs)
    other = build(replace(SMALL, vocab=256))
    assert other.exact == {}


# --- the page ---------------------------------------------------------------------------------------------


def _group(*sides: tuple[str, str, dict[str, float]], config: Config = HEADLINE[0]) -> list[dict[str, Any]]:
    """Records of one workload: (name, kind, ms under each setting)."""
    group = []
    for setting in sides[0][2]:
        rows = []
        for name, kind, ms in sides:
            row = {"name": name, "kind": kind, "setting": "", "status": "ok", "for_gpus": name == "Liger"}
            rows.append({**row, **harness.summary([ms[setting] / 1e3]), "peak_extra_bytes": 7 * 2**20})
            rows[-1]["gradient_bytes"] = 0
        harness._over_denominators(rows)
        harness._over_ours(rows)
        here = replace(config, allocator=setting)
        names = [row["name"] for row in rows if row["kind"] == "denominator"]
        record = {"config": here.name, "workload": here.workload, "allocator": setting, "fields": vars(here)}
        group.append({**record, "denominators": names, "rows": rows, "wall_s": 1.0})
    return group


GROUP = _group(
    ("mul_", "denominator", {OUT_OF_THE_BOX: 12.0, RAISED: 12.0, HUGE_PAGES: 8.0}),
    ("dapo_kernels", "ours", {OUT_OF_THE_BOX: 16.0, RAISED: 18.0, HUGE_PAGES: 10.0}),
    ("eager", "eager", {OUT_OF_THE_BOX: 300.0, RAISED: 72.0, HUGE_PAGES: 80.0}),
    ("Liger", "peer", {OUT_OF_THE_BOX: 400.0, RAISED: 500.0, HUGE_PAGES: 600.0}),
)


def _cells(page: str, side: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {side} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_peer_is_quoted_at_its_best_and_ours_under_the_same() -> None:
    page = cpu_report.headline(GROUP)
    head = _cells(page, "side")
    eager = dict(zip(head, _cells(page, "eager"), strict=True))
    assert eager["its best"] == RAISED
    assert eager["there: its time ÷ ours"] == "4.00"  # 72 ÷ 18, not 72 ÷ 10 nor 300 ÷ 16
    assert eager["there: our time ÷ its"] == "0.25"
    assert eager["there: ÷ the fastest mul_"] == "9.00"  # 72 ÷ 8
    assert eager["there: GB/s, one read and one write of the logits"] == "11"  # 2 · 2048 · 49152 · 4 bytes in 72 ms
    assert eager["there: peak beyond inputs, MiB"] == "7"
    assert [eager[f"{name}: ms (÷ mul_)"] for name in (OUT_OF_THE_BOX, RAISED)] == ["300 (25.00)", "72 (6.00)"]
    names = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert names[-2:] == ["*written for GPUs:*", "Liger"]


def test_opponents_are_compared_with_our_call_that_treats_the_logits_alike() -> None:
    rows = [
        {"kind": kind, "destroys_logits": destroys, "median_ms": ms}
        for kind, destroys, ms in (
            *(("denominator", False, 8.0), ("ours", True, 10.0), ("ours", False, 20.0)),
            *(("eager", False, 80.0), ("peer", True, 30.0)),
        )
    ]
    harness._over_ours(rows)
    assert [row["over_ours"] for row in rows] == [0.8, 1.0, 2.0, 4.0, 3.0]
    destroying = {c.name for c in (*CONTESTANTS, *PEERS, *GPU_PEERS) if c.destroys_logits}
    assert destroying == {
        *("dapo_kernels", "Liger GRPO, Triton", "quack cross_entropy", "flash-attn cross_entropy_loss"),
    }


def test_passes_that_are_far_apart_are_pointed_out() -> None:
    noisy = _group(("mul_", "denominator", {HUGE_PAGES: 8.0}), ("dapo_kernels", "ours", {HUGE_PAGES: 12.0}))
    eager = {**noisy[0]["rows"][1], "name": "eager", "kind": "eager", "over_denominator": 1.0}  # its mul_ took 12 ms
    noisy[0]["rows"].append(eager)
    assert "mul_ took 8 to 12 ms" in cpu_report.headline(noisy)
    assert "far apart" in cpu_report.headline(noisy)
    assert "far apart" not in cpu_report.headline(GROUP)
    ours, eager = noisy[0]["rows"][1:]
    ours |= {"median_ms": 15.0, "over_denominator": 1.25}  # in a process whose pass took 12 ms
    eager |= {"median_ms": 80.0, "over_denominator": 10.0}  # 8 ms
    assert "1.875 × | not met" in bars.table(cpu_report.BARS, noisy)


def test_the_plot_shows_the_same() -> None:
    ((title, sides),) = report._panels(GROUP)
    assert title.endswith("under the same allocator")
    assert {label: value for label, _, value, _ in sides}[f"eager ({RAISED})"] == pytest.approx(4.0)


def test_bars_of_the_cpu() -> None:
    page = bars.table(cpu_report.BARS, GROUP)
    assert (
        "| logits fp32, in place, huge pages: ≤ 1.35 × the fastest `mul_` | logits float32 N=2048 V=49152, huge pages |"
        in page
    )
    assert "1.250 × | met |" in page
    assert "out of the box" not in page  # 16 ÷ 12 is another setting's
    slow = _group(("mul_", "denominator", {HUGE_PAGES: 8.0}), ("dapo_kernels", "ours", {HUGE_PAGES: 12.0}))
    assert "1.500 × | not met |" in bars.table(cpu_report.BARS, slow)
    tiny = _group(
        ("mul_", "denominator", {HUGE_PAGES: 0.01}),
        ("dapo_kernels", "ours", {HUGE_PAGES: 0.21}),
        ("eager", "eager", {HUGE_PAGES: 0.12}),
        config=TINY,
    )
    page = bars.table(cpu_report.BARS, tiny)
    assert "1.750 × | not met |" in page
    assert "0.210 ms | not met |" in page


def test_each_bar_has_its_configuration() -> None:
    everything = [{"fields": vars(config)} for suite in ("full", "long") for config in SUITES[suite]]
    for bar in cpu_report.BARS:
        assert len([record for record in everything if bar.applies(record)]) == 1, bar.what
