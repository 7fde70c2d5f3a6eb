"""The folder ``model/``. Each rank writes a share of the weights, so no rank holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dapo_runner.files import force_to_disk, share
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import Policy
from dapo_runner.policy.weights import checkpoint_weights, layer_of

FOLDER = "model"


def stage_model(policy: Policy, *, copied: bool) -> dict[str, Tensor]:
    """Return this rank's share of the weights on the CPU, by their names on disk.

    Weights are gathered one at a time. All tensors of a layer go to one rank, because several may become one on disk.
    Collective. ``copied``: return copies, which do not change while training continues.
    """
    world, owner, share = policy.world, dict[str, int](), dict[str, Tensor]()
    filled = [0] * world.size
    for name, weight in policy.named_weights():
        rank = owner.setdefault(layer_of(name), filled.index(min(filled)))
        filled[rank] += weight.nbytes
        if rank == world.rank:
            share[name] = weight.to("cpu", copy=copied or not world.is_single_process).contiguous()
    return dict(checkpoint_weights(policy.model, share.items()))


def write_model(weights: dict[str, Tensor], checkpoint: Path, world: World) -> list[Path]:
    """Write the file of this rank and return its path; an empty list if it has no weights."""
    if not weights:
        return []
    path = checkpoint / FOLDER / _file_name(world.rank, world.size)
    save_file(weights, path, metadata={"format": "pt"})
    share(path)
    force_to_disk(path)
    return [path]


def write_index(checkpoint: Path, sizes: list[dict[str, int]]) -> None:
    """Write the index of several ranks' files. ``sizes``: the bytes of each rank's weights by name."""
    if len(sizes) == 1:
        return
    weights = {name: _file_name(rank, len(sizes)) for rank, part in enumerate(sizes) for name in part}
    total = sum(sum(part.values()) for part in sizes)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    (checkpoint / FOLDER / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _file_name(rank: int, size: int) -> str:
    return "model.safetensors" if size == 1 else f"model-{rank + 1:05d}-of-{size:05d}.safetensors"
