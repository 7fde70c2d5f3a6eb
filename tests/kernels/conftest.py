"""Every buffer that torch allocates without filling is poisoned with NaN while a kernel test runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> Iterator[None]:
    """An output element that a kernel forgets to write is NaN, not whatever the allocator left there."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
