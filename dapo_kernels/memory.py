"""Large memory on the CPU, kept between calls, with one bound for the process.

The first touch of fresh memory faults once per 4 KiB page: a GEMM into 192 MiB of it took 220 ms in place of 144. In
huge pages (Linux, where ``transparent_hugepage`` is ``madvise`` or ``always``) it took 150, as long as the system has
free ones: in a fragmented memory it may stop to make some. Where a hypervisor lends memory it is dearest: new gradients
of 400 MB took 188 ms, in used memory 18. So pages that nobody holds any more serve the next call, of whatever thread.

Fresh pages are zeros of the system's, and those that nobody writes cost neither time nor memory.
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
# Of all that is kept, whoever keeps it. More than one call takes at a time is not worth keeping.
KEPT_BYTES = 2 * 2**30
_MOST_UNUSED = 4  # kept pages serve a tensor of at least this part of them


@functools.cache
def _extension() -> Any:
    try:
        return importlib.import_module("dapo_kernels._C")
    except ImportError:  # said once, by backends/registry.py
        return None


class _Pages(NamedTuple):
    """Memory, and the storage of the tensor that was last made of it."""

    memory: mmap.mmap
    user: StorageWeakRef
    of: str


_kept: list[_Pages] = []  # the longest unused first
_lock = threading.Lock()


def workspace(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scratch memory for the duration of one call: kept on the CPU, elsewhere the allocator does that."""
    made = large_tensor(torch.Size(shape), dtype, device, "workspace")
    return torch.empty(shape, dtype=dtype, device=device) if made is None else made[0]


def release_workspace() -> None:
    """Give back all that is kept for later calls, of every thread. What somebody holds goes when they let go."""
    with _lock:
        _kept.clear()


def kept_bytes() -> int:
    """How much is kept, in use or not."""
    with _lock:
        return sum(len(pages.memory) for pages in _kept)


def large_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device, of: str) -> tuple[Tensor, bool] | None:
    """(A large tensor on the CPU for ``of``, whether it holds zeros), in huge pages where there are any; None for a
    small one. Pages serve one purpose: what was all written last time will be again.

    Its storage is not torch's allocator's: ``untyped_storage().resize_`` refuses it.
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
        # Gives the pages back when it goes. Of the tensor's own size: torch.save and deepcopy take all of a storage.
        storage = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes).untyped_storage()
        if sum(len(pages.memory) for pages in _kept) + len(memory) <= KEPT_BYTES:
            _kept.append(_Pages(memory, StorageWeakRef(storage), of))
    if not used:
        _extension().advise_huge_pages(storage.data_ptr(), n_bytes)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides), not used


def _reusable(n_bytes: int, of: str) -> mmap.mmap | None:
    """Pages of that purpose that nobody holds, taken off the list."""
    for i, pages in enumerate(_kept):
        fits = n_bytes <= len(pages.memory) <= _MOST_UNUSED * n_bytes
        if pages.of == of and fits and pages.user.expired():
            return _kept.pop(i).memory
    return None


def _make_room(n_bytes: int, of: str) -> None:
    """Let go of what nobody holds and, the longest unused first, what would pass the bound, before more is made."""
    total = sum(len(pages.memory) for pages in _kept)
    for pages in list(_kept):
        if pages.user.expired() and (pages.of == of or total + n_bytes > KEPT_BYTES):
            _kept.remove(pages)
            total -= len(pages.memory)
