"""Checkpoints: whole or absent, everything comes back, and loading runs nothing."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import file_size_limit, make_config, make_prompt, random_sequences
from learners import learner_of
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import (
    BackgroundSaves,
    Checkpoint,
    CheckpointError,
    files,
    find_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    take_snapshot,
)
from dapo_runner.checkpoint.files import checkpoint_to_resume, copy_checkpoint
from dapo_runner.config import ModelConfig
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.interrupt import StopRequest
from dapo_runner.logging.run_log import CHECKPOINTS, log_changes
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import load_policy
from dapo_runner.preflight.dry_run import gib, summarize
from dapo_runner.preflight.memory import checkpoint_parts, model_shape
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.run.start import find_start

Parts = tuple[Learner, DynamicSampler]
OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"
CONFIG = make_config(optimizer={"lr": 1e-3, "warmup_steps": 0, "token_budget": 95})


def make_parts(model: Path, dtype: str = "float32") -> Parts:
    policy = load_policy(model, ModelConfig.model_validate({"path": "x", "dtype": dtype}), torch.device("cpu"))
    prompts = [make_prompt(f"p{i}") for i in range(10)]
    return Learner(policy, CONFIG), DynamicSampler(PromptCursor(prompts, seed=0), GroupBuffer(CONFIG))


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    return [learner.update(*learner.prepare(random_sequences(8, seed=step)), step) for step in steps]


def save(folder: Path, step: int, parts: Parts, keep: int = 2) -> Checkpoint:
    learner, sampler = parts
    return save_checkpoint(folder, step, learner, take_snapshot(sampler), keep)


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(folder)]


@pytest.fixture(scope="module")
def parts(model_folder: Path) -> Parts:
    """After one update, so that the optimizer has moments. No test trains it further."""
    learner, sampler = make_parts(model_folder)
    train(learner, range(1))
    return learner, sampler


@pytest.fixture(scope="module")
def saved(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        save(folder, step, parts)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_goes_on_as_if_it_had_not_stopped(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    learner, sampler = make_parts(model_folder, dtype)
    for scaler in learner.scalers():
        scaler.set_growth_interval(4)  # so that it grows after the checkpoint
    train(learner, range(3))
    checkpoint = save(tmp_path, 3, (learner, sampler))
    assert [path.name for path in checkpoint.model.glob("model*")] == ["model.safetensors"]  # one file has no index
    with safe_open(checkpoint.path / OPTIMIZER, "pt") as stored:
        kinds = {name.rpartition("/")[2] for name in stored.keys()}  # noqa: SIM118
    assert ("master" in kinds) == (dtype != "float32")  # of float32 they are the weights of model/
    expected = train(learner, range(3, 6))
    resumed, resumed_sampler = make_parts(checkpoint.model, dtype)
    load_checkpoint(checkpoint, resumed, resumed_sampler)
    assert train(resumed, range(3, 6)) == expected
    for name, tensor in learner.master.tensors.items():
        assert torch.equal(tensor, resumed.master.tensors[name]), name
    if dtype == "float16":
        assert len({found["loss_scale"] for found in expected}) > 1
    else:  # without a loss scale, which float16 then begins with its own
        load_checkpoint(checkpoint, *make_parts(checkpoint.model, "float16"))


@pytest.mark.parametrize(
    ("dtype", "overrides"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("float32", {"model": {"lora": {"rank": 16}}}),
        ("bfloat16", {"model": {"lora": {"rank": 16}}}),
        ("bfloat16", {"advantage": {"kind": "gae"}, "critic": {}}),
        ("float32", {"loss": {"reference_ema": 0.9, "overrides": {"kl_coef": 0.1}}}),
    ],
)
def test_its_size_is_known_before(model_folder: Path, tmp_path: Path, dtype: str, overrides: dict[str, Any]) -> None:
    learner = learner_of(model_folder, dtype, **overrides)
    train(learner, range(1))
    checkpoint = save(tmp_path, 1, (learner, make_parts(model_folder)[1]))
    sizes = dict.fromkeys(("optimizer", "model", "adapter"), 0)
    for path in checkpoint.path.rglob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            sizes[path.parent.name] += sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    shape = model_shape(learner.config.model)
    assert shape is not None
    expected = checkpoint_parts(learner.config, shape)
    assert expected == pytest.approx(tuple(sizes.values()), rel=0.05)
    assert gib(sum(expected)) in (disk := summarize(learner.config)["disk"])
    assert gib(3 * sum(expected)) in disk


def test_a_background_save_is_of_its_step(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (learner, sampler), go_on, write = make_parts(model_folder), threading.Event(), HuggingFaceStorageWriter.write_data
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", lambda *given: (go_on.wait(60), write(*given))[1])
    train(learner, range(1))
    saves = BackgroundSaves(SINGLE_PROCESS, timeout=60.0)
    saves.start(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    expected = train(learner, range(1, 3))
    with StopRequest() as stop:
        stop.requested = True
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            saves.finish()
    go_on.set()
    found = Checkpoint(tmp_path / "step_000001", 1)
    assert saves.finish() == found
    resumed, resumed_sampler = make_parts(found.model)
    load_checkpoint(found, resumed, resumed_sampler)
    assert train(resumed, range(1, 3)) == expected


def test_every_generator_comes_back(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function of the user's own may draw from. The files are on the disk before the checkpoint is there."""
    synced = set[str]()
    monkeypatch.setattr(files, "force_to_disk", lambda path: synced.add(path.name))
    checkpoint = save(tmp_path, 1, parts)
    assert synced >= {path.name for path in checkpoint.path.rglob("*")}

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    expected = draw()
    load_checkpoint(checkpoint, *parts)
    assert draw() == expected


def test_old_checkpoints_go_and_unfinished_ones_are_passed_over(parts: Parts, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is checkpoint_to_resume(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step, parts)
    assert steps_in(tmp_path) == [2, 3]
    (tmp_path / "step_000009.unfinished").mkdir()
    (tmp_path / "step_000008").mkdir()  # no manifest
    (tmp_path / "notes.txt").write_text("mine")
    state = tmp_path / "step_000003" / "state.pt"
    whole = state.read_bytes()
    for spoiled in (whole[:-1], whole + b"\0"):  # a copy that broke off, and one that something was added to
        state.write_bytes(spoiled)
        assert steps_in(tmp_path) == [2]
    save(tmp_path, 3, parts)
    assert steps_in(tmp_path) == [2, 3]
    assert not list(tmp_path.glob("*.unfinished"))
    assert (tmp_path / "notes.txt").exists()


def test_a_start_removes_what_a_save_left_unfinished_and_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    """Also if this start has a smaller `run.keep`."""
    config = make_config(run={"output_dir": str(tmp_path), "keep": 1})
    folder = shutil.copytree(saved, config.run_dir / CHECKPOINTS)
    (folder / "step_000000.unfinished").mkdir()
    start = find_start(config, config.run_dir)
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002"]
    assert start.last_completed_step == 2


@pytest.mark.parametrize("room", [100, 1200, 3000, 60_000, 100_000])
def test_a_full_disk_leaves_the_checkpoint_before_it(parts: Parts, tmp_path: Path, room: int) -> None:
    """The limit strikes the tokenizer, the weights, or the optimizer's moments, which are twice the weights."""
    save(tmp_path, 1, parts, keep=1)
    with file_size_limit() as limit:
        limit(room)
        with pytest.raises(CheckpointError, match=r"step_000002: .*step_000001"):
            save(tmp_path, 2, parts, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]  # no half of one keeps the disk full
    assert checkpoint_to_resume(tmp_path) == Checkpoint(tmp_path / "step_000001", 1)
    assert save(tmp_path, 2, parts, keep=1).step == 2


def test_a_log_that_cannot_be_written_leaves_the_save_in_progress(tmp_path: Path) -> None:
    unfinished = files.begin(tmp_path / CHECKPOINTS / "step_000001")
    with file_size_limit() as limit:
        limit(1)
        with pytest.raises(CheckpointError, match=r"changes\.jsonl"):
            log_changes(tmp_path, 1, [("run.steps", 1, 2)])
    assert unfinished.exists()


def test_a_folder_that_cannot_be_written_to_is_named(parts: Parts, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file/checkpoints"):
        save(tmp_path / "file" / "checkpoints", 1, parts)
    with pytest.raises(CheckpointError, match=r"step_000001"):  # nor is one that is there already
        copy_checkpoint(find_checkpoints(saved)[0], saved)
    assert steps_in(saved) == [1, 2]


@pytest.mark.parametrize("file", ["model/model.safetensors", OPTIMIZER, "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_refused_by_name(saved: Path, tmp_path: Path, file: str, damage: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    spoiled = folder / "step_000002" / file
    content = bytearray(spoiled.read_bytes())
    content[len(content) // 2] ^= 0x80
    spoiled.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    if damage == "gone":
        spoiled.unlink()
    with pytest.raises(CheckpointError, match=rf"step_000002 .*{file}.* step 1\b"):
        checkpoint_to_resume(folder)
    shutil.rmtree(folder / "step_000002")
    assert checkpoint_to_resume(folder) == Checkpoint(folder / "step_000001", 1)


def test_files_are_hashed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, both, digest = [tmp_path / "a", tmp_path / "b"], threading.Barrier(2), files._digest
    for path in paths:
        path.write_text(path.name)

    def wait_and_hash(path: Path) -> str:
        both.wait(timeout=20)
        return digest(path)

    monkeypatch.setattr(files, "_digest", wait_and_hash)
    wanted = {name: {"bytes": 1, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("a", "b")}
    assert files.entries_of(paths, tmp_path) == wanted


def test_files_are_hashed_where_no_thread_can_start(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    learner, sampler = parts
    save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    assert checkpoint_to_resume(tmp_path) is not None


def test_loading_runs_no_code(parts: Parts, saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "ran",)

    checkpoint = copy_checkpoint(find_checkpoints(saved)[-1], tmp_path)
    torch.save({"step": 1, "sampler": Evil()}, checkpoint.path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(checkpoint, *parts)
    assert not (tmp_path / "ran").exists()
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} <= {".json", ".safetensors", ".pt"}


def test_a_checkpoint_of_another_model_is_refused(saved: Path, start: Path, tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(find_checkpoints(saved)[-1], tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.\S+weight: .*\[\d+, \d+\]"):
        load_checkpoint(checkpoint, *make_parts(start))


def test_a_checkpoint_without_optimizer_is_refused(parts: Parts, saved: Path, tmp_path: Path) -> None:
    """An early version wrote it elsewhere."""
    checkpoint = copy_checkpoint(find_checkpoints(saved)[-1], tmp_path)
    shutil.rmtree(checkpoint.path / "optimizer")
    with pytest.raises(CheckpointError, match="optimizer"):
        load_checkpoint(checkpoint, *parts)
