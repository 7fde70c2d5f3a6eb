"""What a process takes its memory from, on a CPU: the settings, in force from its first moment.

Much of what PyTorch takes on a CPU with large tensors is the first touch of fresh pages: a fault for each 4 KiB.
glibc gives every block above 32 MiB back to the system when it is freed and takes it anew: the next call faults again.

out of the box      nothing is set.
thresholds raised   glibc keeps what was freed, however large, and hands it out again.
huge pages          torch asks for huge pages (``madvise``) for every tensor of 2 MiB or more: a fault for each 2 MiB,
                    and fewer misses in the translation of addresses. Freed memory goes back to the system all the
                    same. Where ``transparent_hugepage`` is ``never``, it changes nothing.
both                the two together.

With raised thresholds, and glibc before 2.38, a tensor may not get the block of the same size that was just freed:
torch asks for alignment, which that glibc serves from a block a little larger. Figures under it scatter with what was
in the heap before.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

OUT_OF_THE_BOX = "out of the box"
RAISED = "thresholds raised"
HUGE_PAGES = "huge pages"
BOTH = "both"
# More than any tensor here. ``mallopt`` takes an int; the environment has no such limit.
_ABOVE_ALL = str(2**40)
ALLOCATORS: dict[str, dict[str, str]] = {
    OUT_OF_THE_BOX: {},
    RAISED: {"MALLOC_MMAP_THRESHOLD_": _ABOVE_ALL, "MALLOC_TRIM_THRESHOLD_": _ABOVE_ALL},
    HUGE_PAGES: {"THP_MEM_ALLOC_ENABLE": "1"},
}
ALLOCATORS[BOTH] = ALLOCATORS[RAISED] | ALLOCATORS[HUGE_PAGES]
# What else would change the allocator: another one, or glibc's own ways to say the same.
_OTHERS = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX")
_PROBE_MIB = 64


def spelled(name: str) -> str:
    """The setting as one would type it, for a page."""
    typed = " ".join(f"{key}={value}" for key, value in ALLOCATORS[name].items())
    return f"`{typed}`" if typed else "no variable set"


def environment(name: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``base`` with this setting and no other; for a process that is still to start."""
    known = {key for setting in ALLOCATORS.values() for key in setting}
    return {key: value for key, value in base.items() if key not in known and key not in _OTHERS} | ALLOCATORS[name]


def mismatch(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Why figures of this process would not be those of the setting; ``None`` when they are."""
    found = environment(name, env)
    different = sorted(key for key in {*found, *env} if found.get(key) != env.get(key))
    return f"this process does not run {name}: {', '.join(different)} differ" if different else None


def restart_under(name: str) -> None:
    """Start this program anew under the setting, unless it runs under it."""
    if mismatch(name):
        os.execve(sys.executable, sys.orig_argv, environment(name))


class Faults(NamedTuple):
    """Page faults for each MiB, the second time that much is taken, written and freed: shows what is in force."""

    malloc: float  # of a block of glibc's: 256, or 0 with thresholds raised
    fresh_tensor: float  # of a tensor that is kept, so that the next has fresh pages: 256, or half of one in huge pages


def faults() -> Faults:
    """What this process's allocator does."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    size, held = _PROBE_MIB * 2**20, []

    def block() -> None:
        address = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
        ctypes.memset(address, 1, size)
        libc.free(address)

    def tensor() -> None:
        held.append(torch.empty(size, dtype=torch.uint8).fill_(1))

    found = []
    for take in (block, tensor):
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            take()
            count = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        found.append(round(count / _PROBE_MIB, 1))
    return Faults(*found)
