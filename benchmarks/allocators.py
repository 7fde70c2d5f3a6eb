"""The memory allocator of a process on a CPU, as settings that must be in its environment from the start.

docs/performance.md says what they do. With raised thresholds, glibc before 2.38 may not reuse a block of the same size
for a tensor, because torch asks for alignment, which that glibc serves from a slightly larger block. Figures then
scatter with the heap's history.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

OUT_OF_THE_BOX, RAISED, HUGE_PAGES, BOTH = "out of the box", "thresholds raised", "huge pages", "both"
# More than any tensor here. ``mallopt`` takes an int; the environment has no such limit.
_ABOVE_ALL = str(2**40)
ALLOCATORS: dict[str, dict[str, str]] = {
    OUT_OF_THE_BOX: {},
    RAISED: {"MALLOC_MMAP_THRESHOLD_": _ABOVE_ALL, "MALLOC_TRIM_THRESHOLD_": _ABOVE_ALL},
    HUGE_PAGES: {"THP_MEM_ALLOC_ENABLE": "1"},
}
ALLOCATORS[BOTH] = ALLOCATORS[RAISED] | ALLOCATORS[HUGE_PAGES]
# Other variables that change the allocator.
_OTHERS = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX")


def spelled(name: str) -> str:
    """Return the setting as one would type it."""
    typed = " ".join(f"{key}={value}" for key, value in ALLOCATORS[name].items())
    return f"`{typed}`" if typed else "no variable set"


def environment(name: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``base`` with this setting and no other, for a process that is still to start."""
    known = {key for setting in ALLOCATORS.values() for key in setting}
    return {key: value for key, value in base.items() if key not in known and key not in _OTHERS} | ALLOCATORS[name]
