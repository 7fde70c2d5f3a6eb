"""Memory and time of a call on a CUDA device.

Time is what the device took, by a pair of events around the call, after the second-level cache was overwritten. The
overwriting is under way while the host launches the call, so that the first launch is hidden; where the host is slower
than the device, its gaps are in the figure. Memory is what torch's allocator gave out, to the byte: no process of its
own is needed, and one process measures every configuration.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.problem import Problem
from benchmarks.truth import Result
from dapo_kernels.memory import release_workspace

# What is written to empty the cache, in multiples of its size, and the size of a device that does not say.
_FLUSH_TIMES, _UNKNOWN_CACHE = 4, 64 * 2**20


class CudaMeter:
    """The CUDA side of what the harness asks of a device; ``harness.HostMeter`` is the CPU's."""

    def __init__(self) -> None:
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or _UNKNOWN_CACHE
        self._scratch = torch.empty(_FLUSH_TIMES * cache, dtype=torch.uint8, device="cuda")

    def free_bytes(self) -> int:
        """Memory that tensors could take: what the driver has left and what torch's allocator keeps for later."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def call(self, run: Callable[[], Result]) -> tuple[Result, float]:
        """One call and its seconds."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._scratch.zero_()
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3

    def peak(self, run: Callable[[], Result], problem: Problem) -> dict[str, Any]:
        """Peak bytes of one warm call beyond what was allocated before it, and bytes of the gradients it returned."""
        problem.restore()
        release_workspace()  # what a library keeps for its next call counts too
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return {
            "peak_extra_bytes": torch.cuda.max_memory_allocated() - before,
            "gradient_bytes": problem.bytes_beyond_inputs(result.gradients),
        }

    def probe(self) -> None:
        """Raise if an earlier call has broken the device's context: nothing that follows could be believed."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Between configurations: freed memory back to the driver, compiled code forgotten."""
        gc.collect()
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
        torch.cuda.empty_cache()
