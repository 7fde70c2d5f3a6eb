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
from typing import Any

import torch
from torch import Tensor

_LARGE_BYTES = 4 * 2**20


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
    """Give the calling thread's scratch memory back."""
    _kept.memory = None


def large_empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` in huge pages where there are any."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and out.nbytes >= _LARGE_BYTES and type(out) is Tensor and _extension() is not None:
        _extension().advise_huge_pages(out.data_ptr(), out.nbytes)
    return out


def fresh_pages(shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """A large tensor of zeros on the CPU that takes up memory only where it is written, in huge pages where there are
    any; None for a small one. Pages come from the system as zeros: what stays zero costs neither time nor memory.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < _LARGE_BYTES or _extension() is None:
        return None
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=dtype)  # gives the pages back when its storage goes
    _extension().advise_huge_pages(flat.data_ptr(), n_bytes)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)
