"""The harness refuses wrong results, measures memory that is really taken, and reports losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import harness, machine, report
from benchmarks.configs import SUITES, Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run, eager_logprobs
from benchmarks.formulas import FORMULAS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, exceeded, find_truth

SMALL = [config for config in SUITES["smoke"] if config.isa is None]
TRAIN = [config for config in SMALL if config.mode == "train"]
MIB = 2**20


def by_name(name: str, config: Config) -> Contestant:
    return next(c for c in CONTESTANTS if c.name == name and c.takes(config))


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
    logprobs, _ = eager_logprobs(logits, problem.tokens.target_ids, entropy=False, upcast=False)
    loss = FORMULAS[config.objective](logprobs, problem.tokens)
    errors = truth.errors(Result(loss=loss, gradients=torch.autograd.grad(loss, leaves)))
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.parametrize("level", ["logits", "hidden"])
def test_the_truth_of_tokens_that_were_kept(level: str) -> None:
    config = Config(level, "float32", 64, 2048, hidden=64, n_sequences=2, live=0.5, kept=5)
    problem = build(config)
    truth, kept = find_truth(problem), problem.kept()
    leaves = [x.detach().double().requires_grad_() for x in problem.inputs()]
    logits = leaves[0] if level == "logits" else leaves[0] @ leaves[1].t()
    assert kept is not None
    logprobs = logits.gather(1, kept).log_softmax(1)[:, 0]
    assert float((logprobs - problem.tokens.old_logprobs).abs().max()) < 0.06  # inside the clip range
    loss = FORMULAS[config.objective](logprobs, problem.tokens)
    errors = truth.errors(Result(loss=loss, gradients=torch.autograd.grad(loss, leaves)))
    assert max(errors.values()) < 1e-11, errors
    contestant = by_name("dapo_kernels", config)
    assert "reason" not in harness.check(contestant, contestant.make(problem)(), truth)
    contestant.make(build(replace(config, kept=5000)))()  # as many as there are: lists are of ids each once


@pytest.mark.parametrize("config", TRAIN, ids=lambda config: config.name)
def test_normalizers_beyond_the_full_limit(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float64 for every row is too dear, the sampled rows still get it."""
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
        first = first * 1.1
    elif spoil == "swapped rows":
        first = first.roll(1, 0)
    elif spoil == "nan":
        first[:] = float("nan")
    elif config.level == "hidden":
        rest = [torch.zeros_like(rest[0])]
    else:
        pytest.skip("no head at the logits level")
    row = harness.check(contestant, Result(loss=loss, gradients=(first, *rest)), find_truth(problem))
    assert row["status"] == "wrong"


@pytest.mark.parametrize("clipped", [0.0, 0.25])
@pytest.mark.parametrize("live", [1.0, 0.5])
def test_shares_are_what_the_configuration_says(live: float, clipped: float) -> None:
    config = Config("logits", "float32", 64, 512, n_sequences=4, live=live, clipped=clipped)
    problem = build(config)
    tokens = problem.tokens
    assert int(tokens.mask.sum()) == live * 64
    logits = problem.inputs()[0]
    logprobs, _ = eager_logprobs(logits, tokens.target_ids, entropy=False, upcast=False)
    (slope,) = torch.autograd.grad(FORMULAS["dapo"](logprobs, tokens._replace(mask=tokens.mask | True)), logprobs)
    assert int((slope == 0).sum()) == clipped * 64


def _allocating(mib: int) -> Contestant:
    def make(problem: Problem) -> Run:
        def run() -> Result:
            scratch = torch.ones(mib * MIB, dtype=torch.uint8)
            kept = torch.ones(MIB, dtype=torch.uint8)
            del scratch
            return Result(loss=torch.zeros(()), gradients=(kept,))

        return run

    return Contestant(f"takes {mib} MiB", "", "ours", make)


@pytest.mark.parametrize("mib", [8, 96])
def test_peak_memory_is_what_was_taken(mib: int) -> None:
    problem = build(SMALL[0])
    run = _allocating(mib).make(problem)
    harness.in_child(lambda: harness.watched(run, problem)[2])
    row = harness.in_child(lambda: [harness.watched(run, problem)[2] for _ in range(2)][1])
    assert row["gradient_bytes"] == MIB
    # The kernel counts pages in per-core batches, and a heap keeps a few: a quarter of a MiB each.
    assert mib + 0.5 <= row["peak_extra_bytes"] / MIB <= mib + 5


def _dies() -> dict[str, Any]:
    raise SystemExit(3)


def test_a_child_that_dies_is_reported() -> None:
    assert "ended with" in harness.in_child(_dies)["reason"]


def test_what_does_not_fit_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * MIB)
    record = harness.measure(replace(SMALL[0], contestants=("dapo_kernels", "eager")), 1, lambda text: None)
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["eager"]["status"] == "skipped"
    assert "GiB" in rows["eager"]["reason"]
    assert "median_ms" not in rows["eager"]
    assert rows["dapo_kernels"]["median_ms"] > 0


def test_a_wrong_contestant_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(problem: Problem) -> Run:
        return lambda: Result(loss=torch.ones(()), gradients=(torch.zeros_like(problem.inputs()[0]),))

    liar = Contestant("liar", "", "peer", make)
    monkeypatch.setattr(harness, "PEERS", (liar,))
    record = harness.measure(replace(SMALL[0], contestants=("mul_", "liar")), 1, lambda text: None)
    row = next(row for row in record["rows"] if row["name"] == "liar")
    assert row["status"] == "wrong"
    assert "median_ms" not in row
    assert "gradient is off" in row["reason"] or "loss is off" in row["reason"]


def _record() -> dict[str, Any]:
    def row(name: str, kind: str, ms: float) -> dict[str, Any]:
        return {"name": name, "kind": kind, "setting": "", "status": "ok", **harness.summary([ms / 1e3])}

    rows = [row("mul_", "denominator", 10.0), row("dapo_kernels", "ours", 20.0), row("fast", "peer", 15.0)]
    rows.append({"name": "gone", "kind": "peer", "setting": "", "status": "absent", "reason": "x is not installed"})
    harness._over_denominators(rows)
    harness._over_ours(rows)
    return {"config": "a config", "allocator": "huge pages", "denominators": ["mul_"], "wall_s": 1.0, "rows": rows}


def test_losses_and_absences_are_printed() -> None:
    record = _record()
    page = report.markdown(
        {
            "suite": "quick",
            "command": "python benchmarks/run.py",
            "started": "now",
            "wall_s": 1.0,
            "threads": 1,
            "machine": machine.describe(),
            "load_average_at_end": [0.0],
            "records": [record],
        }
    )
    assert "a config: fast takes 0.75 of our time" in page
    assert "| dapo_kernels |  | 20.00 | 20.00–20.00 | 2.00 | 1.00 |" in page
    assert "absent | x is not installed" in page
    assert "absent: x is not installed" in report.console(record)


def test_limits_follow_the_rounding() -> None:
    errors = {"loss": 5e-3, "gradient": 1e-3}
    assert exceeded(errors, "bfloat16 softmax") is None
    assert exceeded(errors, "bfloat16 tensors") is not None
    assert exceeded({"loss": float("nan")}, "bfloat16 softmax") is not None


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_the_table_is_sound(suite: str) -> None:
    configs = SUITES[suite]
    assert len({config.name for config in configs}) == len(configs), "two configurations of one name"
    names = {c.name for c in harness.CONTESTANTS + harness.PEERS}
    for config in configs:
        assert set(config.contestants or ()) <= names
        field = harness.field_of(config)
        denominators = [c.name for c in field if c.kind == "denominator"]
        assert len(denominators) == (2 if config.live < 1 and config.mode == "train" else 1), config.name
        assert all(", live" in name for name in denominators[1:])
        assert any(c.kind == "ours" for c in field), config.name
        assert config.n_tokens % config.n_sequences == 0
        assert config.objective in FORMULAS
    assert {config.level for config in configs} == ({"hidden"} if suite == "long" else {"logits", "hidden"})


@pytest.mark.parametrize("out", [["--out", "/somewhere"], ["--out=/somewhere"], []])
def test_a_page_names_its_command_but_no_folder_of_ours(monkeypatch: pytest.MonkeyPatch, out: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "--suite", "quick", *out, "--only", "N=1 V"])
    assert machine.command("python", "run.py") == "python run.py --suite quick --only 'N=1 V'"
