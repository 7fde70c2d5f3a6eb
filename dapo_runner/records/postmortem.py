"""The batch of an update that went wrong, kept for whoever wants to look at it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from dapo_runner.types import PackedBatch


def save_batch(path: Path, batches: Sequence[PackedBatch], error: str) -> Path:
    """Write micro-batches, and what went wrong with them, as safetensors named ``<number>.<field>``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": tensor.detach().cpu().contiguous()
        for number, batch in enumerate(batches)
        for name, tensor in batch.tensors().items()
    }
    save_file(tensors, path, metadata={"error": error, "micro_batches": json.dumps(len(batches))})
    return path


def load_batch(path: Path) -> list[PackedBatch]:
    """The micro-batches of ``save_batch``, on the CPU."""
    with safe_open(path, framework="pt") as file:
        count = json.loads(file.metadata()["micro_batches"])
        fields: list[dict[str, object]] = [{} for _ in range(count)]
        for key in file.offset_keys():
            number, _, name = key.partition(".")
            fields[int(number)][name] = file.get_tensor(key)
    return [PackedBatch(**field) for field in fields]  # type: ignore[arg-type]
