"""The benchmarks for a GPU, as far as a machine without one can run them: tables, plumbing, report, contestants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bars, gpu_report, harness, machine, report, run, workers
from benchmarks.allocators import HUGE_PAGES
from benchmarks.configs import Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run
from benchmarks.formulas import FORMULAS
from benchmarks.gpu_configs import GPU, GPU_SMOKE, HEADS, LIVE, N_TOKENS
from benchmarks.gpu_peers import GPU_PEERS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, find_truth

ROOT = Path(__file__).parents[2]
LOGITS = Config("logits", "float32", 32, 512, rounds=3, min_rounds=3)
HIDDEN = replace(LOGITS, level="hidden", hidden=128)


# --- the tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", [GPU, GPU_SMOKE], ids=["gpu", "gpu-smoke"])
def test_the_table_is_sound(suite: Sequence[Config]) -> None:
    names = {c.name for c in harness.CONTESTANTS + harness.PEERS}
    assert len({config.name for config in suite}) == len(suite), "two configurations of one name"
    for config in suite:
        assert config.device == "cuda"
        assert set(config.contestants or ()) <= names
        field = harness.field_of(config)
        assert field[0].kind == "denominator", config.name
        assert field[0].name == ("copy_" if config.level == "logits" else field[0].name)
        assert next(c for c in field if c.kind == "ours").name == "dapo_kernels"
        assert config.n_tokens % config.n_sequences == 0
        assert config.objective in FORMULAS


def test_every_size_head_and_live_share_is_there() -> None:
    rows = {(c.level, c.n_tokens, c.hidden, c.vocab, c.live) for c in GPU if c.mode == "train" and c.clipped == 0}
    for n in N_TOKENS:
        for hidden, vocab in HEADS:
            for live in LIVE:
                assert ("hidden", n, hidden, vocab, live) in rows
                assert any(("logits", n, h, vocab, live) in rows for h in (0, hidden))
    assert {c.name for c in harness.field_of(GPU[0])} >= {c.name for c in GPU_PEERS[:3]} | {"torch.compile", "eager"}
    assert [bool(gpu_report.BARS[0].applies({"fields": vars(c)})) for c in GPU[:2]] == [True, False]
    assert all(gpu_report.BARS[k].applies({"fields": vars(GPU[1])}) for k in (1, 2))


# --- other libraries' contestants, on stand-ins with their signatures --------------------------------------


def cross_entropy(x: Tensor, target: Tensor, reduction: str = "mean", inplace_backward: bool = False) -> Tensor:
    return F.cross_entropy(x.float(), target, reduction=reduction)


def flash_cross_entropy(logits: Tensor, labels: Tensor, inplace_backward: bool = False) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    return losses, torch.zeros_like(losses)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str = "mean", **_: bool
) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).float(), target, reduction=reduction)


def mean_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, None, target)


def grpo_loss(
    logits: Tensor,
    old_logp: Tensor,
    ref_logp: None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    loss_type: str,
    reduce: bool,
) -> tuple[Tensor, list[Tensor]]:
    assert logits.shape[1] == completion_ids.shape[1] + 1
    assert (temperature, beta, loss_type, reduce) == (1.0, 0.0, "dapo", True)
    logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, completion_ids[..., None])[..., 0]
    ratio = torch.exp(logp - old_logp)
    a = advantages[:, None]
    losses = -torch.minimum(ratio * a, ratio.clamp(1 - eps_low, 1 + eps_high) * a)
    return (losses * completion_mask).sum() / completion_mask.sum(), []


def cut_cross_entropy(
    e: Tensor, c: Tensor, targets: Tensor, reduction: str = "mean", filter_eps: str | None = "high"
) -> Tensor:
    assert filter_eps in ("high", None)
    return linear_cross_entropy(e, c, None, targets, reduction)


def verl_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none"
) -> tuple[Tensor, Tensor]:
    assert hidden.shape[1] % 128 == 0
    assert (temperature, reduction) == (1.0, "none")
    logp = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def megatron_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: None = None, reduction: str = "mean"
) -> Tensor:
    return linear_cross_entropy(hidden, weight, None, labels, reduction)


class LigerScaled:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, target: Tensor, return_entropy: bool = False) -> Any:
        logprobs, entropy = verl_linear_cross_entropy(x, weight, target)
        return (-logprobs, entropy) if return_entropy else -logprobs


STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    "quack.cross_entropy": {"cross_entropy": cross_entropy},
    "quack.linear_cross_entropy": {
        "linear_cross_entropy_func": linear_cross_entropy,
        "chunked_linear_cross_entropy": mean_cross_entropy,
    },
    "cut_cross_entropy": {"linear_cross_entropy": cut_cross_entropy},
    "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": verl_linear_cross_entropy},
    "megatron.core.fusions.fused_linear_cross_entropy": {"linear_cross_entropy": megatron_linear_cross_entropy},
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": flash_cross_entropy},
    "liger_kernel.transformers.grpo_loss": {"triton_grpo_loss": grpo_loss},
    "liger_kernel.ops.fused_linear_scaled_cross_entropy": {"LigerFusedLinearScaledCrossEntropyFunction": LigerScaled},
    "liger_kernel.transformers.functional": {"liger_fused_linear_cross_entropy": mean_cross_entropy},
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, functions in STAND_INS.items():
        parts = path.split(".")
        for k in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:k]), types.ModuleType(parts[k - 1]))
        module = types.ModuleType(path)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize("contestant", GPU_PEERS, ids=lambda c: c.name)
def test_peers_do_the_same_work(stand_ins: None, contestant: Contestant) -> None:
    """Fed with a stand-in that has the library's signature, each gives what the check wants."""
    assert {m for c in GPU_PEERS for m in c.modules} == set(STAND_INS)
    ran = 0
    base = (LOGITS, HIDDEN, replace(HIDDEN, objective="reinforce"), replace(LOGITS, live=0.5, clipped=0.3))
    for config in (*base, replace(HIDDEN, mode="forward"), replace(HIDDEN, mode="forward", entropy=True)):
        if not contestant.takes(replace(config, device="cuda")):
            assert not contestant.takes(config)
            continue
        problem = build(config)
        row = harness.check(contestant, contestant.make(problem)(), find_truth(problem))
        assert "reason" not in row, (config.name, row)
        ran += 1
    assert ran


def test_only_plain_means_go_to_those_who_know_nothing_else() -> None:
    takers = [c for c in GPU_PEERS if c.takes(replace(HIDDEN, device="cuda", objective="reinforce"))]
    only_there = [c.name for c in takers if not c.takes(replace(HIDDEN, device="cuda"))]
    assert only_there == ["quack linear_cross_entropy, chunked", "Liger fused linear cross-entropy"]


# --- one process, one meter -------------------------------------------------------------------------------


class FakeMeter(harness.CudaMeter):
    """A device whose calls take a millisecond each; ``broken`` once a contestant called "breaks" has run."""

    free = 2**30
    broken = False

    def __init__(self) -> None:
        FakeMeter.broken = False

    def free_bytes(self) -> int:
        return self.free

    def call(self, run: Run) -> tuple[Result, float]:
        return run(), 1e-3

    def peak(self, run: Run, problem: Problem) -> dict[str, Any]:
        result = run()
        return {"peak_extra_bytes": 7, "gradient_bytes": problem.bytes_beyond_inputs(result.gradients)}

    def probe(self) -> None:
        if FakeMeter.broken:
            raise RuntimeError("the device is lost")


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(harness.METERS, "cpu", FakeMeter)


def rows_of(record: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in record["rows"]}


def measured(*names: str, config: Config = LOGITS) -> dict[str, Any]:
    return harness.measure(replace(config, contestants=names), 1, lambda text: None)


def test_a_record_from_one_process(fake_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "in_child", lambda work: pytest.fail("a CUDA context does not survive a fork"))
    record = measured("mul_", "dapo_kernels", "dapo_kernels, new gradient", "eager")
    rows = rows_of(record)
    assert record["denominators"] == ["mul_"]
    assert {row["median_ms"] for row in rows.values()} == {1.0}
    assert rows["dapo_kernels"]["peak_extra_bytes"] == 7
    assert rows["dapo_kernels"]["gradient_bytes"] == 0
    assert rows["dapo_kernels, new gradient"]["gradient_bytes"] == 32 * 512 * 4
    assert max(rows["eager"]["errors"].values()) < 1e-5


def _raising(text: str, breaks: bool = False) -> Contestant:
    def make(problem: Problem) -> Run:
        def run() -> Result:
            FakeMeter.broken = breaks
            raise RuntimeError(text)

        return run

    return Contestant("raises", "", "peer", make)


def test_a_contestant_that_raises_is_named(fake_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PEERS", (_raising("no kernel image\nand more"),))
    record = measured("mul_", "dapo_kernels", "raises")
    row = rows_of(record)["raises"]
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert rows_of(record)["dapo_kernels"]["median_ms"] == 1.0
    assert not report.is_failure(record)
    assert report.is_failure({"rows": [{**row, "kind": "ours"}]})


def test_a_lost_device_ends_the_process(fake_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PEERS", (_raising("illegal memory access", breaks=True),))
    with pytest.raises(RuntimeError, match="the device is lost"):
        measured("mul_", "dapo_kernels", "raises")


def test_what_does_not_fit_the_device_is_skipped(fake_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMeter, "free", 2**18)
    rows = rows_of(measured("mul_", "dapo_kernels", "eager"))
    assert rows["eager"]["status"] == "skipped"
    assert "GiB" in rows["eager"]["reason"]
    assert rows["dapo_kernels"]["median_ms"] == 1.0


# --- processes --------------------------------------------------------------------------------------------

_WORKER = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"progress": "at " + name}), flush=True)
    if name == os.environ.get("DIES"):
        sys.exit("killed by " + name)
    if name == os.environ.get("HANGS"):
        time.sleep(60)
    row = {"name": "dapo_kernels", "kind": "ours", "setting": "", "status": "ok", "median_ms": 1.0, "min_ms": 1.0}
    row |= {"max_ms": 1.0, "pid": os.getpid()}
    record = {"config": name, "denominators": ["copy_"], "allocator": None, "wall_s": 0, "rows": [row]}
    print(json.dumps({"record": record | {"fields": {"headline": True}}}), flush=True)
"""
SERVED = [replace(GPU[0], n_tokens=n) for n in (1, 2, 3, 4)]


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(suite: str, configs: Sequence[Config], threads: int) -> list[str]:
        return [sys.executable, "-S", "-c", _WORKER, *(config.name for config in configs)]

    monkeypatch.setattr(workers, "_command", command)


def served(configs: Sequence[Config] = SERVED, seconds: float | None = None) -> list[dict[str, Any]]:
    said: list[str] = []
    records = list(workers.measured("gpu", configs, 1, seconds, lambda config, text: said.append(config.name + text)))
    assert [record["config"] for record in records] == [config.name for config in configs]
    assert {name + "at " + name for name in (r["config"] for r in records if r["rows"])} <= set(said)
    return records


def pids(records: list[dict[str, Any]]) -> list[int]:
    return [record["rows"][0]["pid"] for record in records if record["rows"]]


def test_one_process_serves_a_device(fake_worker: None) -> None:
    assert len(set(pids(served()))) == 1
    on_cpu = [replace(c, device="cpu") for c in SERVED]
    assert len(set(pids(served(on_cpu)))) == 1
    environments = [{}, {"allocator": HUGE_PAGES}, {"allocator": HUGE_PAGES, "isa": "avx2"}, {"isa": "avx2"}]
    apart = [replace(config, **fields) for config, fields in zip(on_cpu, environments, strict=True)]
    assert len(set(pids(served(apart)))) == len(SERVED)


def test_a_worker_that_dies_leaves_the_others(fake_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", SERVED[1].name)
    records = served()
    assert "killed by" in records[1]["error"]
    assert len(set(pids(records[:1]) + pids(records[2:]))) == 2
    assert len(pids(records)) == 3


def test_time_that_is_over_is_said(fake_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGS", SERVED[2].name)
    records = served(seconds=2.0)
    assert len(pids(records)) == 2
    assert all("2 s of this run were over" in record["not_run"] for record in records[2:])


def _fake_gpu() -> dict[str, Any]:
    facts = {"name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory_gib": 140.4}
    return {**facts, "driver": "580.159.03", "cuda": "13.0", "backends": {"triton": "runs", "cuda": "not built"}}


def test_a_partial_run_leaves_its_results(
    fake_worker: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_cannot_run", lambda devices: None)
    monkeypatch.setattr(machine, "describe_gpu", _fake_gpu)
    monkeypatch.setitem(run.SUITES, "gpu", tuple(SERVED))
    monkeypatch.setenv("HANGS", SERVED[2].name)
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "gpu", "--seconds", "2", "--out", str(tmp_path)])
    assert run.main() == 0
    (found,) = tmp_path.glob("gpu-nvidia-h200-*.json")
    results = json.loads(found.read_text())
    assert [bool(record["rows"]) for record in results["records"]] == [True, True, False, False]
    page = found.with_suffix(".md").read_text()
    assert "NVIDIA H200, 140.4 GiB, 132 multiprocessors, capability 9.0, driver 580.159.03, CUDA 13.0" in page
    assert f"- {SERVED[3].name}: the 2 s of this run were over" in page
    assert "quack-kernels absent" in page
    assert "commit: " in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "gpu"])
    assert run.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh"], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "finds no CUDA device" in done.stderr


# --- the page ---------------------------------------------------------------------------------------------


def _row(name: str, kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "setting": "", "status": "ok", **harness.summary([ms / 1e3]), **more}


def _record(config: Config, *rows: dict[str, Any]) -> dict[str, Any]:
    record = {"config": config.name, "fields": vars(config), "rows": list(rows)}
    harness._over_denominators(record["rows"])
    harness._over_ours(record["rows"])
    return record


def test_bars_are_judged() -> None:
    gib = 2**30
    fast = _record(GPU[0], _row("copy_", "denominator", 1.0), _row("dapo_kernels", "ours", 1.1))
    slow = _record(replace(GPU[0], n_tokens=2048), _row("copy_", "denominator", 1.0), _row("dapo_kernels", "ours", 1.3))
    memory = {"peak_extra_bytes": 5 * gib, "gradient_bytes": gib}
    big = _record(GPU[1], _row("three GEMMs", "denominator", 40.0), _row("dapo_kernels", "ours", 43.0, **memory))
    page = bars.table(gpu_report.BARS, [fast, slow, big])
    assert "90.9% | met" in page
    assert "76.9% | not met" in page
    assert "1.075 | met" in page
    assert "4.00 GiB | not met" in page
    page = bars.table(gpu_report.BARS, [_record(replace(GPU[0], live=0.5), _row("copy_", "denominator", 1.0))])
    assert page.count("none in this run") == 3


def test_rates_of_the_denominators() -> None:
    logits = _record(GPU[0], _row("copy_", "denominator", 1.0), _row("mul_", "denominator", 2.0))
    moved = 2 * 2 * 8192 * 151936 / 1e-3 / 1e9
    assert f"copy_ {moved:.4g} GB/s" in gpu_report.rates(logits)
    assert f"mul_ {moved / 2:.4g} GB/s" in gpu_report.rates(logits)
    hidden = _record(GPU[1], _row("three GEMMs", "denominator", 40.0))
    assert f"{6 * 8192 * 151936 * 4096 / 0.04 / 1e12:.3g} TFLOP/s" in gpu_report.rates(hidden)


def test_who_is_absent_is_counted_once() -> None:
    gone = {"name": "quack", "kind": "peer", "setting": "", "status": "absent", "reason": "quack is not installed"}
    text = gpu_report.absent([{"config": "a", "rows": [gone]}, {"config": "b", "rows": [gone]}])
    assert text == "- quack, 2 configurations: absent: quack is not installed"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12.2.0",
        "580.159.03\n",
    ],
)
def test_the_drivers_version(text: str) -> None:
    assert machine.driver_version(text) == "580.159.03"
    assert machine.driver_version("") == "unknown"


def test_a_missing_backend_is_an_absence() -> None:
    ours = {c.name: c for c in CONTESTANTS}
    assert ours["dapo_kernels"].missing() is None
    if not torch.cuda.is_available():
        assert "CUDA" in (ours["dapo_kernels, triton"].missing() or "triton")
        assert ours["dapo_kernels, cuda"].missing()


# --- tensors on the device --------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [LOGITS, HIDDEN, replace(LOGITS, live=0.5, clipped=0.3)], ids=lambda c: c.name)
def test_inputs_and_contestants_stay_on_the_device(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta", a device that every machine has and whose tensors refuse to meet those of another."""
    for module in ("problem", "truth"):
        monkeypatch.setattr(f"benchmarks.{module}.seeded", lambda device, seed: None)  # nothing is drawn
    config = replace(base, device="meta")
    problem = build(config)
    for tensor in (*problem.inputs(), *problem.tokens[:4], problem.normalizer):
        assert tensor.device.type == "meta"
    if config.level == "logits":
        assert find_truth(problem).row_gradient.device.type == "meta"
    ran = [c for c in harness.field_of(replace(base, device="cuda")) if c.kind in ("denominator", "eager")]
    assert len(ran) == (3 if config.level == "logits" else 2) + (config.live < 1)
    for contestant in ran:
        result = contestant.make(problem)()
        assert all(g.device.type == "meta" for g in result.gradients)
