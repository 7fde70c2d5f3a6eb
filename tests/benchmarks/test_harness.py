"""The harness refuses wrong results, measures memory that is really taken, and forks for every contestant."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import configs, harness, run
from benchmarks.allocators import ALLOCATORS
from benchmarks.configs import SUITES, Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run, eager_logprobs
from benchmarks.formulas import FORMULAS
from benchmarks.meters import CpuMeter
from benchmarks.peers import PEERS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, find_truth

SMALL = SUITES["smoke"]
TRAIN = [config for config in SMALL if config.mode == "train"]
TRAIN += [replace(config, objective="entropy_bonus", entropy=True) for config in TRAIN[-2:]]
ONE = Config("logits", "float32", 32, 512, rounds=3, min_rounds=3)
each_training = pytest.mark.parametrize("config", TRAIN, ids=lambda config: config.name)


def by_name(name: str, config: Config) -> Contestant:
    return next(c for c in CONTESTANTS if c.name == name and c.can_do(config))


def measure(config: Config, *contestants: Contestant) -> dict[str, dict[str, Any]]:
    """Return the rows by name."""
    *_, record = harness.measure(config, 1, list(contestants))
    return {row["name"]: row for row in record["rows"]}


@each_training
def test_truth_is_float64_autograd(config: Config) -> None:
    problem = build(config)
    problem.restore()
    truth = find_truth(problem)
    leaves = [x.detach().double().requires_grad_() for x in problem.inputs()]
    logits = leaves[0] if config.level == "logits" else leaves[0] @ leaves[1].t()
    logprobs, entropy = eager_logprobs(logits, problem.tokens.target_ids, entropy=config.entropy, upcast=False)
    loss = FORMULAS[config.objective](logprobs, problem.tokens._replace(entropy=entropy))
    errors = truth.errors(Result(loss=loss, gradients=torch.autograd.grad(loss, leaves)))
    assert max(errors.values()) < 1e-11, errors


@each_training
def test_wrong_results_are_refused(config: Config) -> None:
    problem = build(config)
    problem.restore()
    contestant, truth = by_name("dapo_kernels", config), find_truth(problem)
    good = contestant.make(problem)()
    assert good.loss is not None
    loss, (first, *rest) = good.loss.detach(), (g.detach().clone() for g in good.gradients)
    holed = first.clone()
    holed[0, 0] = torch.nan
    spoilt = [(loss + 0.05, first, rest), *((loss, x, rest) for x in (1.1 * first, first.flip(0), holed))]
    spoilt += [(loss, first, [torch.zeros_like(x) for x in rest])] if rest else []
    assert "reason" not in harness.check(contestant, Result(loss=loss, gradients=(first, *rest)), truth)
    for bad_loss, bad, others in spoilt:
        row = harness.check(contestant, Result(loss=bad_loss, gradients=(bad, *others)), truth)
        assert row["status"] == "wrong"


@pytest.mark.parametrize("mib", [40, 96])  # from 33 on glibc always takes fresh memory
def test_peak_memory_is_what_was_taken(mib: int) -> None:
    problem = build(SMALL[0])

    def call() -> Result:
        scratch = torch.ones(mib * 2**20, dtype=torch.uint8)
        kept = torch.ones(2**20, dtype=torch.uint8)
        del scratch
        return Result(loss=torch.zeros(()), gradients=(kept,))

    def measured() -> dict[str, Any]:
        ctypes.CDLL(None).mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, which the tests of the command raise
        return [harness.memory(call, problem, CpuMeter()) for _ in range(2)][1]

    row = harness.in_child(measured)
    assert row["gradient_bytes"] == 2**20
    # The kernel counts pages in per-core batches, and a heap keeps a few: a quarter of a MiB each.
    assert mib + 0.5 <= row["peak_extra_bytes"] / 2**20 <= mib + 5
    assert harness.in_child(lambda: sys.exit(3))["status"] == "failed"


def test_each_takes_turns_with_its_denominator_in_a_process_of_its_own(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def noting(name: str, kind: str) -> Contestant:
        def make(problem: Problem) -> Run:
            def call() -> Result:
                with notes.open("a") as file:
                    print(os.getpid(), name, file=file)
                return Result() if kind == "denominator" else by_name("eager", ONE).make(problem)()

            return call

        return Contestant(name, "", kind, make)

    rows = measure(ONE, noting("pass", "denominator"), noting("a", "ours"), noting("b", "peer"))
    lines = [line.split() for line in notes.read_text().splitlines()]
    pids = {name: {pid for pid, who in lines if who == name} for name in ("pass", "a", "b")}
    assert len(pids["a"]) == len(pids["b"]) == 1
    assert pids["a"] != pids["b"]
    assert pids["pass"] == pids["a"] | pids["b"]
    assert str(os.getpid()) not in pids["pass"]
    for name in ("a", "b"):
        assert [who for pid, who in lines if {pid} == pids[name]][-6:] == ["pass", name] * 3
        assert set(rows[name]["over"]) == {"pass"}
    assert len(rows["pass"]["times_ms"]) == 6  # of both processes


def zeros(problem: Problem) -> Run:
    return lambda: Result(loss=torch.ones(()), gradients=(torch.zeros_like(problem.inputs()[0]),))


def test_what_is_measured_is_there_before_the_rest() -> None:
    field = [by_name(name, ONE) for name in ("mul_", "eager", "dapo_kernels")]
    reached = [
        [row["name"] for row in record["rows"] if row["status"] == "ok" and "over_ours" in row]
        for record in harness.measure(ONE, 1, field)
    ]
    assert reached == [[], ["mul_", "eager", "dapo_kernels"], ["mul_", "eager", "dapo_kernels"]]


def test_what_does_not_fit_or_is_wrong_has_no_figure() -> None:
    wrong = measure(SMALL[0], by_name("mul_", SMALL[0]), Contestant("liar", "", "peer", zeros))["liar"]

    def lacks_memory(problem: Problem) -> Run:
        return lambda: Result(loss=torch.empty(2**50))

    skipped = measure(SMALL[0], Contestant("huge", "", "peer", lacks_memory))["huge"]
    assert (wrong["status"], skipped["status"]) == ("wrong", "skipped")
    assert not {"median_ms"} & (wrong.keys() | skipped.keys())


def test_padding_has_a_denominator_of_live_tokens_too() -> None:
    config = replace(ONE, level="hidden", hidden=64, live=0.5, n_sequences=2, rounds=1, min_rounds=1)
    names = ("GEMMs", "GEMMs, live tokens", "dapo_kernels")
    ours = measure(config, *(by_name(name, config) for name in names))["dapo_kernels"]
    assert list(ours["over"]) == list(names[:2])


@pytest.mark.parametrize("setting", ALLOCATORS)
def test_a_worker_gets_its_allocator_and_no_other(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {"MALLOC_TRIM_THRESHOLD_": "1", "THP_MEM_ALLOC_ENABLE": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    found = run._environment(replace(ONE, allocator=setting))
    chosen = {name for each in ALLOCATORS.values() for name in each} | stale.keys()
    assert {name: value for name, value in found.items() if name in chosen} == ALLOCATORS[setting]


def raises(problem: Problem) -> Run:
    def call() -> Result:
        raise RuntimeError("no kernel image\nand more")

    return call


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration of a GPU, on CPU tensors."""
    monkeypatch.setattr(configs, "REHEARSAL", True)
    return replace(ONE, device="cuda")


def test_on_a_gpu_nothing_forks_and_a_contestant_that_raises_is_named(rehearsal: Config) -> None:
    pids = []

    def noting(problem: Problem) -> Run:
        pids.append(os.getpid())
        return by_name("eager", ONE).make(problem)

    names = ("mul_", "dapo_kernels", "dapo_kernels, new gradient")
    field = [Contestant("raises", "", "peer", raises, modules=("torch.absent",))]  # which is not imported beforehand
    field += [by_name(name, rehearsal) for name in names]
    rows = measure(rehearsal, *field, Contestant("noting", "", "eager", noting))
    assert pids == [os.getpid()]
    assert (rows["raises"]["status"], rows["raises"]["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert all(len(rows[name]["times_ms"]) == 3 for name in (*names[1:], "noting"))
    assert rows["dapo_kernels"]["gradient_bytes"] == 0
    assert rows["dapo_kernels, new gradient"]["gradient_bytes"] == 32 * 512 * 4
    assert max(rows["noting"]["errors"].values()) < 1e-5


def test_nothing_is_measured_on_a_device_that_is_lost(rehearsal: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(meter: CpuMeter) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(CpuMeter, "release", lost)
    with pytest.raises(RuntimeError, match="lost"):
        measure(rehearsal, by_name("mul_", ONE), Contestant("raises", "", "peer", raises))


def test_liger_multiplies_with_tf32_on_a_gpu_and_nobody_else_does(
    rehearsal: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def loss(states: Tensor, weight: Tensor, *_: Any, **options: Any) -> tuple[Tensor]:
        seen.append(torch.get_float32_matmul_precision())
        return (states.sum() + weight.sum(),)

    liger = SimpleNamespace(LigerFusedLinearGRPOLoss=lambda **options: loss)
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", liger)
    (contestant,) = (c for c in PEERS if c.name == "Liger GRPO")
    hidden = replace(ONE, level="hidden", hidden=64)
    for config in (hidden, replace(hidden, device="cuda")):
        contestant.make(build(config))()
        assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["highest", "high"]


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch before 2.13")
def test_torchs_own_cross_entropy_takes_its_defaults_on_a_gpu(
    rehearsal: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, function = [], torch.nn.functional.linear_cross_entropy
    record = lambda *given, **options: seen.append(options) or function(*given, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", record)
    on_cpu = replace(ONE, level="hidden", hidden=64, n_tokens=128, objective="reinforce")
    for config in (on_cpu, replace(on_cpu, device="cuda")):
        for contestant in harness.contestants_of(config):
            if contestant.name.startswith("linear_cross_entropy, chunked"):
                problem = build(config)
                row = harness.check(contestant, contestant.make(problem)(), find_truth(problem))
                assert "reason" not in row
    defaults = torch.nn.LinearCrossEntropyOptions()
    assert [options.get("reduction", "mean") for options in seen] == ["none", "none", "mean"]
    assert [options["options"] == defaults for options in seen] == [False, True, True]


def test_the_kernel_of_verl_is_imported_without_ray() -> None:
    pytest.importorskip("verl")
    program = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from benchmarks.peers import import_verl
print(callable(import_verl().linear_cross_entropy), sys.modules.get("ray"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.stdout.split()[-2:] == ["True", "None"], done.stderr


@pytest.mark.parametrize(
    "base", [ONE, replace(ONE, level="hidden", hidden=128), replace(ONE, live=0.5)], ids=lambda c: c.name
)
def test_inputs_and_contestants_stay_on_the_device(base: Config) -> None:
    """On "meta", a device that every machine has and whose tensors refuse to meet those of another."""
    problem = build(replace(base, device="meta"))
    problem.restore()
    for tensor in (*problem.inputs(), *problem.tokens[:4], *problem.exact):
        assert tensor.device.type == "meta"
    if base.level == "logits":
        assert find_truth(problem).row_gradient.device.type == "meta"
    ran = [c for c in harness.contestants_of(replace(base, device="cuda")) if c.kind in ("denominator", "eager")]
    assert len(ran) == (3 if base.level == "logits" else 2)
    for contestant in ran:
        result = contestant.make(problem)()
        assert all(g.device.type == "meta" for g in result.gradients)
