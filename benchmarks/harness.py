"""Memory, check, clock: for one configuration, its contestants side by side.

Order of things, all in one process per configuration:

1. Inputs are built on one thread, so that the process may fork.
2. Memory: each contestant runs alone in a forked child that nobody ran in before. The child makes a tiny call (code is
   loaded) and one at the full size (libraries have set themselves up; not when it is long), returns freed memory to the
   system (``malloc_trim``), resets the kernel's high-water mark (``/proc/self/clear_refs``), calls once more, and
   reports the high-water mark (``VmHWM``) minus what was resident before that call: good to a quarter of a MiB, the
   batches in which the kernel counts pages. Inputs are resident already and do not count.
3. Check: the first call of every contestant is compared with float64; who fails is reported and not timed.
4. Clock: rounds of one call each (A B C A B C …). Before every call inputs are restored, outside the clock. The clock
   stops when the gradients exist; freeing them is outside. A contestant whose check failed has no figure.

On a CUDA device (``cuda_clock.py``) nothing forks: memory is the allocator's count, of the call after the checked one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import machine
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
    """Memory and time of a call on the CPU."""

    forks = True

    def free_bytes(self) -> int:
        return machine.available_bytes()

    def call(self, run: Run) -> tuple[Result, float]:
        """One call and its seconds."""
        began = time.perf_counter()
        result = run()
        return result, time.perf_counter() - began

    def peak(self, run: Run, problem: Problem) -> Row:
        """Was measured before, in a child: see ``peak_extra``."""
        return {}

    def probe(self) -> None:
        """A processor survives what a contestant raises."""

    def release(self) -> None:
        """The process ends with its configuration."""


Meter = HostMeter | CudaMeter
METERS: dict[str, Callable[[], Meter]] = {"cpu": HostMeter, "cuda": CudaMeter}


def field_of(config: Config) -> list[Contestant]:
    """Who belongs to a configuration, installed or not."""
    wanted = config.contestants
    return [c for c in CONTESTANTS + PEERS if c.takes(config) and (wanted is None or c.name in wanted)]


def measure(config: Config, threads: int, report: Report) -> dict[str, Any]:
    """All there is to know about one configuration: a JSON-able record. Run it in a fresh process."""
    started = time.time()
    torch.set_num_threads(1)
    meter = METERS[config.device]()
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
    record = {
        "config": config.name,
        "fields": vars(config),
        "threads": threads,
        "denominator": next((row["name"] for row in rows if row["kind"] == "denominator"), None),
        "rows": rows,
    }
    if all(contestant.kind == "denominator" for contestant, _ in runnable):
        return {**record, "wall_s": round(time.time() - started, 1)}
    problem = build(config)
    if meter.forks:
        _memory_in_children(runnable, problem, threads, report)
    torch.set_num_threads(threads)
    report("float64 truth")
    truth = find_truth(problem)
    runs = _checked(runnable, problem, truth, meter, report)
    _time(runs, problem, truth, meter, report)
    _ratios(rows)
    del problem, truth, runs
    meter.release()
    return {**record, "wall_s": round(time.time() - started, 1)}


def _row(contestant: Contestant) -> Row:
    return {"name": contestant.name, "kind": contestant.kind, "setting": contestant.setting, "status": "ok"}


def _too_large(contestant: Contestant, config: Config, meter: Meter) -> str | None:
    inputs = 2 * config.logits_bytes if config.level == "logits" else 0
    # The child of the memory run owns a second copy of what it overwrites.
    needed = inputs * 1.5 + contestant.extra_bytes(config)
    available = meter.free_bytes()
    if needed <= _MEMORY_SHARE * available:
        return None
    return f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory_in_children(runnable: list[tuple[Contestant, Row]], problem: Problem, threads: int, report: Report) -> None:
    # Before the forks: or every child would import it all again.
    for module in sorted({module for contestant, _ in runnable for module in contestant.modules}):
        importlib.import_module(module)
    for contestant, row in runnable:
        if contestant.kind != "denominator":
            report(f"memory: {contestant.name}")
            row |= in_child(functools.partial(peak_extra, contestant, problem, threads))


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
        return {"memory_reason": f"the measuring process ended with {code}"}
    return json.loads(text)


def peak_extra(contestant: Contestant, problem: Problem, threads: int) -> Row:
    """Peak bytes beyond the inputs during one call, and bytes of the gradients it returned."""
    torch.set_num_threads(threads)
    config = problem.config
    compiles = "torch._dynamo" in contestant.modules
    if not compiles:
        # The first call of all loads code (170 MiB of it behind a custom operator), whatever its size.
        contestant.make(build(replace(config, n_tokens=4 * config.n_sequences, vocab=256)))()
    run = contestant.make(problem)
    for last in (False, True):
        problem.restore()
        release_workspace()  # what a library keeps for its next call counts too
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        machine.reset_peak()
        before = machine.resident_bytes()
        began = time.perf_counter()
        result = run()
        wall = time.perf_counter() - began
        peak = machine.peak_resident_bytes() - before
        returned = problem.bytes_beyond_inputs(result.gradients)
        del result
        if last or (wall > _LONG_CALL_S and not compiles):
            break
    return {"peak_extra_bytes": peak, "gradient_bytes": returned}


# --- check and clock -------------------------------------------------------------------------------------------------


def check(contestant: Contestant, result: Result, truth: Truth) -> Row:
    """Errors of a result, and the reason why they disqualify it, if they do."""
    errors = truth.errors(result)
    reason = exceeded(errors, contestant.rounding(truth.problem.config.dtype))
    row: Row = {"errors": errors}
    return row if reason is None else {**row, "status": "wrong", "reason": reason}


def _checked(
    runnable: list[tuple[Contestant, Row]], problem: Problem, truth: Truth, meter: Meter, report: Report
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


def _ready(contestant: Contestant, row: Row, problem: Problem, truth: Truth, meter: Meter) -> Run:
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
    runs: list[tuple[Contestant, Row, Run]], problem: Problem, truth: Truth, meter: Meter, report: Report
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


def _ratios(rows: list[Row]) -> None:
    """Every median over that of the denominator, and over ours (the first of kind "ours")."""
    for kind, name in (("denominator", "over_denominator"), ("ours", "over_ours")):
        base = next((row["median_ms"] for row in rows if row["kind"] == kind and "median_ms" in row), None)
        for row in rows:
            if base is not None and "median_ms" in row:
                row[name] = row["median_ms"] / base
