"""The state of a run beside weights and optimizer: the sampler and every random generator."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dapo_runner.parallel.world import World

STATE_FILE = "state.pt"


class Resumable(Protocol):
    """Walks over the data of a run: a sampler, or the cursor of supervised training."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def take_snapshot(sampler: Resumable) -> dict[str, Any]:
    """Return the state of the sampler and of every random generator of this rank."""
    return {"sampler": sampler.state_dict(), "rng": _rng_state()}


def encode_snapshot(step: int, snapshot: dict[str, Any], world: World) -> bytes:
    """Return the content of ``STATE_FILE``, with the generators of every rank. Collective.

    On a full disk torch.save fails with an assertion, a plain write of these bytes with an OSError.
    """
    generators = world.all_gather_object(snapshot["rng"])
    buffer = io.BytesIO()
    torch.save({"step": step, "sampler": snapshot["sampler"], "rng": generators}, buffer)
    return buffer.getvalue()


def restore_snapshot(folder: Path, sampler: Resumable, world: World) -> int:
    """Restore the sampler and the generators, and return how many ranks wrote them.

    On another number of ranks, every rank takes the generators of rank 0.
    """
    saved = world.run_or_raise_everywhere(lambda: torch.load(folder / STATE_FILE, weights_only=True))
    sampler.load_state_dict(saved["sampler"])
    generators = saved["rng"]
    state = generators[world.rank if len(generators) == world.size else 0]
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    return len(generators)


def _rng_state() -> dict[str, Any]:
    """Return every generator that the loop, a model or a reward function may draw from."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
