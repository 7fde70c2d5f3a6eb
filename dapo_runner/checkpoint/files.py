"""A checkpoint as files: found, compared with its manifest, put in its place whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MANIFEST = "manifest.json"
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
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is missing or unreadable"
    for name, (size, _) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    if not contents:
        return None
    with ThreadPoolExecutor() as pool:
        found = pool.map(_digest, (path / name for name in expected))
        changed = [name for name, digest in zip(expected, found, strict=True) if digest != expected[name][1]]
    return f"{changed[0]} does not hold what was written" if changed else None


@contextmanager
def writing(path: Path, checkpoints: Path) -> Iterator[None]:
    """What a full disk, or a place that may not be written to, raises, as one clear CheckpointError that names
    ``path`` and the newest of ``checkpoints``.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise not_written(path, checkpoints, error) from error


def not_written(path: Path, checkpoints: Path, error: Exception) -> CheckpointError:
    """That error, once what would keep a full disk full is gone."""
    for leftover in checkpoints.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover, ignore_errors=True)
    kept = find_checkpoints(checkpoints)
    last = f"the last good checkpoint is {kept[-1].path}" if kept else "there is no checkpoint yet"
    return CheckpointError(f"cannot write {path}: {error}; {last}")


def begin(folder: Path, step: int) -> Path:
    """An empty folder for the checkpoint after ``step`` steps, beside its place. ``finish`` puts it there."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover)
    final = place_of(folder, step)
    if final.exists():  # a broken one: a whole one of this step would have been resumed from
        shutil.rmtree(final)
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir()
    return unfinished


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def finish(unfinished: Path, entries: Mapping[str, Mapping[str, Any]], keep: int) -> None:
    """Write the manifest, of ``entries`` where they tell of a file, and give the folder its name; remove all but the
    newest ``keep``.
    """
    written = {path for path in unfinished.rglob("*") if path.is_file()}
    written |= {unfinished / name for name in entries}  # of other machines, if a shared disk does not list them yet
    names = {str(path.relative_to(unfinished)): path for path in sorted(written)}
    manifest = {name: entries[name] if name in entries else entry_of(path) for name, path in names.items()}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _put_in_place(unfinished, unfinished.with_name(unfinished.name.removesuffix(_UNFINISHED)))
    for old in find_checkpoints(unfinished.parent)[:-keep]:
        # Renamed first: what a kill leaves of it is swept up by the next save.
        shutil.rmtree(old.path.rename(old.path.with_name(old.path.name + _UNFINISHED)))


def entry_of(path: Path) -> dict[str, Any]:
    """A file's line in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


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
        force_to_disk(path)
    unfinished.rename(final)
    force_to_disk(final.parent)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
