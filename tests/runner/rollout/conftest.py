"""Two fake servers with all that a test opens over them. With the test engines are closed and hung requests end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer
from served import Fleet, HashEngine


@pytest.fixture
def fleet(model_folder: Path, tmp_path: Path) -> Iterator[Fleet]:
    """Servers that compute nothing."""
    servers = [FakeServer(model_folder, HashEngine) for _ in range(2)]
    with Fleet(model_folder, servers, tmp_path) as fleet:
        yield fleet


@pytest.fixture
def model_fleet(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> Iterator[Fleet]:
    """Servers that sample from a small model."""
    with Fleet(model_folder, servers, tmp_path) as fleet:
        yield fleet
