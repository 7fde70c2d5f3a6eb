"""How many rows of logits a GPU should process at a time if a kernel reads each row twice: the second read should hit
the L2 cache, and memory must stay busy.

R rows in flight, each of ``row_bytes``, at random positions of their two sweeps. The second sweep goes backwards: what
is at distance u from the end of a row is read again after 2u. By then the other rows have loaded as much, less what
they themselves read again. With q = l2_bytes / (R·row_bytes) and a least-recently-used cache:

    rows at random positions    the share of the second read that hits the cache is  2·(1 − √(1 − q/2)),  1 from q = 1.5
    rows in step                min(1, q):  all turn at the same time

Rows that start together and take equally long stay nearly in step, so the real value is between the two. With fewer
rows the hit rate is higher, but fewer bytes are in flight: by Little's law memory needs bandwidth · latency bytes in
flight to be busy.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

# Seconds from a load to its data with busy memory. 25 KiB per SM of an H100.
LATENCY_S = 1e-6
# The q from which rows at random positions hit the cache in all of their second read.
ALL_FOUND = 1.5


class Gpu(NamedTuple):
    """The properties of a device that matter here."""

    multiprocessors: int
    l2_bytes: int
    bytes_per_s: float  # memory bandwidth, as in the data sheet


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """Return the properties; None if it is not an NVIDIA GPU, or torch does not report enough."""
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
    """Return R: as many rows as fit into the cache at q = 1.5, but enough to keep memory busy, and no more than the SMs
    can hold. It may be less than the number of SMs, because fewer can saturate memory.

    Args:
        row_bytes: of a row's logits.
        held: number of rows for which an SM has registers and threads.
        row_loads: bytes that a row has in flight at a time.
    """
    cached = int(gpu.l2_bytes / (ALL_FOUND * row_bytes))
    busy = math.ceil(gpu.bytes_per_s * LATENCY_S / row_loads)
    return min(held * gpu.multiprocessors, max(cached, busy))


def programs(gpu: Gpu | None, n_rows: int, row_bytes: int, held: int, row_loads: int) -> int:
    """Return the number of programs that share ``n_rows``, each taking rows in turn. If registers already limit the
    number of rows enough, it is one program per row, and the GPU schedules them.
    """
    if gpu is None or row_bytes == 0:
        return n_rows
    rows = rows_in_flight(gpu, row_bytes, held, row_loads)
    return n_rows if rows == held * gpu.multiprocessors else min(n_rows, rows)


def found_again(gpu: Gpu, row_bytes: int, rows: int) -> tuple[float, float]:
    """Return the expected hit rate of the second read: for rows at random positions, and for rows in step."""
    q = gpu.l2_bytes / (rows * row_bytes)
    return (1.0 if q >= ALL_FOUND else 2 * (1 - math.sqrt(1 - q / 2))), min(1.0, q)
