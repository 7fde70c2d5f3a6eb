"""Fixtures of the tests that train with TRL's trainer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Every training run ends with a full garbage collection: two thirds of a run, for objects of libraries."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer."""
    from trl_runs import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))
