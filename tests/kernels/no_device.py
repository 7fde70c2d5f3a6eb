"""The code path of CUDA tensors on a machine without a GPU, with tensors of the meta device: they have no values, are
as little the host's as a GPU's, and have autograd. (Fake tensors on "cuda" cannot be indexed in a CPU build of torch.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Shapes that depend on values: the host has to wait for them.
_LOOKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "is_nonzero")


class HostWaitError(Exception):
    """An operation that would wait for the device, or copy between host and device."""


class NoWaiting(TorchDispatchMode):
    """Operations that would wait for the device raise HostWaitError."""

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
        return func(*args, **kwargs)


class NoAtomics(TorchDispatchMode):
    """Operations that a GPU does by atomic additions of floats, in another order on every run, raise AssertionError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").removeprefix("_")
        atomic = name.startswith(("index_add", "scatter_add", "scatter_reduce", "bincount", "cumsum", "put_"))
        assert not (atomic and args[0].is_floating_point()), name
        return func(*args, **(kwargs or {}))


class Launches:
    """Stands in for ``dapo_kernels.backends.triton.launch``: what would have been started, and on what."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __call__(self, kernel: Any, programs: int, device: torch.device, *args: Any, **meta: Any) -> None:
        assert device.type != "cpu"
        assert all(x.device == device for x in args if isinstance(x, Tensor))
        assert type(programs) is int
        self.seen.append((kernel.__name__, programs))
        self.arguments.append((*args, meta))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def record_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The triton backend for all calls and devices, without anything being started."""
    from dapo_kernels.backends import registry, triton

    launches = Launches()
    monkeypatch.setattr(triton, "launch", launches)
    monkeypatch.setattr(registry, "_default", lambda *of: "triton")
    monkeypatch.setitem(registry.BACKENDS, "triton", registry.BACKENDS["triton"]._replace(devices=None))
    return launches


def record_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype, bool]]:
    """GEMMs of dW as (result's dtype, operands' dtype, added to): torch does the mixed ones on CUDA only."""
    from dapo_kernels.engine import gradients

    monkeypatch.setattr(gradients, "float32_product", lambda x: x.element_size() < 4)

    products = []

    def product_(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
        assert out.shape == (a.shape[0], b.shape[1])
        assert a.shape[1] == b.shape[0]
        assert a.dtype == b.dtype
        products.append((out.dtype, a.dtype, add))

    monkeypatch.setattr(gradients, "product_", product_)
    return products
