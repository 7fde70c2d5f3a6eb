"""An engine in this process, and two fake servers with all that a test opens over them, which ends with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_server import FakeServer
from served import Fleet, HashEngine

from dapo_runner.config import ModelConfig
from dapo_runner.policy.model import load_model
from dapo_runner.rollout import pool
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.tiny_model import make_tokenizer


@pytest.fixture
def engine(model_folder: Path) -> HFEngine:
    model = ModelConfig(path="x", dtype="float32")
    return HFEngine(load_model(model_folder, model, torch.device("cpu"), "sdpa"), make_tokenizer(), 64)


@pytest.fixture
def fleet(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Servers that compute nothing, and are tried again soon."""
    monkeypatch.setattr(pool, "REST", 0.01)
    servers = [FakeServer(model_folder, HashEngine) for _ in range(2)]
    fleet = Fleet(model_folder, servers, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def model_fleet(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> Iterator[Fleet]:
    """Servers that sample from a small model."""
    fleet = Fleet(model_folder, servers, tmp_path)
    yield fleet
    fleet.close()
