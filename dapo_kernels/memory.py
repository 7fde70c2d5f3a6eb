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
_MOST_UNUSED = 4  # kept pages serve a gradient of at least this part of them


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
        _kept.memory = kept = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        if n_bytes >= _LARGE_BYTES and _extension() is not None:
            _extension().advise_huge_pages(kept.data_ptr(), n_bytes)
    return kept[:n_bytes].view(dtype).view(shape)


def release_workspace() -> None:
    """Give back what the calling thread keeps for its next call."""
    _kept.memory = None
    _kept.gradients = {}


class _Pages(NamedTuple):
    memory: mmap.mmap
    user: StorageWeakRef  # of the tensor that was last made of them


def large_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device, of: str) -> tuple[Tensor, bool] | None:
    """(A large tensor on the CPU for the gradient ``of`` something, whether it holds zeros), in huge pages where there
    are any; None for a small one.

    Fresh pages are zeros of the system's, and those that nobody writes cost neither time nor memory. Writing them is
    dear, where a hypervisor lends memory most of all: new logits-sized gradients of 400 MB took 188 ms where one in
    used memory took 18. So a thread keeps up to ``_KEPT_BYTES`` for the next gradient of the same thing, which gets
    them if nothing holds the last one then.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or n_bytes < _LARGE_BYTES or _extension() is None:
        return None
    gradients: dict[str, _Pages] = _kept.__dict__.setdefault("gradients", {})
    kept = gradients.get(of)
    used = kept is not None and kept.user.expired() and n_bytes <= len(kept.memory) <= _MOST_UNUSED * n_bytes
    if kept is not None and used:
        memory = kept.memory
    else:
        gradients.pop(of, None)  # before the larger one is made
        del kept
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Gives the pages back when it goes. Of the gradient's own size: torch.save and deepcopy take all of a storage.
    storage = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes).untyped_storage()
    if not used:
        _extension().advise_huge_pages(storage.data_ptr(), n_bytes)
    if len(memory) <= _KEPT_BYTES:
        gradients[of] = _Pages(memory, StorageWeakRef(storage))
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides), not used
