"""Time and memory of a call on a CPU and on a CUDA device.

CPU     Memory is the high-water mark of the process (``VmHWM``, reset by ``/proc/self/clear_refs``) minus what was
        resident before, good to a quarter of a MiB, the batches in which the kernel counts pages.
CUDA    Time is that between a pair of events around the call, after the L2 cache was overwritten. Before the first
        event the device waits for 5 ms, in which the host queues the call, as it runs ahead of the device in training.
        So the figure is the device's time, unless the call itself waits for the device. Memory is what torch's
        allocator gave out, to the byte.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import configs, machine
from benchmarks.truth import Result

# The cache is emptied by writing so many times its size; the size is a guess where a device does not report it.
_FLUSH_TIMES, _UNKNOWN_CACHE = 4, 64 * 2**20
_WAIT_CYCLES = 10_000_000  # 5 ms at 2 GHz: the slowest call is queued in 3 ms


class CpuMeter:
    """Time of this process and its resident memory."""

    def call(self, run: Callable[[], Result]) -> tuple[Result, float]:
        """Make one call and return its seconds."""
        began = time.perf_counter()
        result = run()
        return result, time.perf_counter() - began

    def peak(self, run: Callable[[], Result]) -> tuple[Result, int]:
        """Make one call and return its peak bytes beyond what was held before."""
        self.release()
        Path("/proc/self/clear_refs").write_text("5")
        before = machine.bytes_of("/proc/self/status", "VmRSS")
        result = run()
        return result, machine.bytes_of("/proc/self/status", "VmHWM") - before

    def release(self) -> None:
        """Return freed memory to the system."""
        gc.collect(1 if configs.REHEARSAL else 2)  # the objects of imported modules take 0.2 s
        ctypes.CDLL(None).malloc_trim(0)


class CudaMeter(CpuMeter):
    """Time and memory of the CUDA device."""

    def __init__(self) -> None:
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or _UNKNOWN_CACHE
        self._scratch = torch.empty(_FLUSH_TIMES * cache, dtype=torch.uint8, device="cuda")

    def call(self, run: Callable[[], Result]) -> tuple[Result, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._scratch.zero_()
        torch.cuda._sleep(_WAIT_CYCLES)
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3

    def peak(self, run: Callable[[], Result]) -> tuple[Result, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    def release(self) -> None:
        """Forget compiled code too. Raise if a call has broken the device's context: later figures would be wrong."""
        torch.cuda.synchronize()
        gc.collect()
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        torch.cuda.empty_cache()
