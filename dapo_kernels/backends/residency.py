"""How many rows of logits a GPU should process at a time if a kernel reads each row twice: the second read should hit
the L2 cache, and memory must stay busy.

R rows in flight, each of ``row_bytes``. The second sweep goes backwards: what is at distance u from the end of a row
is read again after 2u. Its loads and stores are ``evict_first``, so the cache only has to keep what will be read again.
With q = l2_bytes / (R·row_bytes) and a cache that otherwise evicts the least recently used line, the share of the
second read that hits the cache is

    rows at random positions of their two sweeps    1 − √(1 − 2q),  1 from q = 0.5
    rows in step                                    min(1, q):  all turn at the same time

At random positions: lines arrive at the rate R·row_bytes / 2 and stay for min(2u, A), on average A − A²/4, where A is
the age at which the cache evicts them. They fill it if A − A²/4 = 2q, and the share that is read in time is A/2.
Rows that start together and take equally long stay nearly in step, so the real value is between the two. With fewer
rows the hit rate is higher, but fewer bytes are in flight: by Little's law memory needs bandwidth · latency bytes in
flight to be busy. And an SM without a row does nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Of an SM: 32-bit registers and warps, on every GPU of compute capability 8.0, 9.0 or 10.0.
REGISTERS, WARPS = 65536, 64
# Seconds from a load to its data with busy memory. 25 KiB per SM of an H100.
LATENCY_S = 1e-6
# The q that is aimed at. From 1 on even rows in step find all of their second read. The rest of the cache is for what
# the counts leave out: gradients that wait to be written, and other tensors.
ROOM = 1.5


class Gpu(NamedTuple):
    """The properties of a device that matter here."""

    multiprocessors: int
    l2_bytes: int
    bytes_per_s: float  # memory bandwidth, as in the data sheet


GPUS: dict[torch.device, Gpu | None] = {}  # by device, each examined once


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the properties; None if it is not an NVIDIA GPU, or torch does not report enough."""
    if device not in GPUS:
        GPUS[device] = _examined(device)
    return GPUS[device]


def _examined(device: torch.device) -> Gpu | None:
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


def rows_held(registers: int, warps: int) -> int:
    """Return how many programs fit into an SM. Registers are allocated in units of eight per thread."""
    return min(REGISTERS // (-(-registers // 8) * 8 * 32), WARPS) // warps


def rows_in_flight(gpu: Gpu, row_bytes: int, held: int, row_loads: int) -> int:
    """Return R: as many rows as fit into the cache at q = 1.5, but at least one per SM and enough to keep memory busy,
    and no more than the SMs can hold.

    Args:
        row_bytes: of a row's logits, of all tensors that are read twice.
        held: number of rows for which an SM has registers and threads.
        row_loads: bytes that a row has in flight at a time.
    """
    cached = int(gpu.l2_bytes / (ROOM * row_bytes))
    busy = math.ceil(gpu.bytes_per_s * LATENCY_S / row_loads)
    return min(held * gpu.multiprocessors, max(gpu.multiprocessors, cached, busy))


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
    return (1.0 if q >= 0.5 else 1 - math.sqrt(1 - 2 * q)), min(1.0, q)
