"""Detect AMX that a virtual machine announces but does not fully support."""

from __future__ import annotations

import os
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
TILE_LEAF = 0x1D  # the CPUID leaf with the supported tile sizes
VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"


def disable_broken_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Disable AMX in oneDNN if the processor announces it without CPUID leaf 0x1D. Return whether it does so.

    Some virtual machines hide that leaf. Then oneDNN configures no tiles, and the first bfloat16 matrix product of
    torch on the CPU ends the process with SIGILL ("Illegal instruction"). Call this before the first product. An
    environment variable that is already set is not changed.
    """
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    highest_leaf = re.search(r"^cpuid level\s*: (\d+)$", text, re.MULTILINE)
    is_broken = highest_leaf is not None and int(highest_leaf[1]) < TILE_LEAF and " amx_tile" in text
    if is_broken:
        os.environ.setdefault(VARIABLE, WITHOUT_AMX)
    return is_broken
