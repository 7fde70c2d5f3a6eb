"""The state of a run other than weights and optimizer: sampler, loss scalers and random generators."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.distributed.checkpoint.stateful import Stateful

from dapo_runner.parallel.world import World

STATE_FILE = "state.pt"


def take_snapshot(sampler: Stateful) -> dict[str, Any]:
    """Return the state of a sampler, or of supervised training's cursor, and of this rank's random generators."""
    return {"sampler": sampler.state_dict(), "rng": _rng_state()}


def encode_snapshot(step: int, snapshot: dict[str, Any], scalers: list[GradScaler], world: World) -> bytes:
    """Return the content of ``STATE_FILE``, with the generators of every rank. Collective.

    It returns bytes because on a full disk torch.save fails with an assertion instead of an OSError.
    """
    generators = world.all_gather_object(snapshot["rng"])
    buffer = io.BytesIO()
    scales = [scaler.state_dict() for scaler in scalers]
    torch.save({"step": step, "sampler": snapshot["sampler"], "rng": generators, "scales": scales}, buffer)
    return buffer.getvalue()


def restore_snapshot(folder: Path, sampler: Stateful, scalers: list[GradScaler], world: World) -> int:
    """Restore the sampler, the loss scalers and the generators. Return the number of ranks that saved them.

    If the number of ranks has changed, every rank gets the generators of rank 0.
    """
    saved = world.run_or_raise_everywhere(lambda: torch.load(folder / STATE_FILE, weights_only=True))
    sampler.load_state_dict(saved["sampler"])
    for scaler, scale in zip(scalers, saved["scales"], strict=False):
        if scale:  # else it was saved with another model.dtype
            scaler.load_state_dict(scale)
    generators = saved["rng"]
    _set_rng_state(generators[world.rank if len(generators) == world.size else 0])
    return len(generators)


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Restore this rank's random generators at the end: what runs inside changes no later step."""
    state = _rng_state()
    try:
        yield
    finally:
        _set_rng_state(state)


def _rng_state() -> dict[str, Any]:
    """Return the states of all generators that the loop, a model or a reward function may use."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
