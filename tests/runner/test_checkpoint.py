"""Checkpoints: whole or absent, everything comes back, and loading runs nothing."""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_config, make_group, make_prompt, random_sequences
from refusals import refused
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import (
    CheckpointError,
    checkpoint_to_resume,
    files,
    find_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    model_files,
    optimizer,
    save_checkpoint,
    snapshot,
    take_snapshot,
)
from dapo_runner.config import ModelConfig
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler

CPU = torch.device("cpu")
OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"
CONFIG = make_config(optimizer={"lr": 1e-3, "warmup_steps": 0, "token_budget": 95})


def make_parts(model: Path, dtype: str = "float32") -> tuple[Learner, DynamicSampler]:
    policy = load_policy(model, ModelConfig.model_validate({"path": "x", "dtype": dtype}), CPU)
    prompts = [make_prompt(f"p{i}") for i in range(10)]
    return Learner(policy, CONFIG), DynamicSampler(PromptCursor(prompts, seed=0), GroupBuffer(CONFIG))


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    figures = []
    for step in steps:
        (mini,) = learner.prepare(random_sequences(8, seed=step))
        figures.append(learner.update(mini, step))
    return figures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_goes_on_as_if_it_had_not_stopped(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    learner, sampler = make_parts(model_folder, dtype)
    for scaler in learner.scalers():
        scaler.set_growth_interval(4)  # so that it grows after the checkpoint
    train(learner, range(3))
    saved = save_checkpoint(tmp_path, 3, learner, take_snapshot(sampler), keep=2)
    with safe_open(saved.path / OPTIMIZER, "pt") as stored:
        kinds = {name.rpartition("/")[2] for name in stored.keys()}  # noqa: SIM118
    assert ("master" in kinds) == (dtype != "float32")  # of float32 they are the weights of model/
    expected = train(learner, range(3, 6))
    resumed, resumed_sampler = make_parts(saved.model, dtype)
    load_checkpoint(saved, resumed, resumed_sampler)
    assert train(resumed, range(3, 6)) == expected
    for name, tensor in learner.master.tensors.items():
        assert torch.equal(tensor, resumed.master.tensors[name]), name
    if dtype == "float16":
        assert len({found["loss_scale"] for found in expected}) > 1


def test_sampler_and_every_generator_come_back(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    sampler.cursor.take(7)
    sampler.n_rounds = 4
    sampler.buffer.groups = [make_group("RW", "carried")]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    saved = save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=2)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    expected, upcoming = draw(), [prompt.id for prompt in sampler.cursor.take(8)]
    resumed, resumed_sampler = make_parts(saved.model)
    draw()
    load_checkpoint(saved, resumed, resumed_sampler)
    assert draw() == expected
    assert [prompt.id for prompt in resumed_sampler.cursor.take(8)] == upcoming
    assert resumed_sampler.n_rounds == 4
    (group,) = resumed_sampler.buffer.groups
    assert group.prompt == sampler.buffer.groups[0].prompt
    assert (
        group.samples[1].completion.logprobs.tolist()
        == sampler.buffer.groups[0].samples[1].completion.logprobs.tolist()
    )


def test_old_checkpoints_go_and_unfinished_ones_are_passed_over(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, learner, take_snapshot(sampler), keep=2)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2, 3]
    (tmp_path / "step_000009.unfinished").mkdir()
    (tmp_path / "step_000008").mkdir()  # no manifest
    (tmp_path / "notes.txt").write_text("mine")
    state = tmp_path / "step_000003" / "state.pt"
    whole = state.read_bytes()
    for spoiled in (whole[:-1], whole + b"\0"):  # a copy that broke off, and one that something was added to
        state.write_bytes(spoiled)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        assert latest.step == 2
    save_checkpoint(tmp_path, 3, learner, take_snapshot(sampler), keep=2)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2, 3]
    assert not list(tmp_path.glob("*.unfinished"))
    assert (tmp_path / "notes.txt").exists()


def test_dying_while_saving_leaves_the_checkpoint_before_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, sampler = make_parts(model_folder)
    save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    writer = optimizer.HuggingFaceStorageWriter
    places = (model_files, "save_file"), (writer, "write_data"), (snapshot, "_rng_state"), (files, "force_to_disk")
    for module, dies_in in places:
        with monkeypatch.context() as patch:
            patch.setattr(module, dies_in, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        assert latest.step == 1
    assert save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1).step == 2
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond ``size`` bytes: a disk that is full, for real."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("room", [100, 3000, 60_000, 100_000])
def test_a_full_disk_is_told_and_leaves_the_checkpoint_before_it(model_folder: Path, tmp_path: Path, room: int) -> None:
    """The limit strikes the tokenizer, the weights, or the optimizer's moments, which are twice the weights."""
    learner, sampler = make_parts(model_folder)
    train(learner, range(1))
    save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    with (
        file_size_limit(room),
        pytest.raises(CheckpointError, match=r"step_000002: .*step_000001"),
    ):
        save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]  # no half of one keeps the disk full
    found = checkpoint_to_resume(tmp_path)
    assert found is not None
    assert found.step == 1
    assert save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1).step == 2


def test_a_folder_that_cannot_be_written_to_is_told(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, learner, take_snapshot(sampler), keep=1)


@pytest.mark.parametrize("file", ["model/model.safetensors", OPTIMIZER, "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_refused_by_name(model_folder: Path, tmp_path: Path, file: str, damage: str) -> None:
    learner, sampler = make_parts(model_folder)
    train(learner, range(1))
    for step in (1, 2):
        save_checkpoint(tmp_path, step, learner, take_snapshot(sampler), keep=2)
    spoiled = tmp_path / "step_000002" / file
    content = bytearray(spoiled.read_bytes())
    content[len(content) // 2] ^= 0x80
    spoiled.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    if damage == "gone":
        spoiled.unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint_to_resume(tmp_path)
    assert f"step_000002 is damaged: {file}" in str(caught.value)
    assert "step 1." in str(caught.value)
    shutil.rmtree(tmp_path / "step_000002")
    found = checkpoint_to_resume(tmp_path)
    assert found is not None
    assert found.step == 1


def test_without_checkpoints_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert checkpoint_to_resume(tmp_path) is None
    assert checkpoint_to_resume(tmp_path / "none") is None


def test_the_model_of_a_checkpoint_is_an_ordinary_one(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    train(learner, range(2))
    saved = save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1)
    model = AutoModelForCausalLM.from_pretrained(saved.model, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(saved.model)
    ids = torch.tensor([tokenizer("12+34=")["input_ids"]])
    own = dict(learner.policy.model.named_parameters())
    assert all(torch.equal(parameter, own[name]) for name, parameter in model.named_parameters())
    assert model(input_ids=ids).logits.shape == (1, 6, len(tokenizer))


def test_loading_runs_no_code(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    saved = save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"step": 1, "sampler": Evil()}, saved.path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(saved, learner, sampler)
    assert not (tmp_path / "ran").exists()
    kinds = {path.suffix for path in saved.path.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".pt"}, kinds


def test_other_data_are_refused(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    saved = save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    same = [make_prompt(f"p{i}") for i in range(10)]
    for cursor in (
        PromptCursor([make_prompt("q")], seed=0),
        PromptCursor([*same[:9], make_prompt("p9", answer="8")], seed=0),
        PromptCursor(same, seed=0, heldout=[make_prompt("h")]),
    ):
        with refused("data.path"):
            load_checkpoint(saved, learner, DynamicSampler(cursor, GroupBuffer(CONFIG)))
    load_checkpoint(saved, learner, DynamicSampler(PromptCursor(same, seed=0), GroupBuffer(CONFIG)))


def test_the_manifest_names_every_file(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    saved = save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    files = {str(p.relative_to(saved.path)) for p in saved.path.rglob("*") if p.is_file()}
    assert set(manifest) == files - {"manifest.json"}


def test_a_checkpoint_of_an_older_version_is_refused(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    saved = save_checkpoint(tmp_path, 1, learner, take_snapshot(sampler), keep=1)
    shutil.rmtree(saved.path / "optimizer")
    with pytest.raises(CheckpointError, match="older version"):
        load_checkpoint(saved, learner, sampler)
