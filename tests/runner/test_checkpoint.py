"""Checkpoints: whole or absent, everything comes back, and loading runs nothing."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_config, make_group, make_prompt
from test_learner import random_sequences

from dapo_runner import checkpoint as module
from dapo_runner.checkpoint import find_checkpoints, latest_checkpoint, load_checkpoint, save_checkpoint
from dapo_runner.config import ModelConfig
from dapo_runner.data import PromptCursor
from dapo_runner.learner import Learner
from dapo_runner.model import load_policy
from dapo_runner.sampler import DynamicSampler

CPU = torch.device("cpu")
CONFIG = make_config(optimizer={"lr": 1e-3, "warmup_steps": 0, "token_budget": 95})


def make_parts(model: Path, dtype: str = "float32") -> tuple[Learner, DynamicSampler]:
    policy = load_policy(model, ModelConfig.model_validate({"path": "x", "dtype": dtype}), CPU)
    prompts = [make_prompt(f"p{i}") for i in range(10)]
    return Learner(policy, CONFIG), DynamicSampler(PromptCursor(prompts, seed=0), CONFIG.sampler)


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    figures = []
    for step in steps:
        (mini,) = learner.prepare(random_sequences(8, seed=step))
        figures.append(learner.update(mini, step))
    return figures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_as_if_it_had_not_stopped(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    learner, sampler = make_parts(model_folder, dtype)
    train(learner, range(3))
    saved = save_checkpoint(tmp_path, 3, learner, sampler, keep=2)
    expected = train(learner, range(3, 6))
    resumed, resumed_sampler = make_parts(saved.model, dtype)
    load_checkpoint(saved, resumed, resumed_sampler)
    assert train(resumed, range(3, 6)) == expected
    for name, tensor in learner.master.tensors.items():
        assert torch.equal(tensor, resumed.master.tensors[name]), name


def test_sampler_and_every_generator_come_back(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    sampler.cursor.take(7)
    sampler.rounds_so_far = 4
    sampler.buffer = [make_group("RW", "carried")]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    saved = save_checkpoint(tmp_path, 1, learner, sampler, keep=2)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    expected, upcoming = draw(), [prompt.id for prompt in sampler.cursor.take(8)]
    resumed, resumed_sampler = make_parts(saved.model)
    draw()
    load_checkpoint(saved, resumed, resumed_sampler)
    assert draw() == expected
    assert [prompt.id for prompt in resumed_sampler.cursor.take(8)] == upcoming
    assert resumed_sampler.rounds_so_far == 4
    (group,) = resumed_sampler.buffer
    assert group.prompt == sampler.buffer[0].prompt
    assert group.samples[1].completion.logprobs.tolist() == sampler.buffer[0].samples[1].completion.logprobs.tolist()


def test_old_checkpoints_go_and_unfinished_ones_are_passed_over(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, learner, sampler, keep=2)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2, 3]
    (tmp_path / "step_000009.unfinished").mkdir()
    (tmp_path / "step_000008").mkdir()  # no manifest
    (tmp_path / "notes.txt").write_text("mine")
    state = tmp_path / "step_000003" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])  # a copy that broke off
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.step == 2
    save_checkpoint(tmp_path, 3, learner, sampler, keep=2)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2, 3]
    assert not list(tmp_path.glob("*.unfinished"))
    assert (tmp_path / "notes.txt").exists()


def test_dying_while_saving_leaves_the_checkpoint_before_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, sampler = make_parts(model_folder)
    save_checkpoint(tmp_path, 1, learner, sampler, keep=1)
    for dies_in in ("save_file", "_rng_state", "_force_to_disk"):
        with monkeypatch.context() as patch:
            patch.setattr(module, dies_in, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, 2, learner, sampler, keep=1)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        assert latest.step == 1
    assert save_checkpoint(tmp_path, 2, learner, sampler, keep=1).step == 2
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2]


def test_loading_runs_no_code(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    saved = save_checkpoint(tmp_path, 1, learner, sampler, keep=1)

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
    saved = save_checkpoint(tmp_path, 1, learner, sampler, keep=1)
    other = DynamicSampler(PromptCursor([make_prompt("q")], seed=0), CONFIG.sampler)
    with pytest.raises(ValueError, match="cannot resume: the run was saved with data"):
        load_checkpoint(saved, learner, other)


def test_the_manifest_names_every_file(model_folder: Path, tmp_path: Path) -> None:
    learner, sampler = make_parts(model_folder)
    saved = save_checkpoint(tmp_path, 1, learner, sampler, keep=1)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    files = {str(p.relative_to(saved.path)) for p in saved.path.rglob("*") if p.is_file()}
    assert set(manifest) == files - {"manifest.json"}
