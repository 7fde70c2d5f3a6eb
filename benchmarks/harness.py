"""Memory, check, clock: for one configuration, its contestants.

On the CPU every contestant has a process of its own, forked from one that only holds the inputs (built on one thread,
so that it may fork) and in which nobody computed. There:

1. It makes its own copy of logits that are worked on: pages of its own allocator, not copies of the parent's.
2. A tiny call loads code. The first call at full size is compared with float64; who fails is reported and not timed.
3. Memory: freed memory goes back to the system (``malloc_trim``), the kernel's high-water mark is reset
   (``/proc/self/clear_refs``), and a second call is made (the first is taken if it was long): the high-water mark
   (``VmHWM``) minus what was resident before it, good to a quarter of a MiB, the batches in which the kernel counts
   pages. Inputs, and the denominators' buffers, are resident already and do not count.
4. Clock: rounds of the denominators and one call (M A M A …). Before each the inputs are restored, outside the clock.
   The clock stops when the gradients exist; freeing them is outside. Every ratio to a denominator is one of medians
   from the same process. The denominator's own row is of all processes.

On a CUDA device (``cuda_clock.py``) nothing forks: all run in one process, in rounds of one call each (A B C A B C …),
and memory is the allocator's count, of the call after the checked one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks import allocators, machine
from benchmarks.configs import Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run
from benchmarks.cuda_clock import CudaMeter
from benchmarks.gpu_peers import GPU_PEERS
from benchmarks.peers import PEERS as ANY_PEERS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, Truth, exceeded, find_truth
from dapo_kernels.memory import release_workspace

# A call this long is not repeated to see what its first run alone took; unless it compiles.
_LONG_CALL_S = 2.0
# Share of the available memory that inputs and a contestant together may take.
_MEMORY_SHARE = 0.85

Report = Callable[[str], None]
Row = dict[str, Any]
PEERS = (*ANY_PEERS, *GPU_PEERS)


class HostMeter:
    """On the CPU contestants are measured in children: see ``alone``."""

    def free_bytes(self) -> int:
        return machine.available_bytes()

    def release(self) -> None:
        """The children have ended."""


Meter = HostMeter | CudaMeter
METERS: dict[str, Callable[[], Meter]] = {"cpu": HostMeter, "cuda": CudaMeter}


def field_of(config: Config) -> list[Contestant]:
    """Who belongs to a configuration, installed or not."""
    wanted = config.contestants
    return [c for c in CONTESTANTS + PEERS if c.takes(config) and (wanted is None or c.name in wanted)]


def measure(config: Config, threads: int, report: Report) -> dict[str, Any]:
    """All there is to know about one configuration: a JSON-able record. In a process in which nobody computed yet."""
    started = time.time()
    torch.set_num_threads(1)
    meter = METERS[config.device]()
    alone_each = isinstance(meter, HostMeter)
    if alone_each and (why := allocators.mismatch(config.allocator)):
        raise RuntimeError(why)
    report("building inputs")
    field = field_of(config)
    rows: list[Row] = [_row(contestant) for contestant in field]
    runnable = []
    for contestant, row in zip(field, rows, strict=True):
        row["reason"] = contestant.missing() or _too_large(contestant, config, meter)
        if row["reason"] is None:
            runnable.append((contestant, row))
        else:
            row["status"] = "absent" if contestant.missing() else "skipped"
    denominators = [row["name"] for row in rows if row["kind"] == "denominator"]
    record = {
        "config": config.name,
        "workload": config.workload,
        "allocator": config.allocator if alone_each else None,
        "fields": vars(config),
        "threads": threads,
        "denominators": denominators,
        "rows": rows,
    }
    if all(contestant.kind == "denominator" for contestant, _ in runnable):
        return {**record, "wall_s": round(time.time() - started, 1)}
    problem = build(config, logits=not alone_each)
    if isinstance(meter, HostMeter):
        record["page_faults_per_mib"] = in_child(lambda: allocators.faults()._asdict())
        _each_alone(runnable, problem, threads, report)
    else:
        torch.set_num_threads(threads)
        report("float64 truth")
        truth = find_truth(problem)
        runs = _checked(runnable, problem, truth, meter, report)
        _time(runs, problem, truth, meter, report)
        _over_denominators(rows)
        del truth, runs
    _over_ours(rows)
    del problem
    meter.release()
    return {**record, "wall_s": round(time.time() - started, 1)}


def _row(contestant: Contestant) -> Row:
    return {
        "name": contestant.name,
        "kind": contestant.kind,
        "setting": contestant.setting,
        "for_gpus": contestant.for_gpus,
        "destroys_logits": contestant.destroys_logits,
        "status": "ok",
    }


def _too_large(contestant: Contestant, config: Config, meter: Meter) -> str | None:
    inputs = 2 * config.logits_bytes if config.level == "logits" else 0
    passes = (c.extra_bytes(config) for c in field_of(config) if c.kind == "denominator")
    needed = (
        inputs + contestant.extra_bytes(config) + (max(passes, default=0) if contestant.kind != "denominator" else 0)
    )
    available = meter.free_bytes()
    if needed <= _MEMORY_SHARE * available:
        return None
    return f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


# --- alone -----------------------------------------------------------------------------------------------------------


def _each_alone(runnable: list[tuple[Contestant, Row]], problem: Problem, threads: int, report: Report) -> None:
    """Fill the rows from a child each; those of the denominators from all children."""
    # Before the forks: or every child would import it all again.
    for module in sorted({module for contestant, _ in runnable for module in contestant.modules}):
        importlib.import_module(module)
    report("float64 truth")
    truth = _truth_of_a_child(problem, threads)
    denominators = [contestant for contestant, _ in runnable if contestant.kind == "denominator"]
    pooled: dict[str, list[float]] = {contestant.name: [] for contestant in denominators}
    for contestant, row in runnable:
        if contestant.kind == "denominator":
            continue
        report(contestant.name)
        row |= in_child(functools.partial(alone, contestant, denominators, problem, truth, threads))
        for name, ms in row.pop("beside_ms", {}).items():
            pooled[name] += ms
    for contestant, row in runnable:
        if contestant.kind == "denominator" and pooled[contestant.name]:
            row |= summary([ms / 1e3 for ms in pooled[contestant.name]])
    _malloc_trim()


def in_child(work: Callable[[], Row]) -> Row:
    """``work()`` in a forked child, whose memory is its own. A child that dies reports how."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        status = 1
        try:
            with os.fdopen(send, "w") as pipe:
                pipe.write(json.dumps(work()))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)  # never back into the parent's code
    os.close(send)
    with os.fdopen(receive) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        code = os.waitstatus_to_exitcode(status)
        return {"status": "failed", "reason": f"the measuring process ended with {code}"}
    return json.loads(text)


def _truth_of_a_child(problem: Problem, threads: int) -> Truth:
    """The truth, computed on all threads elsewhere: this process has to stay fit for forking."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "truth.pt")

        def work() -> Row:
            torch.set_num_threads(threads)
            found = find_truth(problem)
            parts = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "problem"}
            torch.save((parts, problem.exact), path)
            return {"status": "ok"}

        done = in_child(work)
        if done["status"] != "ok":
            raise RuntimeError(f"the float64 truth could not be computed: {done['reason']}")
        parts, exact = torch.load(path)
    problem.exact.update(exact)
    return Truth(problem=problem, **parts)


def alone(contestant: Contestant, denominators: list[Contestant], problem: Problem, truth: Truth, threads: int) -> Row:
    """Check, memory and times of one contestant; those of the denominators beside it under "beside_ms"."""
    torch.set_num_threads(threads)
    problem.take_logits()
    config = problem.config
    try:
        passes = {denominator.name: denominator.make(problem) for denominator in denominators}
        row, run, first = _checked_alone(contestant, problem, truth)
    except Exception as error:  # another library's version may not suit this machine
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    if "reason" in row:
        return row
    own = list(first)
    beside: dict[str, list[float]] = {name: [] for name in passes}
    seconds = config.seconds * (2 if contestant.kind == "ours" else 1)
    began = time.perf_counter()
    for round_ in range(config.rounds):
        if round_ >= config.min_rounds and time.perf_counter() - began > seconds:
            break
        for name, bare in passes.items():
            problem.restore()
            beside[name].append(_clocked(bare)[1])
        if config.rounds > 1:
            problem.restore()
            result, taken = _clocked(run)
            own.append(taken)
            del result
    row |= summary(own)
    row["beside_ms"] = {name: summary(times)["times_ms"] for name, times in beside.items()}
    row["over"] = {name: row["median_ms"] / statistics.median(ms) for name, ms in row["beside_ms"].items()}
    if passes:
        row["over_denominator"] = next(iter(row["over"].values()))
    return row


def _checked_alone(contestant: Contestant, problem: Problem, truth: Truth) -> tuple[Row, Run, list[float]]:
    """Errors and memory, the call, and its time where the checked call is the only one."""
    config = problem.config
    compiles = "torch._dynamo" in contestant.modules
    if not compiles:
        # The first call of all loads code (170 MiB of it behind a custom operator), whatever its size.
        contestant.make(build(replace(config, n_tokens=4 * config.n_sequences, vocab=256)))()
    run = contestant.make(problem)
    result, taken, memory = watched(run, problem)
    row = check(contestant, result, truth)
    del result
    if config.rounds > 1 and "reason" not in row and (compiles or taken <= _LONG_CALL_S):
        result, _, memory = watched(run, problem)
        del result
    return {**row, **memory}, run, [taken] if config.rounds == 1 else []


def watched(run: Run, problem: Problem) -> tuple[Result, float, Row]:
    """A call, its seconds, and its peak bytes beyond what was resident, of which it returned some as gradients."""
    problem.restore()
    release_workspace()  # what a library keeps for its next call counts too
    gc.collect()
    _malloc_trim()
    machine.reset_peak()
    before = machine.resident_bytes()
    result, taken = _clocked(run)
    peak = machine.peak_resident_bytes() - before
    memory = {"peak_extra_bytes": peak, "gradient_bytes": problem.bytes_beyond_inputs(result.gradients)}
    return result, taken, memory


def _clocked(run: Run) -> tuple[Result, float]:
    began = time.perf_counter()
    result = run()
    return result, time.perf_counter() - began


def _malloc_trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


# --- side by side ---------------------------------------------------------------------------------------------------


def check(contestant: Contestant, result: Result, truth: Truth) -> Row:
    """Errors of a result, and the reason why they disqualify it, if they do."""
    errors = truth.errors(result)
    reason = exceeded(errors, contestant.rounding(truth.problem.config.dtype))
    row: Row = {"errors": errors}
    return row if reason is None else {**row, "status": "wrong", "reason": reason}


def _checked(
    runnable: list[tuple[Contestant, Row]], problem: Problem, truth: Truth, meter: CudaMeter, report: Report
) -> list[tuple[Contestant, Row, Run]]:
    """Make every contestant's call and, unless a call is too dear to repeat, check and warm it.

    Another library's version may not suit this machine: one that raises has its reason in its row, and the others run.
    """
    runs = []
    for contestant, row in runnable:
        report(f"check: {contestant.name}")
        try:
            run = _ready(contestant, row, problem, truth, meter)
        except Exception as error:
            traceback.print_exc()
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        meter.probe()
        if row["status"] == "ok":
            runs.append((contestant, row, run))
    return runs


def _ready(contestant: Contestant, row: Row, problem: Problem, truth: Truth, meter: CudaMeter) -> Run:
    run = contestant.make(problem)
    if problem.config.rounds > 1:
        problem.restore()
        result = run()
        if contestant.kind != "denominator":
            row |= check(contestant, result, truth)
            del result
            row |= meter.peak(run, problem)
    return run


def _time(
    runs: list[tuple[Contestant, Row, Run]], problem: Problem, truth: Truth, meter: CudaMeter, report: Report
) -> None:
    """Interleaved rounds within the budget; writes the times into the rows."""
    config = problem.config
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + config.seconds
    for round_ in range(config.rounds):
        if round_ >= config.min_rounds and time.perf_counter() > deadline:
            break
        report(f"round {round_ + 1}")
        for (contestant, row, run), seconds in zip(runs, times, strict=True):
            problem.restore()
            result, taken = meter.call(run)
            seconds.append(taken)
            if config.rounds == 1 and contestant.kind != "denominator":
                row |= check(contestant, result, truth)
            del result
    for (_, row, _), seconds in zip(runs, times, strict=True):
        if row["status"] == "ok":
            row |= summary(seconds)


def summary(seconds: list[float]) -> Row:
    ms = [1e3 * s for s in seconds]
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "times_ms": ms}


def _over_denominators(rows: list[Row]) -> None:
    """Every median over those of the denominators, of which the first is the one that figures are divided by."""
    bases = {row["name"]: row["median_ms"] for row in rows if row["kind"] == "denominator" and "median_ms" in row}
    for row in rows:
        if bases and "median_ms" in row:
            row["over"] = {name: row["median_ms"] / base for name, base in bases.items()}
            row["over_denominator"] = next(iter(row["over"].values()))


def _over_ours(rows: list[Row]) -> None:
    """Every median over that of our call that treats the logits alike: overwrites them, or leaves them as they are."""
    ours = [row for row in rows if row["kind"] == "ours" and "median_ms" in row]
    if not ours:
        return
    leaves_them = next((row for row in ours if not row.get("destroys_logits")), ours[0])
    for row in rows:
        if "median_ms" in row:
            alike = ours[0] if row["kind"] in ("ours", "denominator") or row.get("destroys_logits") else leaves_them
            row["over_ours"] = row["median_ms"] / alike["median_ms"]
