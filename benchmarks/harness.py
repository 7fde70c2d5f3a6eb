"""Check, memory and time of the contestants of one configuration, one after the other (docs/performance.md).

On the CPU every contestant has a process of its own. It is forked from one that only holds the inputs, which were made
on one thread so that it may fork, and in which no contestant ran. On a CUDA device one process measures all of them.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.configs import OURS, Config
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.machine import ROOT
from benchmarks.meters import CpuMeter, CudaMeter
from benchmarks.peers import PEERS
from benchmarks.problem import Problem, build
from benchmarks.truth import Result, Truth, exceeded, find_truth
from benchmarks.tuning import TUNED
from dapo_kernels.memory import release_workspace

EVERYONE = sorted((*CONTESTANTS, *TUNED, *PEERS), key=lambda each: each.kind == "compile")  # which takes long, last

Row = dict[str, Any]


def contestants_of(config: Config) -> list[Contestant]:
    """Return those of the kinds of a configuration that can do it, installed or not."""
    return [c for c in EVERYONE if c.kind in config.kinds and c.can_do(config)]


def measure(config: Config, threads: int, contestants: list[Contestant] | None = None) -> Iterator[dict[str, Any]]:
    """Measure one configuration and yield a JSON-able record after each contestant; the last one is "whole".

    Call it in a process in which nothing ran yet.
    """
    started = time.time()
    torch.set_num_threads(1)
    on_cpu = config.device == "cpu"
    everyone = contestants_of(config) if contestants is None else contestants
    rows = [_row(contestant) for contestant in everyone]
    record = {
        "config": config.name,
        "workload": config.workload,
        "allocator": config.allocator if on_cpu else None,
        "fields": vars(config),
        "threads": threads,
        "denominators": [row["name"] for row in rows if row["kind"] == "denominator"],
        "rows": rows,
        "whole": False,
    }
    try:
        field = list(zip(everyone, rows, strict=True))
        for _ in _measure_each(field, config, threads, in_child if on_cpu else lambda work: work()):
            divide_by_ours(rows)
            yield record | {"wall_s": round(time.time() - started, 1)}
    except RuntimeError as error:
        if not _lacks_memory(error):
            raise
        failure = _failure(error)
        for row in rows:
            row |= failure
    yield record | {"whole": True, "wall_s": round(time.time() - started, 1)}


def _row(contestant: Contestant) -> Row:
    reason = contestant.missing()
    return {
        "name": contestant.name,
        "kind": contestant.kind,
        "setting": contestant.setting,
        "destroys_logits": contestant.destroys_logits,
        "status": "absent" if reason else "not reached",
        "reason": reason or "no figures yet",
    }


def _measure_each(
    field: list[tuple[Contestant, Row]], config: Config, threads: int, isolate: Callable[[Callable[[], Row]], Row]
) -> Iterator[None]:
    """Fill the rows of contestants and pause after each; those of denominators are from the rounds of all so far."""
    field = [(contestant, row) for contestant, row in field if row["status"] != "absent"]
    # Before the forks: or every child would import it all again. Without forks, a failed import costs one row.
    for module in sorted({module for contestant, _ in field for module in contestant.modules if isolate is in_child}):
        importlib.import_module(module)
    problem = build(config)
    truth = find_truth(problem)
    meter = CudaMeter() if config.tensor_device == "cuda" else CpuMeter()
    denominators = {contestant: row for contestant, row in field if contestant.kind == "denominator"}
    pooled: dict[str, list[float]] = {contestant.name: [] for contestant in denominators}
    for contestant, row in field:
        if contestant in denominators:
            continue
        work = functools.partial(alone, contestant, list(denominators), problem, truth, threads, meter)
        row |= {"status": "ok", "reason": None} | isolate(work)
        meter.release()
        for name, ms in row.pop("beside_ms", {}).items():
            pooled[name] += ms
        for beside in denominators.values():
            if pooled[beside["name"]]:
                beside |= {"status": "ok", "reason": None} | summary(pooled[beside["name"]])
        yield
    del problem, truth
    meter.release()


def in_child(work: Callable[[], Row]) -> Row:
    """Return ``work()`` of a forked child, whose memory is its own, or how the child died."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: send.send(work()))
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        child.join()
        return {"status": "failed", "reason": f"the measuring process ended with {child.exitcode}"}
    finally:
        child.join()


def alone(
    contestant: Contestant,
    denominators: list[Contestant],
    problem: Problem,
    truth: Truth,
    threads: int,
    meter: CpuMeter,
) -> Row:
    """Return check, memory and times of one contestant; those of the denominators beside it under "beside_ms"."""
    torch.set_num_threads(threads)
    config = problem.config
    try:
        problem.restore()
        sides = {denominator.name: denominator.make(problem) for denominator in denominators}
        sides[contestant.name] = run = contestant.make(problem)
        row = check(contestant, run(), truth)
        if "reason" in row:
            return row
        row |= memory(run, problem, meter)
        for denominator in (side for name, side in sides.items() if name != contestant.name):
            denominator()  # the contestant is warm
        times: dict[str, list[float]] = {name: [] for name in sides}
        deadline = time.perf_counter() + config.seconds
        for round_ in range(config.rounds):
            if round_ >= config.min_rounds and time.perf_counter() > deadline:
                break
            for name, side in sides.items():
                problem.restore()
                result, seconds = meter.call(side)
                times[name].append(1e3 * seconds)
                del result
    except Exception as error:  # another library's version may not suit this machine
        return _failure(error)
    row |= summary(times.pop(contestant.name))
    over = {name: row["median_ms"] / statistics.median(ms) for name, ms in times.items()}
    return {**row, "over": over, "beside_ms": times}


def memory(run: Callable[[], Result], problem: Problem, meter: CpuMeter) -> Row:
    """Return the peak bytes of a call beyond what was held before, and the bytes of its gradients."""
    problem.restore()
    release_workspace()  # what a library keeps for its next call counts too
    result, peak = meter.peak(run)
    return {"peak_extra_bytes": peak, "gradient_bytes": problem.bytes_beyond_inputs(result.gradients)}


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _failure(error: Exception) -> Row:
    traceback.print_exc()
    text = str(error).partition("\n")[0].replace(f"{ROOT}/", "")
    return {"status": "skipped" if _lacks_memory(error) else "failed", "reason": f"{type(error).__name__}: {text}"}


def check(contestant: Contestant, result: Result, truth: Truth) -> Row:
    """Return the errors of a result and, if they are too large, the reason."""
    dtype = truth.problem.config.dtype
    narrow = "bfloat16 softmax" if contestant.rounds_softmax else "bfloat16 tensors"
    errors = truth.errors(result)
    reason = exceeded(errors, narrow if dtype == "bfloat16" else dtype)
    return {"errors": errors} | ({} if reason is None else {"status": "wrong", "reason": reason})


def summary(ms: list[float]) -> Row:
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "times_ms": ms}


def divide_by_ours(rows: list[Row]) -> None:
    """Divide every median by that of our call that treats the logits alike: overwrites them, or leaves them alone."""
    ours = [row for row in rows if row["kind"] in OURS and "median_ms" in row]
    if not ours:
        return
    leaves_them = next((row for row in ours if not row["destroys_logits"]), ours[0])
    for row in rows:
        if "median_ms" in row:
            is_in_place = row["kind"] in (*OURS, "denominator") or row["destroys_logits"]
            row["over_ours"] = row["median_ms"] / (ours[0] if is_in_place else leaves_them)["median_ms"]
