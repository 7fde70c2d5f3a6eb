"""A server engine over fake servers, and what its tests ask it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from builders import make_config
from fake_server import FakeServer, Hook

from dapo_runner.config import Config
from dapo_runner.policy.model import Policy
from dapo_runner.rollout.client import Server
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import Completion, Prompt, SamplingParams

SAMPLING = SamplingParams(n=2, max_tokens=6, seed=5)
PROMPTS = [Prompt(str(i), (3 + i % 9, 4, 5 + i % 7), "", "") for i in range(24)]


def server_config(
    model: Path, servers: list[FakeServer], folder: Path, ahead: int = 0, partial: bool = True, **server: Any
) -> Config:
    named = {"urls": [server.url for server in servers], "folder": str(folder), **server}
    return make_config(
        model={"tiny": None, "path": str(model), "dtype": "float32"},
        rollout={
            "engine": "server",
            "server": named,
            "max_batch_sequences": 8,
            "max_staleness": ahead,
            "partial": partial,
            "correction": {"weights": "token" if ahead else None},
        },
        evaluation={"k": 8},
    )


def open_engine(model: Path, servers: list[FakeServer], folder: Path, **server: Any) -> ServerEngine:
    notes: list[str] = []
    engine = ServerEngine(model, make_tokenizer(), server_config(model, servers, folder, **server), note=notes.append)
    engine.notes = notes  # type: ignore[attr-defined]
    return engine


def lost(engine: ServerEngine) -> list[Server]:
    return [server for server in engine.pool.servers if server.error is not None]


def hang(over: threading.Event) -> Hook:
    """No answer for a minute."""

    def hook(body: dict[str, Any]) -> None:
        over.wait(60)

    return hook


def told(groups: list[list[Completion]]) -> list[list[tuple[list[int], list[float]]]]:
    return [[(one.token_ids.tolist(), one.logprobs.tolist()) for one in group] for group in groups]


def moved(policy: Policy, scale: float = 0.2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    named = {name: tensor.clone() for name, tensor in policy.named_weights()}
    return {name: x + scale * x.std() * torch.randn(x.shape, generator=generator) for name, x in named.items()}
