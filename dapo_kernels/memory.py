"""Large fresh tensors on the CPU.

The first touch of fresh memory faults once per 4 KiB page: a GEMM into 192 MiB of it took 220 ms in place of 144. In
huge pages (Linux, where ``transparent_hugepage`` is ``madvise`` or ``always``) it took 150, as long as the system has
free ones: in a fragmented memory it may stop to make some. Scratch memory is therefore kept between calls.
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
_KEPT_BYTES = 2**30


@functools.cache
def _extension() -> Any:
    try:
        return importlib.import_module("dapo_kernels._C")
    except ImportError:  # said once, by backends.py
        return None


_kept = threading.local()


def workspace(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scratch memory for the duration of one call. On the CPU a thread keeps it for its next call, fresh memory being
    what it is; elsewhere the allocator does.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    kept = getattr(_kept, "memory", None)
    if kept is None or kept.numel() < n_bytes:
        _kept.memory = None  # before the larger one is made
        _kept.memory = kept = large_empty((n_bytes,), torch.uint8, device)
    return kept[:n_bytes].view(dtype).view(shape)


def release_workspace() -> None:
    """Give back what the calling thread keeps for its next call."""
    _kept.memory = _kept.gradient = None


def large_empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` in huge pages where there are any."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and out.nbytes >= _LARGE_BYTES and type(out) is Tensor and _extension() is not None:
        _extension().advise_huge_pages(out.data_ptr(), out.nbytes)
    return out


class _Pages(NamedTuple):
    memory: mmap.mmap
    user: StorageWeakRef  # of the tensor that was last made of them


def large_gradient(shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
    """(A large tensor on the CPU, whether it holds zeros), in huge pages where there are any; None for a small one.

    Fresh pages are zeros of the system's, and those that nobody writes cost neither time nor memory. Writing them is
    dear: a new gradient of 400 MB took 188 ms where one in used memory took 18. So a thread keeps up to ``_KEPT_BYTES``
    for the next gradient, if nothing holds the last one then.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < _LARGE_BYTES or _extension() is None:
        return None
    kept: _Pages | None = getattr(_kept, "gradient", None)
    used = kept is not None and kept.user.expired() and n_bytes <= len(kept.memory)
    if kept is not None and used:
        memory = kept.memory
    else:
        _kept.gradient = kept = None  # before the larger one is made
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()  # gives the pages back when it goes
    if not used:
        _extension().advise_huge_pages(storage.data_ptr(), n_bytes)
    if len(memory) <= _KEPT_BYTES:
        _kept.gradient = _Pages(memory, StorageWeakRef(storage))
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides), not used
