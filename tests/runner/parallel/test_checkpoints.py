"""What many ranks save any number of ranks resumes from: the same bits, or an error that all of them raise."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import file_size_limit, make_group, make_prompt, save_model
from experts import small_experts
from learners import check_each_kind_once, config_of, open_learner
from ranks import on_ranks
from safetensors.torch import load_file
from test_updates import save_models, sequences_for, world_of
from transformers import AutoModelForCausalLM

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import (
    BackgroundSaves,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    take_snapshot,
)
from dapo_runner.checkpoint.files import checkpoint_to_resume
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.parallel.sharding import whole
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.tiny_model import make_tokenizer

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "lora": {"dtype": "bfloat16", "model": {"lora": {"rank": 3, "alpha": 8}}},
    "experts": {},  # several tensors in a file are one in memory, and there are buffers
    "critic": {
        "dtype": "bfloat16",
        "advantage": {"kind": "gae"},
        "critic": {"lr": 1e-3},
        "reward": {"kl": {"coef": 0.1}},
        "loss": {"reference_ema": 0.9},
    },
}
PARALLEL: dict[int, dict[str, int]] = {1: {}, 2: {"gpus": 2}, 4: {"gpus": 4, "replicate": 2}}
STEP = 2


def open_parts(path: Path, case: str, n: int) -> tuple[Learner, DynamicSampler]:
    config = config_of(path, **CASES[case], parallel=PARALLEL[n])
    prompts = [make_prompt(f"p{i}") for i in range(10)]
    return open_learner(path, config, world_of(config)), DynamicSampler(PromptCursor(prompts, 0), GroupBuffer(config))


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        (mini,) = learner.prepare(sequences_for(learner.config, 8, seed=step))
        metrics.append(learner.update(mini, step))
        learner.move_reference()
    return metrics


def outcome(learner: Learner, sampler: DynamicSampler) -> dict[str, Any]:
    """All weights and states, whole; and what follows."""
    tensors = {f"engine/{name}": weight.clone() for name, weight in learner.policy.named_weights()}
    for part in learner.parts():
        for name, master in part.tensors.items():
            state = {"master": master.detach(), **part.state_of(master)}
            tensors |= {f"{part.prefix}{name}/{key}": whole(value).clone() for key, value in state.items()}
    buffer = [group.samples[0].completion.token_ids.tolist() for group in sampler.buffer.groups]
    upcoming = [prompt.id for prompt in sampler.cursor.take(3)]
    draws = learner.world.all_gather_object((random.random(), float(torch.rand(()))))
    metrics = train(learner, range(STEP, STEP + 1))
    return {"tensors": tensors, "sampler": (buffer, upcoming), "draws": draws, "metrics": metrics}


def model_of(models: Path, case: str) -> Path:
    return models / ("experts" if case == "experts" else "tied")


def save(models: Path, case: str, folder: Path, n: int) -> dict[str, Any]:
    """All cases but one are written while training continues."""
    learner, sampler = open_parts(model_of(models, case), case, n)
    train(learner, range(STEP))
    sampler.cursor.take(7)
    sampler.buffer.groups = [make_group("RW", "carried")]
    random.seed(learner.world.rank)
    torch.manual_seed(learner.world.rank)
    if case == "tied":
        save_checkpoint(folder / case, STEP, learner, take_snapshot(sampler), keep=1)
        return outcome(learner, sampler)
    saves = BackgroundSaves(learner.world, timeout=600.0)
    saves.start(folder / case, STEP, learner, take_snapshot(sampler), keep=1)
    found = outcome(learner, sampler)
    assert saves.finish() == checkpoint_of(folder, case)
    assert saves.finish() is None
    return found


def load(models: Path, case: str, folder: Path, n: int) -> dict[str, Any]:
    checkpoint = checkpoint_of(folder, case)
    learner, sampler = open_parts(model_of(models, case) if case == "lora" else checkpoint.model, case, n)
    saved_on = load_checkpoint(checkpoint, learner, sampler)
    return {"saved_on": saved_on, **outcome(learner, sampler)}


def checkpoint_of(folder: Path, case: str) -> Checkpoint:
    return Checkpoint(folder / case / f"step_{STEP:06d}", STEP)


def fail(models: Path, case: str, folder: Path, n: int) -> list[tuple[list[str], list[str]]]:
    """Return the error of every rank when rank 1 cannot write a large file, and the files of the folder then."""
    learner, sampler = open_parts(model_of(models, case), case, n)
    saves, found = BackgroundSaves(learner.world, timeout=600.0), []

    def save_again(in_background: bool) -> None:
        if in_background:
            saves.start(folder, STEP, learner, take_snapshot(sampler), keep=1)
            saves.finish()
        else:
            save_checkpoint(folder, STEP, learner, take_snapshot(sampler), keep=1)

    save_checkpoint(folder, 1, learner, take_snapshot(sampler), keep=1)
    for size in (0, 20_000):
        for in_background in (False, True):
            with file_size_limit() as limit:
                if learner.world.rank == 1:
                    limit(size)
                with pytest.raises(CheckpointError) as caught:
                    save_again(in_background)
            found.append((learner.world.all_gather_object(str(caught.value)), sorted(os.listdir(folder))))
    save_again(in_background=False)
    return found


def carry_out(rank: int, n: int, models: Path, plan: list[tuple[Any, str, Path]]) -> None:
    check_each_kind_once()
    outcomes = [do(models, case, folder, n) for do, case, folder in plan]
    if rank == 0:
        torch.save(outcomes, models / "outcomes.pt")


def outcomes_of(n: int, models: Path, plan: list[tuple[Any, str, Path]]) -> list[Any]:
    if n == 1:
        return [do(models, case, folder, n) for do, case, folder in plan]
    on_ranks(n, carry_out, n, models, plan)
    found: list[Any] = torch.load(models / "outcomes.pt")
    return found


def test_any_number_of_ranks_resumes_from_any_other(tmp_path: Path) -> None:
    save_models(tmp_path)
    experts = small_experts("glm4_moe", first_k_dense_replace=0)
    for buffer in experts.buffers():
        buffer.normal_()
    save_model(experts, make_tokenizer(), tmp_path / "experts")
    folders = {n: tmp_path / f"by{n}" for n in PARALLEL}
    saved = {1: outcomes_of(1, tmp_path, [(save, case, folders[1]) for case in CASES])}
    loads = [(load, case, folders[n]) for n in (1, 2) for case in CASES]
    saves = [(save, case, folders[2]) for case in CASES]
    *found, failed = outcomes_of(2, tmp_path, [*saves, *loads, (fail, "tied", tmp_path / "failed")])
    saved[2], loaded = found[: len(CASES)], {2: found[len(CASES) :]}
    *loaded[4], by_four = outcomes_of(4, tmp_path, [*loads[len(CASES) :], (save, "critic", folders[4])])
    *loaded[1], from_four = outcomes_of(1, tmp_path, [*loads, (load, "critic", folders[4])])
    for now, results in loaded.items():
        befores = list(zip(loads, [*saved[1], *saved[2]], strict=True))[-len(results) :]
        for result, ((_, case, folder), before) in zip(results, befores, strict=True):
            compare(result, before, 1 if folder == folders[1] else 2, now, case)
    compare(from_four, by_four, 4, 1, "critic")
    check_failures(failed, tmp_path / "failed")
    for case, expected in zip(CASES, saved[2], strict=True):
        check_model(checkpoint_of(folders[2], case), checkpoint_of(folders[1], case), expected["tensors"])


def compare(found: dict[str, Any], saved: dict[str, Any], before: int, now: int, case: str) -> None:
    assert found["saved_on"] == before, case
    assert found["tensors"].keys() == saved["tensors"].keys(), case
    for name, tensor in saved["tensors"].items():
        assert tensor.dtype == found["tensors"][name].dtype, (case, name)
        assert torch.equal(tensor, found["tensors"][name]), (case, name)
    assert found["sampler"] == saved["sampler"], case
    assert found["draws"] == (saved["draws"] if before == now else saved["draws"][:1] * now), case
    for step, expected in zip(found["metrics"], saved["metrics"], strict=True):
        assert step == (expected if before == now else pytest.approx(expected, rel=2e-2, abs=1e-3)), case


def check_failures(failed: list[tuple[list[str], list[str]]], folder: Path) -> None:
    """The checkpoint before stays, and one that is whole follows."""
    assert len(failed) == 4
    for told, left in failed:
        assert left == ["step_000001"]
        (message,) = set(told)
        assert "rank 1" in message
        assert str(folder / "step_000002") in message
        assert str(folder / "step_000001") in message
    found = checkpoint_to_resume(folder)
    assert found is not None
    assert found.step == STEP


def check_model(ours: Checkpoint, theirs: Checkpoint, trained: dict[str, torch.Tensor]) -> None:
    """That of one process in a file for each rank, about equally large. The manifest names every file."""
    for file in theirs.model.iterdir():
        if file.suffix != ".safetensors":
            assert (ours.model / file.name).read_bytes() == file.read_bytes(), file.name
    parts = {path.name: load_file(path) for path in ours.model.glob("model-0000?-of-00002.safetensors")}
    where = json.loads((ours.model / "model.safetensors.index.json").read_text())["weight_map"]
    assert where == {name: file for file, tensors in parts.items() for name in tensors}
    assert where.keys() == load_file(theirs.model / "model.safetensors").keys()
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in parts.values()]
    assert max(sizes) < 0.75 * sum(sizes)
    loaded, other = (AutoModelForCausalLM.from_pretrained(checkpoint.model) for checkpoint in (ours, theirs))
    assert all(torch.equal(tensor, trained[f"engine/{name}"]) for name, tensor in loaded.named_parameters())
    assert all(torch.equal(*buffers) for buffers in zip(loaded.buffers(), other.buffers(), strict=True))
    names = {str(file.relative_to(ours.path)) for file in ours.path.rglob("*") if file.is_file()}
    assert json.loads((ours.path / "manifest.json").read_text()).keys() == names - {"manifest.json"}
    assert {Path(name).suffix for name in names} == {".json", ".safetensors", ".pt"}
