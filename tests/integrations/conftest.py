"""Fixtures of the tests that train with TRL's trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer."""
    from trl_runs import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))
