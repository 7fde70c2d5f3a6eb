"""Which backend serves a call: by the device of the tensors, or as ``use_backend`` demands."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

_CHECKOUT_HINT = (
    "Python imports the checkout at {}, where it was not built: pip install -e . there (with a C++ compiler, without "
    "DAPO_KERNELS_CPP=0), or start Python in another folder"
)
_INSTALL_HINT = "reinstall dapo-kernels with a C++ compiler present (and without DAPO_KERNELS_CPP=0)"


def _extension_missing() -> str | None:
    try:
        importlib.import_module("dapo_kernels._C")
    except ImportError as error:
        root = Path(__file__).parent.parent
        hint = _CHECKOUT_HINT.format(root) if (root / "setup.py").exists() else _INSTALL_HINT
        return f"the C++ extension dapo_kernels._C cannot be imported ({error}); {hint}"
    return None


def _triton_missing() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with the CUDA build of torch, or: pip install triton"
    if _INTERPRETED or torch.cuda.is_available():
        return None
    return "torch finds no CUDA device here; TRITON_INTERPRET=1, set before the start, runs it on the CPU for tests"


def cuda_build() -> tuple[list[str], str] | None:
    """What the CUDA module was compiled for (``["80", "90a", "90+PTX"]``) and with which toolkit; None: not built."""
    try:
        module: Any = importlib.import_module("dapo_kernels._cuda")
    except ImportError:
        return None
    return module.architectures.split(";"), module.toolkit


def covers(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``architecture`` runs on a device: PTX on later ones too, machine code within a major version,
    and an "a" means that very one.
    """
    name, _, ptx = architecture.partition("+")
    major, minor = divmod(int(name.rstrip("af")), 10)
    if name.endswith("a"):
        return capability == (major, minor)
    return capability >= (major, minor) if ptx else capability[0] == major and capability[1] >= minor


def _cuda_missing() -> str | None:
    try:
        importlib.import_module("dapo_kernels._cuda")
    except ImportError as error:
        return (
            f"the CUDA module dapo_kernels._cuda cannot be imported ({error}); reinstall dapo-kernels with the nvcc "
            "of CUDA 12.4 or later on PATH (with DAPO_KERNELS_CUDA=1 it says what is amiss)"
        )
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    build = cuda_build()
    assert build is not None
    capability = torch.cuda.get_device_capability()
    if not any(covers(architecture, capability) for architecture in build[0]):
        device = "compute capability {}.{}".format(*capability)
        return f"it was compiled for {', '.join(build[0])}; reinstall with DAPO_KERNELS_CUDA_ARCHS for {device}"
    return None


_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Backend(NamedTuple):
    module: str  # with the row functions
    missing: Callable[[], str | None]  # why it cannot run here, or None
    devices: tuple[str, ...] | None  # the device types it serves; None: all


_BACKENDS = {
    "torch": Backend("dapo_kernels.reference", lambda: None, None),
    "cpp": Backend("dapo_kernels.cpp", _extension_missing, ("cpu",)),
    "cuda": Backend("dapo_kernels.cuda", _cuda_missing, ("cuda",)),
    "triton": Backend("dapo_kernels.triton", _triton_missing, ("cuda", "cpu") if _INTERPRETED else ("cuda",)),
}


class Default(NamedTuple):
    """A class of rows of logits on CUDA devices, and the backend that serves them unless another is asked for."""

    backend: str
    capability: tuple[int, int] = (0, 0)  # of the device, at least
    vocab: int = 0  # at least
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


# The first that holds. The cuda backend takes a class here once a file under benchmarks/results/ shows it ahead of
# triton there; its row then names the file. No GPU has timed the two against each other yet.
CUDA_DEFAULTS = (Default("triton"),)

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
        name: ``"torch"`` (eager reference, any device and float dtype), ``"cpp"`` (CPU), ``"cuda"`` or
            ``"triton"`` (CUDA).

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


def backend_for(caller: str, device: torch.device, dtype: torch.dtype, vocab: int = 0) -> str:
    """The name of the backend that serves ``caller`` on this device, dtype and length of a row (0: no rows).

    Raises:
        ValueError: a forced backend does not serve the device.
        TypeError: the backend does not take the dtype.
    """
    name = _forced or _default(device, dtype, vocab)
    if _forced is None and device.type == "cuda" and (why := _BACKENDS[name].missing()) is not None:
        raise RuntimeError(f"{caller}: CUDA tensors need the {name} backend: {why}; or use_backend('torch')")
    devices = _BACKENDS[name].devices
    if devices is not None and device.type not in devices:
        raise ValueError(f"{caller}: backend {name!r} serves {', '.join(devices)} tensors, got {device}")
    if dtype == torch.float64 and name != "torch":
        raise TypeError(f"{caller}: float64 runs on the torch backend only; got use_backend({name!r})")
    return name


def _default(device: torch.device, dtype: torch.dtype, vocab: int) -> str:
    if dtype == torch.float64:
        return "torch"
    if device.type == "cuda":
        return _cuda_default(device, dtype, vocab)
    return "cpp" if device.type == "cpu" and _cpp_missing is None else "torch"


def _cuda_default(device: torch.device, dtype: torch.dtype, vocab: int) -> str:
    for row in CUDA_DEFAULTS:
        able = row.capability == (0, 0) or torch.cuda.get_device_capability(device) >= row.capability
        if able and vocab >= row.vocab and dtype in row.dtypes:
            return row.backend
    raise AssertionError("CUDA_DEFAULTS: the last row must hold for everything")


def backend_module(name: str) -> ModuleType:
    """The module that holds a backend's ``row_stats``, ``row_grad``, ``row_loss_`` and ``token_loss``."""
    return importlib.import_module(_BACKENDS[name].module)
