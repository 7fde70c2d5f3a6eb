"""What the row kernels should reach on GPUs, by counting: ``python -m docs.models.roofline`` prints the table of
docs/gpu.md; with the page's name as its argument it replaces the table there. Nothing in it was measured.

Per logit of a row of V: bytes that cross memory (a read, a write, and the part of a second read that the L2 cache does
not have: ``residency.py``), exponentials at 16 a cycle and SM, of the Triton kernel also all instructions of its loops
at 128 a cycle and SM (four schedulers, 32 threads each). The largest of these times is what the kernel takes at least;
a copy takes that of one read and one write. Latencies, barriers and the first and last rows come off that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from dapo_kernels.backends.residency import Gpu, found_again, rows_in_flight

BEGIN, END = "<!-- roofline: begin -->", "<!-- roofline: end -->"
EXPONENTIALS_PER_CYCLE = 16  # of an SM, all four
ISSUED_PER_CYCLE = 128  # instructions of threads, of an SM
# The Triton loss, both sweeps, by compute capability and bytes of a logit: tests/kernels/test_triton_compile.py counts
# them in the machine code. Loops of the CUDA kernels hold branches for the ends of a row: not counted.
INSTRUCTIONS = {(80, 2): 16.4, (80, 4): 16.8, (90, 2): 16.4, (90, 4): 16.8, (100, 2): 14.6, (100, 4): 16.0}
V = (32_000, 151_936, 262_144)
ITEMSIZE = {"bf16": 2, "fp32": 4}
# Rows of an SM in the Triton loss (the launch of long rows). Of sweep_loss also the bytes of each on their way.
TRITON_ROWS, SWEEP = 2, (1, 48 * 2**10)


class Device(NamedTuple):
    name: str
    gpu: Gpu
    hertz: float  # under load, an assumption: between base and boost
    capability: int
    polynomials: float = 0.0  # share of the gradient's exponentials in 16 bits, of the CUDA kernels

    @property
    def clusters(self) -> bool:
        return self.capability >= 90


MIB = 2**20
A100 = Device("A100 80 GB", Gpu(108, 40 * MIB, 2.04e12), 1.41e9, 80)
H100 = Device("H100 SXM", Gpu(132, 50 * MIB, 3.35e12), 1.75e9, 90)
H200 = Device("H200", Gpu(132, 60 * MIB, 4.8e12), 1.96e9, 90)
B200 = Device("B200", Gpu(148, 126 * MIB, 8.0e12), 1.85e9, 100, 0.25)
DEVICES = (A100, H100, H200, B200)


class Expected(NamedTuple):
    """Of one kernel, dtype, V and device. Two numbers: rows at random places, rows in step."""

    rows: int  # in flight; 0: none is read twice
    found: tuple[float, float]
    moved: tuple[float, float]  # bytes per logit
    exponentials: float  # per logit
    share: tuple[float, float]  # of the copy's bandwidth, at most
    pressure: tuple[float, float]  # the exponentials' time over memory's
    instructions: float | None = None  # per logit; None: not counted
    issue: tuple[float, float] = (0.0, 0.0)  # their time over memory's

    @property
    def binds(self) -> str:
        low, high, what = max((*sorted(self.pressure), "exponentials"), (*sorted(self.issue), "instructions"))
        return what if low > 1 else "both" if high > 0.8 else "memory"


def expected(device: Device, kernel: str, vocab: int, itemsize: int) -> Expected:
    # One of each sweep, and where the sum is lifted to a new maximum: once per 16 bytes, or per 64 in the CUDA kernels.
    lifts = itemsize / (16 if kernel == "Triton" else 64)
    polynomials = device.polynomials if itemsize == 2 and kernel != "Triton" else 0.0
    exponentials = 2 + lifts - polynomials
    if kernel == "cluster_loss":
        rows, found = 0, (1.0, 1.0)
    else:
        rows = TRITON_ROWS * device.gpu.multiprocessors
        if kernel == "sweep_loss":
            rows = rows_in_flight(device.gpu, vocab * itemsize, *SWEEP)
        found = found_again(device.gpu, vocab * itemsize, rows)
    moved = tuple(itemsize * (3 - share) for share in found)
    busy = min(rows or device.gpu.multiprocessors, device.gpu.multiprocessors)
    cycles = busy * device.hertz
    work = exponentials / (EXPONENTIALS_PER_CYCLE * cycles)
    instructions = INSTRUCTIONS[device.capability, itemsize] if kernel == "Triton" else None
    issued = (instructions or 0.0) / (ISSUED_PER_CYCLE * cycles)
    times = tuple(x / device.gpu.bytes_per_s for x in moved)
    copy = 2 * itemsize / device.gpu.bytes_per_s
    share = tuple(copy / max(t, work, issued) for t in times)
    pressure = tuple(work / t for t in times)
    issue = tuple(issued / t for t in times)
    return Expected(rows, found, moved, exponentials, share, pressure, instructions, issue)  # type: ignore[arg-type]


def _span(values: tuple[float, float], text: str, unit: str = "") -> str:
    low, high = (text.format(x) for x in sorted(values))
    return low + unit if low == high else f"{low}–{high}{unit}"


def _percent(values: tuple[float, float]) -> tuple[float, float]:
    return 100 * values[0], 100 * values[1]


def table() -> str:
    """Markdown."""
    lines = [
        "| device | logits | V | kernel | rows in flight (MB) | second read in L2 | bytes a logit | ex2 a logit | "
        "ex2 ÷ memory | instructions a logit | issue ÷ memory | copy's bandwidth, expected at most | binds |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for device in DEVICES:
        for dtype, itemsize in ITEMSIZE.items():
            for vocab in V:
                for kernel in ("Triton", "cluster_loss" if device.clusters else "sweep_loss"):
                    x = expected(device, kernel, vocab, itemsize)
                    size = x.rows * vocab * itemsize / 1e6
                    cells = [device.name, dtype, f"{vocab:,}", kernel]
                    cells += (
                        [f"{x.rows} ({size:.0f})", _span(_percent(x.found), "{:.0f}", " %")]
                        if x.rows
                        else ["–", "no second read"]
                    )
                    cells += [_span(x.moved, "{:.1f}"), f"{x.exponentials:.2f}", _span(x.pressure, "{:.2f}")]
                    cells += (
                        [f"{x.instructions:.1f}", _span(x.issue, "{:.2f}")] if x.instructions else ["–", "not counted"]
                    )
                    cells += [_span(_percent(x.share), "{:.0f}", " %"), x.binds]
                    lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table())
        return
    page = Path(arguments[0])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
