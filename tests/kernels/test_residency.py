"""How many rows a GPU works on at a time: by its cache, its memory and its registers, without one."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from dapo_kernels.backends.residency import GPUS, LATENCY_S, Gpu, found_again, gpu_of, rows_held
from dapo_kernels.backends.residency import rows_in_flight as in_flight
from docs.models import roofline
from docs.models.roofline import B200, H100, H200, Device

BF16, FP32 = 151_936 * 2, 151_936 * 4
PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def test_rows_follow_cache_memory_and_registers() -> None:
    known: list[tuple[Device, int, int, int]] = [
        (H100, BF16, 132, 132),  # one per SM, 40 MB: 115 would leave a third of the cache for other things
        (H200, BF16, 147, 132),  # what keeps memory busy
        (B200, FP32, 245, 148),
        (H100, 64_000, 264, 132),
    ]
    for device, row_bytes, triton, sweep in known:
        assert in_flight(device.gpu, row_bytes, 2, 32 * 2**10) == triton, (device, row_bytes)
        assert in_flight(device.gpu, row_bytes, 1, 48 * 2**10) == sweep, (device, row_bytes)
        for held in (1, 2):  # no SM is without a row
            assert in_flight(device.gpu, 2**24, held, 2**20) >= device.gpu.multiprocessors


def test_how_many_programs_an_sm_holds() -> None:
    assert [rows_held(registers, 32) for registers in (24, 32, 33, 64, 65)] == [2, 2, 1, 1, 0]
    assert [rows_held(registers, 4) for registers in (32, 40, 64)] == [16, 12, 8]


def simulated(q: float, starts: list[float], steps: int = 100) -> float:
    """The share of the second read that a cache finds which evicts what was read last, else the least recently read."""
    cached: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    room, found, asked = round(q * len(starts) * steps), 0, 0
    for time in range(12 * steps):
        for row, start in enumerate(starts):
            turn, at = divmod(time + round(2 * steps * start), 2 * steps)
            if at < steps:
                cached[row, turn, at] = None
                if len(cached) > room:
                    cached.popitem(last=False)
            else:
                hit = (row, turn, 2 * steps - 1 - at) in cached
                cached.pop((row, turn, 2 * steps - 1 - at), None)
                if time >= 6 * steps:
                    found, asked = found + hit, asked + 1
    return found / asked


@pytest.mark.parametrize("q", [0.2, 0.35, 0.8])
def test_what_the_cache_holds_of_the_second_read(q: float) -> None:
    apart, in_step = found_again(Gpu(1, round(q * 32 * 10**6), 1.0), 10**6, 32)
    assert simulated(q, [row / 32 for row in range(32)]) == pytest.approx(apart, abs=0.03)
    assert simulated(q, [0.0] * 32) == pytest.approx(in_step, abs=0.03)


def test_a_device_is_as_torch_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory's clock nothing is limited."""

    class Properties:
        multi_processor_count, L2_cache_size, memory_clock_rate, memory_bus_width = 132, 50 * 2**20, 2_619_000, 5120

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", 99)
    found = gpu_of(device)
    assert found[:2] == (132, 50 * 2**20)
    assert found.bytes_per_s == pytest.approx(3.35e12, rel=0.01)
    monkeypatch.setattr(Properties, "memory_clock_rate", 0)
    assert gpu_of(device) is found  # examined once
    monkeypatch.delitem(GPUS, device)
    assert gpu_of(device) is gpu_of(torch.device("cpu")) is None


def test_the_page_shows_the_tables() -> None:
    """That of the roofline, and the bandwidth with one row to an SM by Little's law."""
    assert PAGE.partition(roofline.BEGIN)[2].partition(roofline.END)[0].strip() == roofline.table()
    for kib in (32, 16, 8):
        shares = (d.gpu.multiprocessors * kib * 2**10 / (d.gpu.bytes_per_s * LATENCY_S) for d in roofline.DEVICES)
        cells = " | ".join(f"{min(1.0, share):.0%}".replace("%", " %") for share in shares)
        assert f"{kib} KiB a row | {cells} |" in PAGE
