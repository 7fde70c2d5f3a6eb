"""The batch of an update that went wrong, kept for whoever wants to look at it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from dapo_runner.types import PackedBatch


def save_batch(path: Path, batches: Sequence[PackedBatch], error: str) -> Path:
    """Write micro-batches, and what went wrong with them, as safetensors named ``<number>.<field>``: what
    ``safetensors.torch.load_file`` reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": tensor.detach().cpu().contiguous()
        for number, batch in enumerate(batches)
        for name, tensor in batch.tensors().items()
    }
    save_file(tensors, path, metadata={"error": error})
    return path
