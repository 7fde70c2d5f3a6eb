"""Choose the backend of a call: by the device of the tensors, or as set by ``use_backend``."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_kernels.backends.protocol import Backend
from dapo_kernels.backends.sources import built_from_others

_CHECKOUT_HINT = (
    "Python imports the checkout at {}, where it was not built: pip install -e . there (with a C++ compiler, without "
    "DAPO_KERNELS_CPP=0), or start Python in another folder"
)
_INSTALL_HINT = "reinstall dapo-kernels from source, with a C++ compiler present (and without DAPO_KERNELS_CPP=0)"


def _extension_missing() -> str | None:
    try:
        module = importlib.import_module("dapo_kernels._C")
    except ImportError as error:
        root = Path(__file__).parent.parent.parent
        hint = _CHECKOUT_HINT.format(root) if (root / "setup.py").exists() else _INSTALL_HINT
        return f"the C++ extension dapo_kernels._C cannot be imported ({error}); {hint}"
    return built_from_others(module)


def _triton_missing() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with the CUDA build of torch, or: pip install triton"
    if _INTERPRETED or torch.cuda.is_available():
        return None
    return "torch finds no CUDA device here; TRITON_INTERPRET=1, set before the start, runs it on the CPU for tests"


def cpu_build() -> str | None:
    """Return instruction set and threads of the C++ kernels, or why they cannot run; None if not built."""
    if _extension_missing():
        return None
    module: Any = importlib.import_module("dapo_kernels._C")
    try:
        return f"built for {module.isa()}, {'on several threads' if module.openmp else 'without OpenMP: on one thread'}"
    except RuntimeError as error:  # DAPO_KERNELS_ISA names an instruction set that this processor lacks
        return str(error)


def cuda_build() -> tuple[list[str], str] | None:
    """Return the architectures of the CUDA module (``["80", "90a", "90+PTX"]``) and its toolkit; None if not built."""
    try:
        module: Any = importlib.import_module("dapo_kernels._cuda")
    except ImportError:
        return None
    return module.architectures.split(";"), module.toolkit


@functools.cache
def covers(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for ``architecture`` runs on a device: PTX also on later ones, machine code within a major
    version, with an "a" only on exactly that one.
    """
    name, _, ptx = architecture.partition("+")
    major, minor = divmod(int(name.rstrip("af")), 10)
    if name.endswith("a"):
        return capability == (major, minor)
    return capability >= (major, minor) if ptx else capability[0] == major and capability[1] >= minor


def _cuda_missing() -> str | None:
    try:
        module: Any = importlib.import_module("dapo_kernels._cuda")
    except ImportError as error:
        return (
            f"the CUDA module dapo_kernels._cuda cannot be imported ({error}); reinstall dapo-kernels with the nvcc "
            "of CUDA 12.4 or later on PATH (with DAPO_KERNELS_CUDA=1 it says what is amiss)"
        )
    if (why := built_from_others(module)) is not None:
        return why
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    if status := module.device_error():
        return f"its CUDA runtime {module.toolkit} finds no device ({status}); update the GPU driver"
    unfit = [_cuda_has_no_code(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return unfit[0] if all(unfit) else None


def _cuda_has_no_code(device: torch.device) -> str | None:
    """Return why the CUDA module does not run on this device; None: it does."""
    (architectures, _), capability = cuda_build() or ([], ""), torch.cuda.get_device_capability(device)
    if any(covers(architecture, capability) for architecture in architectures):
        return None
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or later, got {capability[0]}.{capability[1]}"
    return (
        f"it was compiled for {', '.join(architectures)}; reinstall with DAPO_KERNELS_CUDA_ARCHS for compute "
        f"capability {capability[0]}.{capability[1]}"
    )


_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Entry(NamedTuple):
    """A backend, which may not be able to run on this machine."""

    module: str  # an implementation of ``protocol.Backend``
    missing: Callable[[], str | None]  # returns why it cannot run here, or None
    devices: tuple[str, ...] | None  # the supported device types; None: all


BACKENDS = {
    "torch": Entry("dapo_kernels.backends.reference", lambda: None, None),
    "cpp": Entry("dapo_kernels.backends.cpp", _extension_missing, ("cpu",)),
    "cuda": Entry("dapo_kernels.backends.cuda", _cuda_missing, ("cuda",)),
    "triton": Entry("dapo_kernels.backends.triton", _triton_missing, ("cuda", "cpu") if _INTERPRETED else ("cuda",)),
}


# What a call does with its rows. From logits: loss and gradient in place, in one kernel, which with entropy is another
# one; statistics, then the gradient, in two; no gradient. From hidden states the rows are those of a padded chunk.
CALLS = ("in place", "in place with entropy", "new gradient", "no gradient", "hidden", "hidden, no gradient")


class Default(NamedTuple):
    """A class of rows of logits on CUDA devices, and its default backend."""

    backend: str
    capability: tuple[int, int] | None = None  # of the device, as measured; None: all
    vocab: int = 0  # minimum
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    calls: tuple[str, ...] = CALLS
    aligned: bool | None = None  # whether rows start on 16 bytes; None: all rows
    row_bytes: int | None = None  # maximum; None: all


# The longest row that the kernel ``cluster_loss`` holds (csrc/cuda/tiles.h). Longer ones take a kernel that is slower.
CLUSTER_ROW_BYTES = 16 * (222 * 2**10 - 128)
# The first match that can run here applies. A row for the cuda backend must name a file under benchmarks/results/ in
# which it is faster than triton for that class: gpu-logits-nvidia-h200-20261127.
CUDA_DEFAULTS = (
    Default("cuda", (9, 0), 128256, (torch.float32,), ("in place",), True, CLUSTER_ROW_BYTES),
    Default("triton"),
)

_forced: ContextVar[str | None] = ContextVar("dapo_kernels.use_backend", default=None)
# The same for torch.compile, which does not read context variables, but guards a graph on a global: the last of the
# contexts of all threads and tasks that are open.
_forced_last: str | None = None
_open: dict[int, str] = {}
_reasons: dict[str, str | None] = {}  # why a backend cannot run here, determined once
_loaded: dict[str, Backend] = {}


def _why_not(name: str, device: torch.device | None = None) -> str | None:
    """Return why a backend cannot run here, determined once, or not on this device; None: it can."""
    if name not in _reasons:
        _reasons[name] = BACKENDS[name].missing()
    if name == "cuda" and device is not None and _reasons[name] is None:
        return _cuda_has_no_code(device)
    return _reasons[name]


# torch.compile cannot trace imports: it treats the result as a constant. This is
# ``torch.compiler.assume_constant_result`` without importing all of torch._dynamo.
_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]

if _why_not("cpp") is not None:
    warnings.warn(f"dapo_kernels: {_why_not('cpp')}; CPU tensors use the slower torch backend", stacklevel=2)


def available_backends() -> dict[str, str | None]:
    """Return each backend's name, and why it cannot run on this machine (``None``: it can)."""
    return {name: _why_not(name) for name in BACKENDS}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend for all calls inside this context, in this thread or asynchronous task.

    Calls compiled by ``torch.compile`` use that of the last open context in the whole process, of any thread or task.
    A backward pass uses the backend of its forward pass.

    Args:
        name: ``"torch"`` (eager reference, any device with float64), ``"cpp"`` (CPU), ``"cuda"`` or
            ``"triton"`` (CUDA).

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend cannot run on this machine; the message says why and what to do.

    Example:
        >>> import torch
        >>> from dapo_kernels import token_logprobs, use_backend
        >>> with use_backend("torch"):
        ...     stats = token_logprobs(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0]))
        >>> stats.logprobs.dtype
        torch.float64
    """
    if name not in BACKENDS:
        raise ValueError(f"use_backend: unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    if (why := _why_not(name)) is not None:
        raise RuntimeError(f"use_backend: backend {name!r} cannot run: {why}")
    global _forced_last
    token = _forced.set(name)
    _open[id(token)] = _forced_last = name
    try:
        yield
    finally:
        del _open[id(token)]
        _forced_last = [None, *_open.values()][-1]
        _forced.reset(token)  # last: it raises an error if this runs in another ``contextvars.Context``


def backend_for(
    caller: str,
    device: torch.device,
    dtype: torch.dtype,
    vocab: int = 0,
    call: str = CALLS[0],
    starts: tuple[int, ...] = (),
) -> str:
    """Return the name of the backend for ``caller`` with this device and dtype.

    Args:
        vocab: length of a row; 0: there are no rows.
        call: one of ``CALLS``.
        starts: of ``starts_of_rows``; (): the rows are aligned.

    Raises:
        ValueError: the backend set by ``use_backend`` does not support the device.
        TypeError: the backend does not support the dtype.
        RuntimeError: the backend cannot run on the device.
    """
    forced = _forced_last if torch.compiler.is_compiling() else _forced.get()
    name = forced or _default(device, dtype, vocab, call, starts)
    devices = BACKENDS[name].devices
    if devices is not None and device.type not in devices:
        raise ValueError(f"{caller}: backend {name!r} supports {', '.join(devices)} tensors, got {device}")
    if device.type == "cuda" and (why := _why_not(name, device)) is not None:
        raise RuntimeError(f"{caller}: backend {name!r} cannot run on {device}: {why}; or use_backend('torch')")
    if dtype == torch.float64 and name != "torch":
        raise TypeError(f"{caller}: float64 runs on the torch backend only; got use_backend({name!r})")
    return name


def _default(device: torch.device, dtype: torch.dtype, vocab: int, call: str, starts: tuple[int, ...]) -> str:
    if dtype == torch.float64:
        return "torch"
    if device.type == "cuda":
        return _cuda_default(device, dtype, vocab, call, starts)
    return _cpu_default() if device.type == "cpu" else "torch"


def _cpu_default() -> str:
    return "cpp" if _why_not("cpp") is None else "torch"


def _fits(row: Default, dtype: torch.dtype, vocab: int, call: str, starts: tuple[int, ...]) -> bool:
    """Return whether a row is for this call."""
    if row.aligned is not None and row.aligned != all(start * dtype.itemsize % 16 == 0 for start in starts):
        return False
    fits = vocab >= row.vocab and (row.row_bytes is None or vocab * dtype.itemsize <= row.row_bytes)
    return fits and dtype in row.dtypes and call in row.calls


def _able(row: Default, device: torch.device) -> bool:
    """Return whether a row is for this device, and its backend runs there."""
    if row.backend == "cuda" and _why_not("cuda", device) is not None:
        return False
    return row.capability is None or torch.cuda.get_device_capability(device) == row.capability


def _cuda_default(
    device: torch.device, dtype: torch.dtype, vocab: int, call: str = CALLS[0], starts: tuple[int, ...] = ()
) -> str:
    for row in CUDA_DEFAULTS:
        if _fits(row, dtype, vocab, call, starts) and _able(row, device):
            return row.backend
    raise AssertionError("CUDA_DEFAULTS: the last row must hold for everything")


def describe_default(device: torch.device, dtype: torch.dtype) -> str:
    """Return the default backend in words, with the rows of logits that have another one."""
    if device.type != "cuda":
        return _default(device, dtype, 0, CALLS[0], ())
    *special, general = (row for row in CUDA_DEFAULTS if dtype in row.dtypes and _able(row, device))
    words = [general.backend]
    for row in special:
        longest = "on" if row.row_bytes is None else f"to {row.row_bytes // dtype.itemsize}"
        aligned = "" if row.aligned is None else f", rows {'' if row.aligned else 'not '}on 16 bytes"
        words.append(f"{row.backend} for V from {row.vocab} {longest} ({' or '.join(row.calls)}{aligned})")
    return "; ".join(words)


def call_from_logits(logits: Tensor, loss_in_place: bool = False, entropy: bool = False) -> str:
    """Return the one of ``CALLS`` that a function of logits makes. ``entropy``: whether it is computed."""
    if loss_in_place:
        return "in place with entropy" if entropy else "in place"
    return "new gradient" if torch.is_grad_enabled() and logits.requires_grad else "no gradient"


def starts_of_rows(logits: Tensor) -> tuple[int, ...]:
    """Return the offset of the first row in its storage, which PyTorch aligns, and the distances between rows.

    torch.compile cannot trace the offset; it stands for 0 there.
    """
    distances = logits.stride()[:-1]
    return distances if torch.compiler.is_compiling() else (int(logits.storage_offset()), *distances)


def backend(name: str) -> Backend:
    """Return the backend itself, loaded once."""
    if name not in _loaded:
        module: Any = importlib.import_module(BACKENDS[name].module)
        _loaded[name] = module
    return _loaded[name]


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply ``x`` in place by ``factor``, [], on the same device, without waiting for it.

    On a GPU Triton leaves ``x`` alone if the factor is 1. PyTorch's ``mul_`` by a tensor does not: it takes four times
    as long as a pass over bfloat16 logits.
    """
    if x.device.type == "cuda" and x.dtype != torch.float64 and x.stride(-1) == 1 and _why_not("triton") is None:
        by: Any = backend("triton")
        by.scale_(x, factor)
    else:
        x.mul_(factor)


def cpu_backend() -> Any:
    """Return the backend for float32 tensors on a CPU, for functions that only CPU backends have."""
    return backend(_cpu_default())
