"""Check, memory and time of the contestants of one configuration.

On the CPU every contestant has a process of its own. It is forked from one that only holds the inputs, which were made
on one thread so that it may fork, and in which no contestant ran. In the forked process:

1. It makes its own copy of the logits, so that their pages come from its own allocator.
2. A tiny call loads code. The first call at full size is compared with float64. A contestant that fails is reported and
   not timed.
3. Memory: freed memory goes back to the system (``malloc_trim``), the kernel's high-water mark is reset
   (``/proc/self/clear_refs``), and a second call is made (the first counts if it was long). The figure is the
   high-water mark (``VmHWM``) minus what was resident before, good to a quarter of a MiB, the batches in which the
   kernel counts pages. Inputs and the denominators' buffers are resident already and do not count.
4. Time: rounds of the denominators and one call (M A M A …). Before each the inputs are restored, outside the clock.
   The clock stops when the gradients exist; freeing them is outside. Every ratio to a denominator is one of medians
   from the same process. The denominator's own row is of all processes.

On a CUDA device (``meters.py``) nothing forks: one process runs rounds of one call each (A B C A B C …), and memory is
the allocator's count during the call after the checked one.
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

from benchmarks import allocators, configs, machine
from benchmarks.configs import Config
from benchmarks.contestants import CONTESTANTS, Contestant, Run
from benchmarks.meters import CudaMeter, RehearsalMeter
from benchmarks.peers import PEERS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, Truth, exceeded, find_truth
from benchmarks.tuning import TUNED
from dapo_kernels.memory import release_workspace

# A call this long is not repeated to see what only its first run took; unless it compiles.
_LONG_CALL_S = 2.0
# Share of the available memory that inputs and a contestant together may take.
_MEMORY_SHARE = 0.85

Report = Callable[[str], None]
Row = dict[str, Any]
Field = list[tuple[Contestant, Row]]


def contestants_of(config: Config) -> list[Contestant]:
    """Return those that a configuration names and that can do it, installed or not."""
    wanted = config.contestants
    everyone = (*CONTESTANTS, *TUNED, *PEERS) if wanted is not None else (*CONTESTANTS, *PEERS)
    return [c for c in everyone if c.can_do(config) and (wanted is None or c.name in wanted)]


def measure(
    config: Config,
    threads: int,
    report: Report,
    contestants: list[Contestant] | None = None,
    meter: CudaMeter | None = None,
) -> dict[str, Any]:
    """Measure one configuration and return a JSON-able record. Call it in a process in which nothing ran yet.

    With a ``meter``, the default on a GPU, contestants are measured side by side in this process.
    """
    started = time.time()
    torch.set_num_threads(1)
    on_cpu = config.device == "cpu"
    if on_cpu and (why := allocators.mismatch(config.allocator)):
        raise RuntimeError(why)
    report("building inputs")
    if not on_cpu:
        meter = RehearsalMeter() if configs.REHEARSAL else CudaMeter()
    everyone = contestants or contestants_of(config)
    rows = [_row(contestant, config, meter) for contestant in everyone]
    field = [(contestant, row) for contestant, row in zip(everyone, rows, strict=True) if row["status"] == "ok"]
    record = {
        "config": config.name,
        "workload": config.workload,
        "allocator": config.allocator if on_cpu else None,
        "fields": vars(config),
        "threads": threads,
        "denominators": [row["name"] for row in rows if row["kind"] == "denominator"],
        "rows": rows,
    }
    if any(contestant.kind != "denominator" for contestant, _ in field):
        problem = build(config, logits=meter is not None)
        if meter is None:
            _measure_each_alone(field, problem, threads, report)
        else:
            _measure_side_by_side(field, problem, threads, meter, report)
        divide_by_ours(rows)
        del problem
        if meter is not None:
            meter.release()
    return {**record, "wall_s": round(time.time() - started, 1)}


def _row(contestant: Contestant, config: Config, meter: CudaMeter | None) -> Row:
    missing = contestant.missing()
    reason = missing or _why_too_large(contestant, config, meter)
    return {
        "name": contestant.name,
        "kind": contestant.kind,
        "setting": contestant.setting,
        "destroys_logits": contestant.destroys_logits,
        "status": "absent" if missing else "skipped" if reason else "ok",
        "reason": reason,
    }


def _why_too_large(contestant: Contestant, config: Config, meter: CudaMeter | None) -> str | None:
    inputs = 2 * config.logits_bytes if config.level == "logits" else 0
    passes = [c.extra_bytes(config) for c in contestants_of(config) if c.kind == "denominator"]
    needed = inputs + contestant.extra_bytes(config)
    needed += max(passes, default=0) if contestant.kind != "denominator" else 0
    available = machine.available_bytes() if meter is None else meter.free_bytes()
    if needed <= _MEMORY_SHARE * available:
        return None
    return f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


# --- each in a process of its own -------------------------------------------------------------------------------------


def _measure_each_alone(field: Field, problem: Problem, threads: int, report: Report) -> None:
    """Fill the rows from a child each; those of the denominators from all children."""
    # Before the forks: or every child would import it all again.
    for module in sorted({module for contestant, _ in field for module in contestant.modules}):
        importlib.import_module(module)
    report("float64 truth")
    truth = _truth_of_a_child(problem, threads)
    denominators = [contestant for contestant, _ in field if contestant.kind == "denominator"]
    pooled: dict[str, list[float]] = {contestant.name: [] for contestant in denominators}
    for contestant, row in field:
        if contestant.kind != "denominator":
            report(contestant.name)
            row |= in_child(functools.partial(alone, contestant, denominators, problem, truth, threads))
            for name, ms in row.pop("beside_ms", {}).items():
                pooled[name] += ms
    for contestant, row in field:
        if pooled.get(contestant.name):
            row |= summary([ms / 1e3 for ms in pooled[contestant.name]])
    _malloc_trim()


def in_child(work: Callable[[], Row]) -> Row:
    """Return ``work()`` of a forked child, whose memory is its own, or how the child died."""
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
    """Compute the truth on all threads of a child: this process has to stay fit for forking."""
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
    """Return check, memory and times of one contestant; those of the denominators beside it under "beside_ms"."""
    torch.set_num_threads(threads)
    problem.take_logits()
    config = problem.config
    try:
        passes = {denominator.name: denominator.make(problem) for denominator in denominators}
        row, run, own = _checked_alone(contestant, problem, truth)
    except Exception as error:  # another library's version may not suit this machine
        return _failure(error)
    if row.get("reason"):
        return row
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
    """Return errors and memory, the call, and its time where the checked call is the only one."""
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
    """Make a call; return its seconds, its peak bytes beyond what was resident, and the bytes of its gradients."""
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


# --- side by side in one process --------------------------------------------------------------------------------------


def _measure_side_by_side(field: Field, problem: Problem, threads: int, meter: CudaMeter, report: Report) -> None:
    """Check every contestant, then time interleaved rounds. One that raises has the reason in its row."""
    torch.set_num_threads(threads)
    report("float64 truth")
    truth = find_truth(problem)
    runs = []
    for contestant, row in field:
        report(f"check: {contestant.name}")
        try:
            run = _checked_beside(contestant, row, problem, truth, meter)
        except Exception as error:
            row |= _failure(error)
        meter.probe()
        if row["status"] == "ok":
            runs.append((contestant, row, run))
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
    divide_by_denominators([row for _, row, _ in runs])


def _checked_beside(contestant: Contestant, row: Row, problem: Problem, truth: Truth, meter: CudaMeter) -> Run:
    run = contestant.make(problem)
    if problem.config.rounds > 1:
        problem.restore()
        result = run()
        if contestant.kind != "denominator":
            row |= check(contestant, result, truth)
            del result
            row |= meter.peak(run, problem)
    return run


# --- rows -------------------------------------------------------------------------------------------------------------


def _failure(error: Exception) -> Row:
    traceback.print_exc()
    return {"status": "failed", "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def check(contestant: Contestant, result: Result, truth: Truth) -> Row:
    """Return the errors of a result and, if they are too large, the reason."""
    errors = truth.errors(result)
    reason = exceeded(errors, contestant.rounding(truth.problem.config.dtype))
    return {"errors": errors} | ({} if reason is None else {"status": "wrong", "reason": reason})


def summary(seconds: list[float]) -> Row:
    ms = [1e3 * s for s in seconds]
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "times_ms": ms}


def divide_by_denominators(rows: list[Row]) -> None:
    """Divide every median by those of the denominators; the first one is the one that figures are quoted against."""
    bases = {row["name"]: row["median_ms"] for row in rows if row["kind"] == "denominator" and "median_ms" in row}
    for row in rows:
        if bases and "median_ms" in row:
            row["over"] = {name: row["median_ms"] / base for name, base in bases.items()}
            row["over_denominator"] = next(iter(row["over"].values()))


def divide_by_ours(rows: list[Row]) -> None:
    """Divide every median by that of our call that treats the logits alike: overwrites them, or leaves them alone."""
    ours = [row for row in rows if row["kind"] == "ours" and "median_ms" in row]
    if not ours:
        return
    leaves_them = next((row for row in ours if not row.get("destroys_logits")), ours[0])
    for row in rows:
        if "median_ms" in row:
            alike = ours[0] if row["kind"] in ("ours", "denominator") or row.get("destroys_logits") else leaves_them
            row["over_ours"] = row["median_ms"] / alike["median_ms"]
