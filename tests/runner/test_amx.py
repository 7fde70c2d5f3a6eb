"""AMX on virtual machines that hide a part of it: torch's bfloat16 products do not end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_runner.preflight.amx import VARIABLE, disable_broken_amx

PRODUCT = """
from dapo_runner.preflight.amx import disable_broken_amx
import torch
disable_broken_amx()
x = torch.ones(64, 64, dtype=torch.bfloat16)
assert (x @ x).eq(64).all()
"""


@pytest.mark.parametrize(
    ("level", "flags", "broken"),
    [(28, "avx512_fp16 amx_tile amx_int8", True), (32, "avx512_fp16 amx_tile", False), (28, "avx512_fp16", False)],
)
def test_amx_without_tile_sizes_is_broken(
    level: int, flags: str, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: {flags}\n")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert disable_broken_amx(cpuinfo) is broken
    assert (VARIABLE in os.environ) is broken


def test_a_choice_of_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("cpuid level\t: 28\nflags\t\t: amx_tile\n")
    monkeypatch.setenv(VARIABLE, "AVX2")
    assert disable_broken_amx(cpuinfo)
    assert os.environ[VARIABLE] == "AVX2"
    assert not disable_broken_amx(tmp_path / "absent")


def test_bfloat16_products_work_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", PRODUCT], check=True, env=environment)
