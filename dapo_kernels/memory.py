"""Keep large CPU memory between calls, with one limit for the process.

The first access to new memory faults once per 4 KiB page: a GEMM into 192 MiB of it took 220 ms instead of 144. With
huge pages (Linux, ``transparent_hugepage`` set to ``madvise`` or ``always``) it took 150, as long as the system has
free ones; if memory is fragmented, it may stop to make some. Under a hypervisor new memory is slowest: writing new
gradients of 400 MB took 188 ms, in used memory 18. So unused pages serve the next call, in any thread.

New pages contain zeros, and pages that are never written cost neither time nor memory.
"""

from __future__ import annotations

import functools
import importlib
import math
import mmap
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_LARGE_BYTES = 4 * 2**20
# Limit of all kept pages, in bytes. More than one call uses at a time is not worth keeping.
KEPT_BYTES = 2 * 2**30
_MOST_UNUSED = 4  # pages are reused for a tensor of at least 1/4 of their size


@functools.cache
def _extension() -> Any:
    try:
        return importlib.import_module("dapo_kernels._C")
    except ImportError:  # backends/registry.py reports it once
        return None


class _Pages(NamedTuple):
    """Memory, and the storage of the last tensor made from it."""

    memory: mmap.mmap
    user: StorageWeakRef
    of: str


_kept: list[_Pages] = []  # longest unused first
_lock = threading.Lock()


def workspace(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return scratch memory for one call. It is kept on the CPU; on other devices torch's allocator keeps it."""
    made = large_tensor(torch.Size(shape), dtype, device, "workspace")
    return torch.empty(shape, dtype=dtype, device=device) if made is None else made[0]


def release_workspace() -> None:
    """Release all memory kept for later calls, of every thread. Memory in use is released when its tensor is freed."""
    with _lock:
        _kept.clear()


def kept_bytes() -> int:
    """Return the number of kept bytes, in use or not."""
    with _lock:
        return sum(len(pages.memory) for pages in _kept)


def large_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device, of: str) -> tuple[Tensor, bool] | None:
    """Return a large tensor on the CPU and whether it contains zeros; None for a small one. Prefers huge pages.

    ``of`` names a purpose: pages are only reused for the same one, because it writes the same parts of them. The
    storage does not belong to torch's allocator: ``untyped_storage().resize_`` fails.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or n_bytes < _LARGE_BYTES or _extension() is None:
        return None
    with _lock:
        memory = _reusable(n_bytes, of)
        used = memory is not None
        if memory is None:
            _make_room(n_bytes, of)
            memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The storage owns the pages. It has the tensor's exact size: torch.save and deepcopy copy a whole storage.
        storage = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes).untyped_storage()
        if sum(len(pages.memory) for pages in _kept) + len(memory) <= KEPT_BYTES:
            _kept.append(_Pages(memory, StorageWeakRef(storage), of))
    if not used:
        _extension().advise_huge_pages(storage.data_ptr(), n_bytes)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides), not used


def _reusable(n_bytes: int, of: str) -> mmap.mmap | None:
    """Return unused pages of that purpose and remove them from the list."""
    for i, pages in enumerate(_kept):
        fits = n_bytes <= len(pages.memory) <= _MOST_UNUSED * n_bytes
        if pages.of == of and fits and pages.user.expired():
            return _kept.pop(i).memory
    return None


def _make_room(n_bytes: int, of: str) -> None:
    """Release unused pages: those of this purpose and, longest unused first, what would exceed the limit."""
    total = sum(len(pages.memory) for pages in _kept)
    for pages in list(_kept):
        if pages.user.expired() and (pages.of == of or total + n_bytes > KEPT_BYTES):
            _kept.remove(pages)
            total -= len(pages.memory)
