"""Every buffer that torch allocates without filling is poisoned with NaN while a kernel test runs."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from no_device import launches as launches


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> Iterator[None]:
    """An output element that a kernel forgets to write is NaN, not whatever the allocator left there."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _round_to_bfloat16(x: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even, as uint16; a NaN stays one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


@pytest.fixture(scope="session", autouse=True)
def triton_interpreter() -> None:
    """Round to bfloat16 as compiled kernels do: Triton's interpreter truncates (seen in 3.6 and 3.9). Find the names of
    the language's builtins once: it does for each call of a function, which takes half of its time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    truncating = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bfloat16(source.data), tl.bfloat16)
        return truncating(self, source, to)

    interpreter.InterpreterBuilder.cast_impl = cast

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch(package: Any, *arguments: Any) -> None:
        for name in builtins_of(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *arguments)

    interpreter._patch_builtin = patch


@pytest.fixture
def device() -> str:
    """Where the tensors of a backend's test are. ``test_gpu.py`` has another."""
    return "cpu"


@pytest.fixture(params=["triton", "cuda"])
def gpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test's body runs with this backend for CUDA devices, where it can."""
    from dapo_kernels import use_backend
    from dapo_kernels.backends import available_backends

    name: str = request.param
    why = available_backends().get(name, "dapo_kernels has no such backend")
    if why is not None:
        pytest.skip(f"{name}: {why}")
    with use_backend(name):
        yield name
