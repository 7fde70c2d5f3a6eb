"""Checkpoints: all a run needs to go on as if it had never stopped, or nothing at all.

    checkpoints/step_000040/
        model/                 transformers' format, adapters merged in: `dapo eval`, vLLM and anything else can load it
        adapter/               with model.lora: the adapters alone, in peft's format
        optimizer.safetensors  per parameter: exp_avg, exp_avg_sq, step; float32 master of half precision
        state.pt               step, sampler (cursor, groups carried over), every random generator
        manifest.json          size and SHA-256 of every other file, written last

A checkpoint is written beside its place, forced to the disk and renamed: whatever moment the power goes, the
folder of that name is whole or absent. One that was damaged since is refused, not passed over. Loading runs no
code: safetensors, JSON, and torch's weights-only unpickler.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dapo_runner.policy.lora import has_adapters, load_adapters, save_adapters
from dapo_runner.sampling.sampler import DynamicSampler
from dapo_runner.update.learner import Learner

_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".unfinished"
_BLOCK = 2**22  # bytes hashed at a time


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that is not what was written."""


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
    return [checkpoint for checkpoint in _named(folder) if is_whole(checkpoint.path)]


def _named(folder: Path) -> list[Checkpoint]:
    names = ((path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((Checkpoint(path, int(name[1])) for path, name in names if name), key=lambda found: found.step)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    checkpoints = find_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def checkpoint_to_resume(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, its content compared with what was written; None where there is none.

    Raises CheckpointError for a damaged one: to go on from an older one is for a person to decide.
    """
    newest = _named(folder)[-1:]
    for checkpoint in newest:
        damage = damage_of(checkpoint.path)
        if damage is not None:
            before = [other.step for other in find_checkpoints(folder) if other.step < checkpoint.step]
            rest = f"go on from the one after step {before[-1]}" if before else "start again"
            raise CheckpointError(f"{checkpoint.path} is damaged: {damage}; remove that folder to {rest}")
    return newest[0] if newest else None


def is_whole(path: Path) -> bool:
    """Every file of the manifest is there in its full size."""
    return damage_of(path, contents=False) is None


def damage_of(path: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint's files, for a person; None when they are what was written."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is missing or unreadable"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if contents and _digest(file) != digest:
            return f"{name} does not hold what was written"
    return None


def moment(sampler: DynamicSampler) -> dict[str, Any]:
    """What a checkpoint of now would hold beside the learner: the sampler and every random generator."""
    return {"sampler": sampler.state_dict(), "rng": _rng_state()}


def save_checkpoint(
    folder: Path,
    step: int,
    learner: Learner,
    sampler: DynamicSampler,
    keep: int,
    then: dict[str, Any] | None = None,
) -> Checkpoint:
    """Write a checkpoint after ``step`` steps and remove all but the newest ``keep``. ``then`` is the moment that it
    goes on from, where that is past.

    Raises CheckpointError where it cannot be written; the ones before it stay as they are.
    """
    with writing(folder / f"step_{step:06d}", folder):
        return _save(folder, step, learner, sampler, keep, then)


@contextmanager
def writing(path: Path, checkpoints: Path) -> Iterator[None]:
    """What a full disk, or a place that may not be written to, raises, as one clear CheckpointError that names
    ``path`` and the newest of ``checkpoints``.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        for leftover in checkpoints.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(leftover, ignore_errors=True)  # half a checkpoint would keep a full disk full
        kept = find_checkpoints(checkpoints)
        last = f"the last good checkpoint is {kept[-1].path}" if kept else "there is no checkpoint yet"
        raise CheckpointError(f"cannot write {path}: {error}; {last}") from error


def _save(
    folder: Path, step: int, learner: Learner, sampler: DynamicSampler, keep: int, then: dict[str, Any] | None
) -> Checkpoint:
    final = folder / f"step_{step:06d}"
    unfinished = final.with_name(final.name + _UNFINISHED)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover)
    if final.exists():  # a broken one: a whole one of this step would have been resumed from
        shutil.rmtree(final)
    unfinished.mkdir()
    learner.policy.save(unfinished / "model")
    if has_adapters(learner.policy.model):
        save_adapters(learner.policy.model, unfinished / "adapter")
    save_file(_optimizer_tensors(learner), unfinished / "optimizer.safetensors")
    _save_state({"step": step, **(then or moment(sampler))}, unfinished / "state.pt")
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(unfinished)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files
    }
    (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _put_in_place(unfinished, final)
    for old in find_checkpoints(folder)[:-keep]:
        # Renamed first: what a kill leaves of it is swept up by the next save.
        shutil.rmtree(old.path.rename(old.path.with_name(old.path.name + _UNFINISHED)))
    return Checkpoint(final, step)


def copy_checkpoint(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The same in another folder of checkpoints. Raises CheckpointError where it cannot be written or is damaged."""
    final = folder / checkpoint.path.name
    unfinished = final.with_name(final.name + _UNFINISHED)
    with writing(final, folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(checkpoint.path, unfinished)
        if (damage := damage_of(unfinished)) is not None:
            shutil.rmtree(unfinished)
            raise CheckpointError(f"{checkpoint.path} is damaged: {damage}")
        _put_in_place(unfinished, final)
    return Checkpoint(final, checkpoint.step)


def _put_in_place(unfinished: Path, final: Path) -> None:
    for path in (*unfinished.rglob("*"), unfinished):
        _force_to_disk(path)
    unfinished.rename(final)
    _force_to_disk(final.parent)


def load_checkpoint(checkpoint: Checkpoint, learner: Learner, sampler: DynamicSampler) -> None:
    """Put everything back. The learner's policy must have been loaded from ``checkpoint.model``; one with adapters
    from the model that training started from.
    """
    if has_adapters(learner.policy.model):
        load_adapters(learner.policy.model, checkpoint.path / "adapter")
    _load_optimizer(learner, load_file(checkpoint.path / "optimizer.safetensors"))
    state = torch.load(checkpoint.path / "state.pt", weights_only=True)
    sampler.load_state_dict({"steps": state["step"], **state["sampler"]})  # older samplers did not count
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


def _save_state(state: dict[str, Any], path: Path) -> None:
    """By way of memory: on a full disk torch.save reports an enforced assertion, a plain write what is wrong."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getbuffer())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
