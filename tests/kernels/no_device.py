"""The code path of CUDA tensors on a machine without a GPU.

With tensors of the meta device: they have no values, are as little the host's as a GPU's, and have autograd. (Fake
tensors on "cuda" cannot be indexed in a CPU build of torch.) Or with a CPU's tensors whose values may not be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_kernels import use_backend
from dapo_kernels.backends import registry
from dapo_kernels.records import HOST_DEVICES

# Shapes that depend on values: the host has to wait for them.
_LOOKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "is_nonzero")


class HostWaitError(Exception):
    """An operation that would wait for the device, or copy between host and device."""


class NoWaiting(TorchDispatchMode):
    """Operations that would wait for the device raise HostWaitError. Records matrix products: (result's dtype,
    operands' dtype, whether it adds to the result); and the rows of each result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[torch.dtype, torch.dtype, bool]] = []
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(name.startswith(looking) for looking in _LOOKING) and tensors[0].device.type != "cpu":
            raise HostWaitError(name)
        if name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for x in args if isinstance(x, list | tuple) for i in x
        ):
            raise HostWaitError(f"{name} with a mask")
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and torch.device(to).type != tensors[0].device.type:
            raise HostWaitError(f"{name} from {tensors[0].device} to {to}")
        if name.startswith("copy_") and args[0].device.type != args[1].device.type and args[1].dim() > 0:
            raise HostWaitError(f"{name} from {args[1].device} to {args[0].device}")
        found = func(*args, **kwargs)
        if name.partition(".")[0] in ("mm", "addmm"):
            adds = name.startswith("addmm") and kwargs.get("beta", 1) != 0
            self.products.append((found.dtype, tensors[-1].dtype, adds))
            self.rows.append(len(found))
        return found


class NoAtomics(TorchDispatchMode):
    """Operations that a GPU does by atomic additions of floats, in another order on every run, raise AssertionError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").removeprefix("_")
        atomic = name.startswith(("index_add", "scatter_add", "scatter_reduce", "bincount", "cumsum", "put_"))
        assert not (atomic and args[0].is_floating_point()), name
        return func(*args, **(kwargs or {}))


class Launches:
    """What Triton would have started: each kernel's name with its number of programs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> None:
        devices = {x.device.type for x in args if isinstance(x, Tensor)}
        assert len(devices) == 1
        assert "cpu" not in devices
        assert type(grid[0]) is int
        self.seen.append((kernel.__name__, grid[0]))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """The triton backend for all calls and devices, without anything being started."""
    runtime = pytest.importorskip("triton.runtime.jit", reason="triton is not installed (pip install triton)")
    recorded = Launches()
    monkeypatch.setattr(runtime.JITFunction, "run", lambda kernel, *args, **how: recorded.run(kernel, *args, **how))
    monkeypatch.setitem(registry._reasons, "triton", None)
    monkeypatch.setitem(registry.BACKENDS, "triton", registry.BACKENDS["triton"]._replace(devices=None))
    with use_backend("triton"):
        yield recorded


@contextlib.contextmanager
def device_path() -> Iterator[None]:
    """CPU tensors take the path of CUDA tensors: nothing reads their values."""
    HOST_DEVICES.remove("cpu")
    try:
        yield
    finally:
        HOST_DEVICES.add("cpu")
