"""The learner of one process, as files."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dapo_runner.algorithms.learner import Learner
from dapo_runner.policy.lora import adapter_tensors, has_adapters, save_adapters


def write_learner(learner: Learner, unfinished: Path) -> list[str]:
    """Returns the files that are in its manifest already: none."""
    learner.policy.save(unfinished / "model")
    model = learner.policy.model
    if has_adapters(model):
        save_adapters(model, adapter_tensors(model), unfinished / "adapter")
    save_file(_optimizer_tensors(learner), unfinished / "optimizer.safetensors")
    return []


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors = {}
    for part in learner.parts():
        for name, master in part.tensors.items():
            if name in part.alone:
                tensors[f"{part.prefix}{name}/master"] = master.detach()
            for key, value in part.state_of(master).items():
                tensors[f"{part.prefix}{name}/{key}"] = value
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
