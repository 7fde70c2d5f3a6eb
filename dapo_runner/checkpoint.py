"""Checkpoints: all a run needs to go on as if it had never stopped, or nothing at all.

    checkpoints/step_000040/
        model/                 transformers' format: `dapo eval`, vLLM and anything else can load it
        optimizer.safetensors  per parameter: exp_avg, exp_avg_sq, step; float32 master of half precision
        state.pt               step, sampler (cursor, groups carried over), every random generator
        manifest.json          the size of every other file, written last

A checkpoint is written beside its place, forced to the disk and renamed: whatever moment the power goes, the
folder of that name is whole or absent. Loading runs no code: safetensors, JSON, and torch's weights-only
unpickler.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dapo_runner.learner import Learner
from dapo_runner.sampler import DynamicSampler

_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on the disk, after ``step`` rollout steps."""

    path: Path
    step: int

    @property
    def model(self) -> Path:
        return self.path / "model"


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first. What a kill or a broken copy left half-written is passed over."""
    names = ((path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ()))
    found = [Checkpoint(path, int(name[1])) for path, name in names if name and is_whole(path)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    checkpoints = find_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def is_whole(path: Path) -> bool:
    """Every file of the manifest is there in its full size."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return False
    sizes = json.loads(manifest.read_text(encoding="utf-8"))
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in sizes.items())


def save_checkpoint(folder: Path, step: int, learner: Learner, sampler: DynamicSampler, keep: int) -> Checkpoint:
    """Write a checkpoint after ``step`` steps and remove all but the newest ``keep``."""
    final = folder / f"step_{step:06d}"
    unfinished = final.with_name(final.name + _UNFINISHED)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover)
    if final.exists():  # a broken one: a whole one of this step would have been resumed from
        shutil.rmtree(final)
    unfinished.mkdir()
    learner.policy.model.save_pretrained(unfinished / "model")
    learner.policy.tokenizer.save_pretrained(unfinished / "model")
    save_file(_optimizer_tensors(learner), unfinished / "optimizer.safetensors")
    torch.save({"step": step, "sampler": sampler.state_dict(), "rng": _rng_state()}, unfinished / "state.pt")
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    (unfinished / "manifest.json").write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for path in (*unfinished.rglob("*"), unfinished):
        _force_to_disk(path)
    unfinished.rename(final)
    _force_to_disk(folder)
    for old in find_checkpoints(folder)[:-keep]:
        # Renamed first: what a kill leaves of it is swept up by the next save.
        shutil.rmtree(old.path.rename(old.path.with_name(old.path.name + _UNFINISHED)))
    return Checkpoint(final, step)


def load_checkpoint(checkpoint: Checkpoint, learner: Learner, sampler: DynamicSampler) -> None:
    """Put everything back. The learner's policy must have been loaded from ``checkpoint.model``."""
    _load_optimizer(learner, load_file(checkpoint.path / "optimizer.safetensors"))
    state = torch.load(checkpoint.path / "state.pt", weights_only=True)
    sampler.load_state_dict(state["sampler"])
    _set_rng_state(state["rng"])


def _optimizer_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, master in learner.master.tensors.items():
        if name in learner.master.copied:
            tensors[f"{name}/master"] = master.detach()
        for key, value in learner.optimizer.state.get(master, {}).items():
            tensors[f"{name}/{key}"] = value
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _load_optimizer(learner: Learner, tensors: dict[str, torch.Tensor]) -> None:
    for name, master in learner.master.tensors.items():
        own = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
        if name in learner.master.copied:
            master.data.copy_(own.pop("master"))
        if own:
            learner.optimizer.state[master] = {key: value.to(master.device) for key, value in own.items()}
    learner.master.publish()


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


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
