"""What a checkpoint holds beside weights and optimizer: the sampler and every random generator."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dapo_runner.parallel.world import World

FILE = "state.pt"


class Resumable(Protocol):
    """What walks over the data of a run: a sampler, or the cursor of a supervised one."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def take_snapshot(sampler: Resumable) -> dict[str, Any]:
    """What a checkpoint of now would hold beside the learner: the sampler and every random generator."""
    return {"sampler": sampler.state_dict(), "rng": _rng_state()}


def packed(step: int, snapshot: dict[str, Any], world: World) -> bytes:
    """The content of ``FILE`` for a moment; of several ranks with the generators of each. Collective.

    By way of memory: on a full disk torch.save reports an enforced assertion, a plain write what is wrong.
    """
    generators = snapshot["rng"] if world.is_single_process else world.all_gather_object(snapshot["rng"])
    buffer = io.BytesIO()
    torch.save({"step": step, **snapshot, "rng": generators}, buffer)
    return buffer.getvalue()


def load_snapshot(path: Path, sampler: Resumable, world: World) -> int:
    """Put sampler and generators back; where another number of ranks wrote them, every rank takes the generators of
    rank 0. Returns that number.
    """
    state = world.run_or_raise_everywhere(lambda: torch.load(path / FILE, weights_only=True))
    sampler.load_state_dict({"steps": state["step"], **state["sampler"]})  # older samplers did not count
    generators: Sequence[Any] = state["rng"] if isinstance(state["rng"], list) else [state["rng"]]
    _set_rng_state(generators[world.rank if len(generators) == world.size else 0])
    return len(generators)


def _rng_state() -> dict[str, Any]:
    """Every generator that the loop, a model or a reward function may draw from."""
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
