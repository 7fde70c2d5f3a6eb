"""How many rows a GPU works on at a time: by its cache, its memory and its registers, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dapo_kernels.backends.residency import LATENCY_S, found_again, gpu_of, programs, rows_in_flight
from docs.models import roofline
from docs.models.roofline import A100, B200, H100, H200, Device

BF16, FP32 = 151_936 * 2, 151_936 * 4


@pytest.mark.parametrize(
    ("device", "row_bytes", "triton", "sweep"),
    [
        (H100, BF16, 115, 115),  # 35 MB
        (H100, FP32, 103, 69),  # what keeps memory busy: 57 would stay in the cache
        (H200, BF16, 147, 115),
        (H200, FP32, 147, 98),
        (A100, BF16, 92, 92),
        (A100, FP32, 63, 46),
        (B200, BF16, 289, 148),  # one of sweep_loss to an SM is all there is room for
        (B200, FP32, 245, 148),
        (H100, 64_000, 264, 132),
    ],
    ids=str,
)
def test_rows_follow_cache_memory_and_registers(device: Device, row_bytes: int, triton: int, sweep: int) -> None:
    assert rows_in_flight(device.gpu, row_bytes, 2, 32 * 2**10) == triton
    assert rows_in_flight(device.gpu, row_bytes, 1, 48 * 2**10) == sweep


def test_a_grid_is_limited_only_where_registers_do_not() -> None:
    assert programs(None, 7, BF16, 2, 32 * 2**10) == 7
    assert programs(H100.gpu, 8192, BF16, 2, 32 * 2**10) == 115
    assert programs(H100.gpu, 8192, 64_000, 2, 32 * 2**10) == 8192  # all that registers hold fit
    assert programs(H100.gpu, 5, BF16, 2, 32 * 2**10) == 5
    assert gpu_of(torch.device("cpu")) is None


def test_what_the_cache_holds_of_the_second_read() -> None:
    """Where it is exact: everything fits, and next to nothing does; fewer rows never find less."""
    gpu = H100.gpu
    assert found_again(gpu, BF16, 10) == found_again(gpu, BF16, 115) == (1.0, 1.0)
    assert found_again(gpu, BF16, 264)[0] == pytest.approx(0.358, abs=1e-3)
    assert found_again(gpu, BF16, 264)[1] == pytest.approx(0.653, abs=1e-3)
    little = found_again(gpu, 10**9, 1000)
    assert little[0] == pytest.approx(little[1] / 2, rel=0.01)
    shares = [found_again(gpu, FP32, rows) for rows in range(20, 300, 20)]
    assert all(low <= high <= 1 for low, high in shares)
    assert shares == sorted(shares, reverse=True)


def test_devices_that_are_not_limited_by_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties as torch gives them; without memory's clock nothing is limited."""

    class Properties:
        multi_processor_count, L2_cache_size, memory_clock_rate, memory_bus_width = 132, 50 * 2**20, 2_619_000, 5120

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.version, "hip", None)
    gpu_of.cache_clear()
    found = gpu_of(torch.device("cuda", 0))
    assert found is not None
    assert (found.multiprocessors, found.l2_bytes) == (132, 50 * 2**20)
    assert found.bytes_per_s == pytest.approx(3.35e12, rel=0.01)
    monkeypatch.setattr(Properties, "memory_clock_rate", 0)
    assert gpu_of(torch.device("cuda", 1)) is None
    gpu_of.cache_clear()


def test_one_row_to_an_sm_bounds_the_bandwidth_as_the_page_has_it() -> None:
    """Kernels above 32 registers, by Little's law."""
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for kib in (32, 16):
        shares = (d.gpu.multiprocessors * kib * 2**10 / (d.gpu.bytes_per_s * LATENCY_S) for d in roofline.DEVICES)
        cells = " | ".join(f"{min(1.0, share):.0%}".replace("%", " %") for share in shares)
        assert f"{kib} KiB a row | {cells} |" in page


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert page.partition(roofline.BEGIN)[2].partition(roofline.END)[0].strip() == roofline.table()


def test_the_roofline_is_what_counting_gives() -> None:
    """Two rows per SM, as registers alone would have it, against what is chosen; exponentials of a B200."""
    assert roofline.expected(H100, "cluster_loss", 151_936, 2).moved == (4.0, 4.0)
    assert roofline.expected(H100, "Triton", 151_936, 2).share == (1.0, 1.0)
    assert roofline.expected(B200, "cluster_loss", 151_936, 2).pressure[0] == pytest.approx(1.78 / 2.03 * 0.927, 0.01)
    triton = roofline.expected(B200, "Triton", 151_936, 2)  # issue slots bind before its exponentials do
    assert triton.share == pytest.approx((0.88, 0.88), abs=0.005)
    assert triton.binds == "instructions"
    assert roofline.expected(H100, "Triton", 151_936, 2).binds == "memory"
    assert roofline.expected(B200, "cluster_loss", 151_936, 4).exponentials == pytest.approx(2.0625)
