"""Large fresh tensors on the CPU.

The first touch of fresh memory faults once per 4 KiB page: a GEMM into 192 MiB of it took 220 ms in place of 144. In
huge pages (Linux, where ``transparent_hugepage`` is ``madvise`` or ``always``) it took 150.
"""

from __future__ import annotations

import functools
import importlib
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


def large_empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` in huge pages where there are any."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and out.nbytes >= _LARGE_BYTES and type(out) is Tensor and _extension() is not None:
        _extension().advise_huge_pages(out.data_ptr(), out.nbytes)
    return out
