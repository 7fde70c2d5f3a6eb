"""How many rows of logits a GPU works on at a time, where a kernel reads each twice: what is read again should still be
in the L2 cache, and memory must not wait.

R rows in flight, each of ``row_bytes``, at random places of their two sweeps. The second sweep goes backwards, so that
what lies u of a row before its end is read again after 2u of a row; by then the other rows have brought in as much,
less what they meet twice themselves. With q = l2_bytes / (R·row_bytes), and a cache that drops what was used longest
ago:

    rows at random places    the share of the second read found in the cache is  2·(1 − √(1 − q/2)),  1 from q = 1.5
    rows in step             min(1, q):  all turn round at once

Rows that start together and take the same time stay nearly in step, so that the truth lies between. Fewer rows find
more, but what is on its way from memory at a time is theirs: by Little's law bandwidth · latency bytes keep it busy.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

# From a load to its data, with memory busy. 25 KiB for each SM of an H100.
LATENCY_S = 1e-6
# The q from which rows at random places find all of their second read.
ALL_FOUND = 1.5


class Gpu(NamedTuple):
    """What of a device decides it."""

    multiprocessors: int
    l2_bytes: int
    bytes_per_s: float  # of memory, as the data sheet has it


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """None where it is no NVIDIA GPU, or torch does not say enough."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_properties(device)
    transfers = 2e3 * getattr(found, "memory_clock_rate", 0)  # kHz, two transfers a cycle
    gpu = Gpu(
        found.multi_processor_count,
        getattr(found, "L2_cache_size", 0),
        transfers * getattr(found, "memory_bus_width", 0) / 8,
    )
    return gpu if all(gpu) else None


def rows_in_flight(gpu: Gpu, row_bytes: int, held: int, row_loads: int) -> int:
    """R: as many rows as are found again wherever they stand, q = 1.5, but no fewer than keep memory busy and no more
    than there is room for. Fewer than SMs, if need be: memory's rate does not take all of them.

    Args:
        row_bytes: of a row's logits.
        held: rows for which an SM has registers and threads.
        row_loads: bytes that a row has on their way from memory at a time.
    """
    cached = int(gpu.l2_bytes / (ALL_FOUND * row_bytes))
    busy = math.ceil(gpu.bytes_per_s * LATENCY_S / row_loads)
    return min(held * gpu.multiprocessors, max(cached, busy))


def programs(gpu: Gpu | None, n_rows: int, row_bytes: int, held: int, row_loads: int) -> int:
    """Programs that share ``n_rows``, each taking rows in turn; one for each row, and the GPU hands them out, where its
    registers limit their number enough.
    """
    if gpu is None or row_bytes == 0:
        return n_rows
    rows = rows_in_flight(gpu, row_bytes, held, row_loads)
    return n_rows if rows == held * gpu.multiprocessors else min(n_rows, rows)


def found_again(gpu: Gpu, row_bytes: int, rows: int) -> tuple[float, float]:
    """The expected share of the second read that comes from the cache: rows at random places, rows in step."""
    q = gpu.l2_bytes / (rows * row_bytes)
    return (1.0 if q >= ALL_FOUND else 2 * (1 - math.sqrt(1 - q / 2))), min(1.0, q)
