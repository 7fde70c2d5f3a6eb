"""Fake servers with all that a test of the server engine opens over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer
from served import Fleet


@pytest.fixture
def fleet(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> Iterator[Fleet]:
    """Two servers. Engines are closed and hung requests end with the test."""
    with Fleet(model_folder, servers, tmp_path) as fleet:
        yield fleet
