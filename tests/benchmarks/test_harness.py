"""The harness refuses wrong results, measures memory that is really taken, and forks for every contestant."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import allocators, configs, harness, machine, run
from benchmarks.allocators import ALLOCATORS, HUGE_PAGES, OUT_OF_THE_BOX
from benchmarks.configs import HEADLINE, SUITES, Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run, eager_logprobs
from benchmarks.formulas import FORMULAS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, exceeded, find_truth

ROOT = Path(__file__).parents[2]
SMALL = [config for config in SUITES["smoke"] if config.allocator == OUT_OF_THE_BOX]
TRAIN = [config for config in SMALL if config.mode == "train"]
TRAIN += [replace(config, objective="entropy_bonus", entropy=True) for config in TRAIN[-2:]]
ONE = Config("logits", "float32", 32, 512, rounds=3, min_rounds=3)
MIB = 2**20


def by_name(name: str, config: Config) -> Contestant:
    return next(c for c in CONTESTANTS if c.name == name and c.can_do(config))


def measure(config: Config) -> dict[str, Any]:
    return harness.measure(config, 1, lambda text: None)


# --- the check against float64 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config.name)
def test_own_and_eager_pass_the_check(config: Config) -> None:
    problem = build(config)
    truth = find_truth(problem)
    for name in ("dapo_kernels", "eager"):
        contestant = by_name(name, config)
        problem.restore()
        row = harness.check(contestant, contestant.make(problem)(), truth)
        assert "reason" not in row, (name, row)


@pytest.mark.parametrize("config", TRAIN, ids=lambda config: config.name)
def test_truth_is_float64_autograd(config: Config) -> None:
    problem = build(config)
    truth = find_truth(problem)
    leaves = [x.detach().double().requires_grad_() for x in problem.inputs()]
    logits = leaves[0] if config.level == "logits" else leaves[0] @ leaves[1].t()
    logprobs, entropy = eager_logprobs(logits, problem.tokens.target_ids, entropy=config.entropy, upcast=False)
    loss = FORMULAS[config.objective](logprobs, problem.tokens._replace(entropy=entropy))
    errors = truth.errors(Result(loss=loss, gradients=torch.autograd.grad(loss, leaves)))
    assert max(errors.values()) < 1e-11, errors
    contestant = by_name("dapo_kernels", config)
    assert "reason" not in harness.check(contestant, contestant.make(problem)(), truth)


@pytest.mark.parametrize("config", TRAIN, ids=lambda config: config.name)
def test_large_problems_get_float64_on_the_sampled_rows(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build(config)
    full = find_truth(problem)
    monkeypatch.setattr("benchmarks.truth.FULL_LIMIT", 0)
    sampled = find_truth(problem)
    # Logits from bfloat16 hidden states are rounded to bfloat16 in the float32 normalizers.
    rounded = config.level == "hidden" and config.dtype == "bfloat16"
    assert float((sampled.loss - full.loss).abs()) < (2e-3 if rounded else 1e-6)
    torch.testing.assert_close(sampled.row_gradient, full.row_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spoil", ["loss", "scaled gradient", "swapped rows", "zero head", "nan"])
@pytest.mark.parametrize("config", TRAIN, ids=lambda config: config.name)
def test_wrong_results_are_refused(config: Config, spoil: str) -> None:
    problem = build(config)
    contestant = by_name("dapo_kernels", config)
    good = contestant.make(problem)()
    assert good.loss is not None
    loss, (first, *rest) = good.loss.detach(), (g.detach().clone() for g in good.gradients)
    if spoil == "loss":
        loss = loss + 0.05
    elif spoil == "scaled gradient":
        first *= 1.1
    elif spoil == "swapped rows":
        first = first.flip(0)
    elif spoil == "nan":
        first[0, 0] = torch.nan
    elif rest:
        rest = [torch.zeros_like(rest[0])]
    else:
        pytest.skip("the logits have no head")
    row = harness.check(contestant, Result(loss=loss, gradients=(first, *rest)), find_truth(problem))
    assert row["status"] == "wrong"


def test_limits_follow_the_rounding() -> None:
    errors = {"loss": 5e-3, "gradient": 1e-3}
    assert exceeded(errors, "bfloat16 softmax") is None
    assert exceeded(errors, "bfloat16 tensors") is not None
    assert exceeded({"loss": float("nan")}, "bfloat16 softmax") is not None


def test_the_share_of_clipped_tokens_is_that_of_the_configuration() -> None:
    problem = build(replace(SMALL[0], clipped=0.25))
    tokens = problem.tokens._replace(mask=torch.ones_like(problem.tokens.mask))
    logprobs = problem.inputs()[0].detach().double().log_softmax(1).gather(1, tokens.target_ids[:, None])[:, 0]
    logprobs.requires_grad_()
    (slope,) = torch.autograd.grad(FORMULAS["dapo"](logprobs, tokens), logprobs)
    assert int((slope == 0).sum()) == 16  # of 64


def test_problems_of_one_input_share_it() -> None:
    first, second = build(ONE), build(replace(ONE, clipped=0.5, live=0.5))
    assert first.pristine is second.pristine
    assert first.logits is not second.logits
    find_truth(first)
    assert second.exact is first.exact
    assert not first.tokens.old_logprobs.equal(second.tokens.old_logprobs)
    assert build(replace(ONE, vocab=256)).exact == {}


# --- processes and memory -------------------------------------------------------------------------------------------


def _allocating(mib: int) -> Contestant:
    def make(problem: Problem) -> Run:
        def call() -> Result:
            scratch = torch.ones(mib * MIB, dtype=torch.uint8)
            kept = torch.ones(MIB, dtype=torch.uint8)
            del scratch
            return Result(loss=torch.zeros(()), gradients=(kept,))

        return call

    return Contestant(f"takes {mib} MiB", "", "ours", make)


@pytest.mark.parametrize("mib", [8, 96])
def test_peak_memory_is_what_was_taken(mib: int) -> None:
    problem = build(SMALL[0])
    call = _allocating(mib).make(problem)
    harness.in_child(lambda: harness.watched(call, problem)[2])
    row = harness.in_child(lambda: [harness.watched(call, problem)[2] for _ in range(2)][1])
    assert row["gradient_bytes"] == MIB
    # The kernel counts pages in per-core batches, and a heap keeps a few: a quarter of a MiB each.
    assert mib + 0.5 <= row["peak_extra_bytes"] / MIB <= mib + 5


def _dies() -> dict[str, Any]:
    raise SystemExit(3)


def test_a_child_that_dies_is_reported() -> None:
    assert harness.in_child(_dies)["status"] == "failed"


def _noting_its_process(name: str, kind: str) -> Contestant:
    def make(problem: Problem) -> Run:
        def call() -> Result:
            with open(os.environ["NOTES"], "a") as notes:
                print(os.getpid(), name, file=notes)
            return Result() if kind == "denominator" else by_name("dapo_kernels, new gradient", ONE).make(problem)()

        return call

    return Contestant(name, "", kind, make)


def test_each_takes_turns_with_its_denominator_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    field = [_noting_its_process(n, k) for n, k in (("pass", "denominator"), ("a", "ours"), ("b", "peer"))]
    monkeypatch.setattr(harness, "contestants_of", lambda config: field)
    record = measure(ONE)
    lines = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    pids = {name: {pid for pid, who in lines if who == name} for name in ("pass", "a", "b")}
    assert len(pids["a"]) == len(pids["b"]) == 1
    assert pids["a"] != pids["b"]
    assert pids["pass"] == pids["a"] | pids["b"]
    assert str(os.getpid()) not in pids["pass"]
    rows = {row["name"]: row for row in record["rows"]}
    for name in ("a", "b"):
        assert [who for pid, who in lines if {pid} == pids[name]][-6:] == ["pass", name] * 3
        assert rows[name]["over_denominator"] == rows[name]["over"]["pass"]
    assert len(rows["pass"]["times_ms"]) == 6  # of both processes


def test_what_does_not_fit_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * MIB)
    rows = {row["name"]: row for row in measure(replace(SMALL[0], contestants=("dapo_kernels", "eager")))["rows"]}
    assert rows["eager"]["status"] == "skipped"
    assert "median_ms" not in rows["eager"]
    assert rows["dapo_kernels"]["median_ms"] > 0


def test_a_wrong_contestant_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(problem: Problem) -> Run:
        return lambda: Result(loss=torch.ones(()), gradients=(torch.zeros_like(problem.inputs()[0]),))

    monkeypatch.setattr(harness, "PEERS", [Contestant("liar", "", "peer", make)])
    rows = {row["name"]: row for row in measure(replace(SMALL[0], contestants=("mul_", "liar")))["rows"]}
    assert rows["liar"]["status"] == "wrong"
    assert "median_ms" not in rows["liar"]


def test_padding_has_a_denominator_of_live_tokens_too() -> None:
    config = replace(ONE, level="hidden", hidden=64, live=0.5, n_sequences=2)
    record = measure(replace(config, contestants=("three GEMMs", "three GEMMs, live tokens", "dapo_kernels")))
    ours = next(row for row in record["rows"] if row["name"] == "dapo_kernels")
    assert list(ours["over"]) == ["three GEMMs", "three GEMMs, live tokens"]
    problem = build(replace(config, level="logits", hidden=0))
    assert problem.logits is not None
    problem.logits.fill_(float("nan"))  # a pass over dead rows would not show in zeros
    for rows in problem.live_rows():
        problem.logits[rows] = 1.0
    by_name("mul_, live rows", problem.config).make(problem)()
    assert (~problem.logits.isnan()).all(1).equal(problem.tokens.mask)


# --- allocators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ALLOCATORS)
def test_a_worker_gets_its_setting_and_no_other(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {"MALLOC_TRIM_THRESHOLD_": "1", "THP_MEM_ALLOC_ENABLE": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    found = run._environment(replace(ONE, allocator=setting), threads=1)
    assert allocators.mismatch(setting, found) is None
    assert all(allocators.mismatch(other, found) for other in set(ALLOCATORS) - {setting})
    assert allocators.mismatch(setting, {**found, "GLIBC_TUNABLES": "x"})


def test_figures_under_a_wrong_name_are_refused() -> None:
    with pytest.raises(RuntimeError, match=HUGE_PAGES):
        measure(replace(ONE, allocator=HUGE_PAGES))


# --- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_the_table_is_sound(suite: str) -> None:
    rows = SUITES[suite]
    assert len({config.name for config in rows}) == len(rows), "two configurations of one name"
    names = {c.name for c in (*harness.CONTESTANTS, *harness.TUNED, *harness.PEERS)}
    for config in rows:
        assert set(config.contestants or ()) <= names
        field = harness.contestants_of(config)
        assert field[0].kind == "denominator", config.name
        assert config.device == "cpu" or field[0].name == "copy_" or config.level == "hidden"
        assert next(c for c in field if c.kind == "ours").name.startswith("dapo_kernels")
        assert config.n_tokens % config.n_sequences == 0
        assert config.objective in FORMULAS


def test_the_headline_runs_under_every_allocator() -> None:
    for config in HEADLINE:
        assert config.contestants is None
        for setting in ALLOCATORS:
            assert any(row.name == replace(config, allocator=setting).name for row in SUITES["full"])


# --- side by side, as on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA configurations on CPU tensors."""
    monkeypatch.setattr(configs, "REHEARSAL", True)


ON_GPU = replace(ONE, device="cuda")


@pytest.mark.usefixtures("rehearsal")
def test_on_a_gpu_nothing_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "in_child", lambda work: pytest.fail("a CUDA context does not survive a fork"))
    names = ("copy_", "dapo_kernels", "dapo_kernels, new gradient", "eager")
    record = measure(replace(ON_GPU, contestants=names))
    rows = {row["name"]: row for row in record["rows"]}
    assert record["denominators"] == ["copy_"]
    assert record["allocator"] is None
    assert all(len(row["times_ms"]) == 3 for row in rows.values())
    assert rows["dapo_kernels"]["gradient_bytes"] == 0
    assert rows["dapo_kernels, new gradient"]["gradient_bytes"] == 32 * 512 * 4
    assert max(rows["eager"]["errors"].values()) < 1e-5


def _raises(problem: Problem) -> Run:
    def call() -> Result:
        raise RuntimeError("no kernel image\nand more")

    return call


@pytest.mark.usefixtures("rehearsal")
@pytest.mark.parametrize("device_is_lost", [False, True])
def test_a_contestant_that_raises_is_named(device_is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(self: object) -> None:
        if device_is_lost:
            raise RuntimeError("the device is lost")

    monkeypatch.setattr(harness.RehearsalMeter, "probe", probe)
    monkeypatch.setattr(harness, "PEERS", [Contestant("raises", "", "peer", _raises)])
    config = replace(ON_GPU, contestants=("copy_", "dapo_kernels", "raises"))
    if device_is_lost:  # no later figure could be trusted
        with pytest.raises(RuntimeError, match="lost"):
            measure(config)
        return
    rows = {row["name"]: row for row in measure(config)["rows"]}
    assert (rows["raises"]["status"], rows["raises"]["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert rows["dapo_kernels"]["median_ms"] > 0
