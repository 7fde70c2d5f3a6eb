"""Which backend serves a call: by the device of the tensors, or as ``use_backend`` demands."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch

_INSTALL_HINT = "reinstall dapo-kernels with a C++ compiler present (and without DAPO_KERNELS_CPP=0)"


def _extension_missing() -> str | None:
    try:
        importlib.import_module("dapo_kernels._C")
    except ImportError as error:
        return f"the C++ extension dapo_kernels._C cannot be imported ({error}); {_INSTALL_HINT}"
    return None


def _triton_missing() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with the CUDA build of torch, or: pip install triton"
    if _INTERPRETED or torch.cuda.is_available():
        return None
    return "torch finds no CUDA device here; TRITON_INTERPRET=1, set before the start, runs it on the CPU for tests"


_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Backend(NamedTuple):
    module: str  # with the row functions
    missing: Callable[[], str | None]  # why it cannot run here, or None
    devices: tuple[str, ...] | None  # the device types it serves; None: all


_BACKENDS = {
    "torch": Backend("dapo_kernels.reference", lambda: None, None),
    "cpp": Backend("dapo_kernels.cpp", _extension_missing, ("cpu",)),
    "triton": Backend("dapo_kernels.triton", _triton_missing, ("cuda", "cpu") if _INTERPRETED else ("cuda",)),
}

_forced: str | None = None
_cpp_missing = _extension_missing()
if _cpp_missing is not None:
    warnings.warn(f"dapo_kernels: {_cpp_missing}; CPU tensors use the slower torch backend", stacklevel=2)


def available_backends() -> dict[str, str | None]:
    """Every backend's name, and why it cannot run here (``None``: it can)."""
    return {name: backend.missing() for name, backend in _BACKENDS.items()}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Serve every call inside with one backend, in the whole process: other threads see the choice too.

    Args:
        name: ``"torch"`` (eager reference, any device and float dtype), ``"cpp"`` (CPU) or ``"triton"`` (CUDA).

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend cannot run on this machine; says why and what to do.
    """
    global _forced
    if name not in _BACKENDS:
        raise ValueError(f"use_backend: unknown backend {name!r}; known: {', '.join(_BACKENDS)}")
    why = _BACKENDS[name].missing()
    if why is not None:
        raise RuntimeError(f"use_backend: backend {name!r} cannot run: {why}")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def backend_for(caller: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend that serves ``caller`` on this device and dtype.

    Raises:
        ValueError: a forced backend does not serve the device.
        TypeError: the backend does not take the dtype.
    """
    name = _forced or _default(device, dtype)
    if _forced is None and name == "triton" and (why := _triton_missing()) is not None:
        raise RuntimeError(f"{caller}: CUDA tensors need the triton backend: {why}; or use_backend('torch')")
    devices = _BACKENDS[name].devices
    if devices is not None and device.type not in devices:
        raise ValueError(f"{caller}: backend {name!r} serves {', '.join(devices)} tensors, got {device}")
    if dtype == torch.float64 and name != "torch":
        raise TypeError(f"{caller}: float64 runs on the torch backend only; got use_backend({name!r})")
    return name


def _default(device: torch.device, dtype: torch.dtype) -> str:
    if dtype == torch.float64:
        return "torch"
    if device.type == "cuda":
        return "triton"
    return "cpp" if device.type == "cpu" and _cpp_missing is None else "torch"


def backend_module(name: str) -> ModuleType:
    """The module that holds a backend's ``row_stats``, ``row_grad``, ``row_loss_`` and ``token_loss``."""
    return importlib.import_module(_BACKENDS[name].module)
