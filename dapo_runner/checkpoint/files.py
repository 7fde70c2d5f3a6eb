"""The files of a checkpoint: find them, compare them with the manifest, and move a complete folder into place."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from dapo_runner.errors import RunError
from dapo_runner.files import copy_folder, force_to_disk
from dapo_runner.parallel.world import SINGLE_PROCESS, World

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"


class CheckpointError(RunError):
    """A checkpoint cannot be written, or is damaged."""


class Checkpoint(NamedTuple):
    """A checkpoint on disk, after ``step`` rollout steps."""

    path: Path
    step: int

    @property
    def model(self) -> Path:
        return self.path / "model"


def find_checkpoints(folder: Path, *, damaged: bool = False) -> list[Checkpoint]:
    """Return the complete checkpoints, oldest first; with ``damaged`` also the incomplete ones."""
    names = ((path, re.fullmatch(r"step_(\d{6,})", path.name)) for path in folder.glob("step_*"))
    found = [Checkpoint(path, int(name[1])) for path, name in names if name and (damaged or is_whole(path))]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    return next(reversed(find_checkpoints(folder)), None)


def checkpoint_to_resume(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint after checking its content against the manifest; None without checkpoints.

    Raises CheckpointError if it is damaged: you decide whether to resume from an older one.
    """
    if not (checkpoints := find_checkpoints(folder, damaged=True)):
        return None
    newest = checkpoints[-1]
    if (damage := damage_of(newest.path)) is not None:
        older = [other.step for other in checkpoints[:-1] if is_whole(other.path)]
        rest = f"resume from step {older[-1]}" if older else "start again"
        raise CheckpointError(f"{newest.path} is damaged: {damage}. Restore that file, or remove the folder to {rest}.")
    return newest


def is_whole(path: Path) -> bool:
    """Return whether all files of the manifest exist with their full size."""
    return damage_of(path, contents=False) is None


def damage_of(path: Path, *, contents: bool = True) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None. ``contents``: compare their hashes too."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {path / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    for file, (size, _) in expected.items():
        if (found := file.stat().st_size if file.is_file() else None) != size:
            return f"{file.relative_to(path)}: expected {size} bytes, got {'no file' if found is None else found}"
    if contents and (other := [file for file, digest in _digests(expected).items() if digest != expected[file][1]]):
        return f"{other[0].relative_to(path)} has other content than was written"
    return None


@contextmanager
def writing(path: Path, checkpoints: Path, world: World = SINGLE_PROCESS) -> Iterator[None]:
    """Convert a failure to write, which must occur on all ranks of ``world``, to a CheckpointError that names ``path``
    and the newest checkpoint. Rank 0 removes the unfinished folder of ``path``, which may fill the disk.
    """
    try:
        yield
    except (OSError, SafetensorError, FloatingPointError) as error:

        def describe() -> str:
            shutil.rmtree(path.with_name(path.name + UNFINISHED), ignore_errors=True)
            latest = latest_checkpoint(checkpoints)
            return f"the last good checkpoint is {latest.path}" if latest else "there is no checkpoint yet"

        last = world.broadcast_from_rank0(describe)
        raise CheckpointError(f"cannot write {path}: {error}; {last}") from error


def begin(final: Path) -> Path:
    """Create a temporary folder for a checkpoint. ``finish`` moves it to ``final``."""
    final.parent.mkdir(parents=True, exist_ok=True)
    prune(final.parent)
    if final.exists():  # it is damaged: the run would have resumed from a complete one
        shutil.rmtree(final)
    unfinished = final.with_name(final.name + UNFINISHED)
    unfinished.mkdir()
    return unfinished


def prune(checkpoints: Path, keep: int | None = None) -> None:
    """Remove unfinished checkpoints and, with ``keep``, all but the newest ones. After a kill, repeat it."""
    for old in find_checkpoints(checkpoints)[:-keep] if keep else []:
        old.path.rename(old.path.with_name(old.path.name + UNFINISHED))
    for leftover in checkpoints.glob(f"*{UNFINISHED}"):
        shutil.rmtree(leftover, ignore_errors=True)


def finish(unfinished: Path, entries: Mapping[str, Mapping[str, Any]], keep: int) -> None:
    """Write the manifest, move the folder into place and remove all checkpoints but the newest ``keep``.

    ``entries`` are known manifest entries, also of other ranks' files that a shared disk does not list here yet.
    """
    others = {path for path in unfinished.rglob("*") if path.is_file()} - {unfinished / name for name in entries}
    manifest = {**entries, **entries_of(others, unfinished)}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
    _move_into_place(unfinished)
    prune(unfinished.parent, keep)


def entries_of(paths: Collection[Path], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of files in ``folder``."""
    found = _digests(paths).items()
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha} for path, sha in found}


def copy_checkpoint(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Copy a checkpoint to another folder of checkpoints. Raises CheckpointError."""
    final = folder / checkpoint.path.name
    if final.exists():
        raise CheckpointError(f"{final}: expected no checkpoint there yet")
    with writing(final, folder):
        unfinished = begin(final)
        copy_folder(checkpoint.path, unfinished)
        if (damage := damage_of(unfinished)) is not None:
            shutil.rmtree(unfinished)
            raise CheckpointError(f"{checkpoint.path} is damaged: {damage}")
        _move_into_place(unfinished)
    return Checkpoint(final, checkpoint.step)


def _move_into_place(unfinished: Path) -> None:
    for path in (*unfinished.rglob("*"), unfinished):
        force_to_disk(path)
    unfinished.rename(unfinished.with_name(unfinished.name.removesuffix(UNFINISHED)))
    force_to_disk(unfinished.parent)


def _digests(paths: Collection[Path]) -> dict[Path, str]:
    try:
        with ThreadPoolExecutor() as pool:
            return dict(zip(paths, pool.map(_digest, paths), strict=True))
    except RuntimeError:  # no thread can start
        return dict(zip(paths, map(_digest, paths), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
