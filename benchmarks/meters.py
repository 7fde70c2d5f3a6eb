"""Time and memory of a call on a CUDA device, where one process measures every contestant.

Time is that between a pair of events around the call, after the L2 cache was overwritten. Before the first event the
device waits for 5 ms, in which the host queues the call, as it runs ahead of the device in training. So the figure is
the device's time, unless the call itself waits for the device. Memory is what torch's allocator gave out, to the byte.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine
from benchmarks.problem import Problem
from benchmarks.truth import Result
from dapo_kernels.memory import release_workspace

# The cache is emptied by writing so many times its size; the size is a guess where a device does not report it.
_FLUSH_TIMES, _UNKNOWN_CACHE = 4, 64 * 2**20
_WAIT_CYCLES = 10_000_000  # 5 ms at 2 GHz: the slowest call is queued in 3 ms


class CudaMeter:
    """Time, memory and state of the CUDA device."""

    def __init__(self) -> None:
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or _UNKNOWN_CACHE
        self._scratch = torch.empty(_FLUSH_TIMES * cache, dtype=torch.uint8, device="cuda")

    def free_bytes(self) -> int:
        """Return what the driver has left and what torch's allocator holds without using it."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def call(self, run: Callable[[], Result]) -> tuple[Result, float]:
        """Make one call and return its seconds."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._scratch.zero_()
        torch.cuda._sleep(_WAIT_CYCLES)
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3

    def peak(self, run: Callable[[], Result], problem: Problem) -> dict[str, Any]:
        """Return the peak bytes of one warm call beyond what was allocated before, and bytes of its gradients."""
        problem.restore()
        release_workspace()  # what a library keeps for its next call counts too
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return {"peak_extra_bytes": peak, "gradient_bytes": problem.bytes_beyond_inputs(result.gradients)}

    def probe(self) -> None:
        """Raise if an earlier call has broken the device's context: no later figure could be trusted."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Return freed memory to the driver and forget compiled code, between configurations."""
        gc.collect()
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
        torch.cuda.empty_cache()


class RehearsalMeter(CudaMeter):
    """The same for CPU tensors in a rehearsal. Its figures mean nothing."""

    def __init__(self) -> None:
        pass

    def free_bytes(self) -> int:
        return machine.available_bytes()

    def call(self, run: Callable[[], Result]) -> tuple[Result, float]:
        began = time.perf_counter()
        return run(), time.perf_counter() - began

    def peak(self, run: Callable[[], Result], problem: Problem) -> dict[str, Any]:
        problem.restore()
        return {"peak_extra_bytes": 0, "gradient_bytes": problem.bytes_beyond_inputs(run().gradients)}

    def probe(self) -> None:
        pass

    def release(self) -> None:
        pass
