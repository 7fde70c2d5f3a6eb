"""Every buffer that torch allocates without filling is poisoned with NaN while a kernel test runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from interpreter import round_to_nearest
from no_device import launches as launches


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> Iterator[None]:
    """An output element that a kernel forgets to write is NaN, not whatever the allocator left there."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def interpreter_that_rounds() -> None:
    """Where Triton is interpreted (TRITON_INTERPRET=1, see test_elsewhere.py)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        round_to_nearest()


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
