"""What a test starts on several ranks: `python checkpoints.py MODELS PLAN OUT`. Learners that have trained a little are
saved, or loaded; what they are and what they do next, as rank 0 sees it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import make_config, make_group, make_prompt
from gradients import open_case, open_learner, sequences_for
from launch import leave

from dapo_runner.checkpoint import (
    BackgroundSaves,
    Checkpoint,
    CheckpointError,
    files,
    load_checkpoint,
    model_files,
    optimizer,
    save_checkpoint,
    take_snapshot,
)
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.parallel.sharding import whole
from dapo_runner.parallel.world import World
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler

CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"dtype": "bfloat16", "lora": {"rank": 3, "alpha": 8}},
    "experts": {"dtype": "float32"},
    "critic": {"dtype": "bfloat16"},
    "shared_trunk": {"dtype": "float32"},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "critic": {
        "advantage": {"kind": "gae"},
        "critic": {"lr": 1e-3},
        "reward": {"kl": {"coef": 0.1}},
        "loss": {"reference_ema": 0.9},
    },
    "shared_trunk": {"advantage": {"kind": "gae"}, "critic": {"share_trunk": True}},
}
STEP = 2
TRAINING = {"lr": 1e-3, "warmup_steps": 0, "token_budget": 95}


class Parts:
    """A learner and a sampler of a case; ``path`` is what its policy is loaded from."""

    def __init__(self, path: Path, case: str, parallel: dict[str, int]) -> None:
        config = make_config(optimizer=TRAINING, model=CASES[case], parallel=parallel, **SECTIONS.get(case, {}))
        self.world: World = open_case(config)
        self.learner = open_learner(str(path), config, self.world)
        prompts = [make_prompt(f"p{i}") for i in range(10)]
        self.sampler = DynamicSampler(PromptCursor(prompts, seed=0), GroupBuffer(config))

    def train(self, steps: range) -> list[dict[str, float]]:
        figures = []
        for step in steps:
            (mini,) = self.learner.prepare(sequences_for(self.learner.config, 8, seed=step))
            figures.append(self.learner.update(mini, step))
            self.learner.move_reference()
        return figures

    def content(self) -> dict[str, Any]:
        """All of it, whole."""
        tensors = {f"engine/{name}": weight for name, weight in self.learner.policy.named_weights()}
        for part in self.learner.parts():
            for name, master in part.tensors.items():
                tensors[f"{part.prefix}{name}/master"] = whole(master.detach())
                state = {key: whole(value) for key, value in part.state_of(master).items()}
                tensors |= {f"{part.prefix}{name}/{key}": value for key, value in state.items()}
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        buffer = [group.samples[0].completion.token_ids.tolist() for group in self.sampler.buffer.groups]
        upcoming = [prompt.id for prompt in self.sampler.cursor.take(3)]
        return {"tensors": tensors, "sampler": (buffer, upcoming)}

    def what_follows(self) -> dict[str, Any]:
        draws = self.world.all_gather_object((random.random(), float(torch.rand(()))))
        return {"draws": draws, "figures": self.train(range(STEP, STEP + 2))}


def save_case(models: Path, case: str, folder: Path, parallel: dict[str, int]) -> dict[str, Any]:
    """All cases but one are written while training continues."""
    parts = Parts(model_of(models, case), case, parallel)
    parts.train(range(STEP))
    parts.sampler.cursor.take(7)
    parts.sampler.buffer.groups = [make_group("RW", "carried")]
    random.seed(parts.world.rank)
    torch.manual_seed(parts.world.rank)
    if case == "float32":
        save_checkpoint(folder / case, STEP, parts.learner, take_snapshot(parts.sampler), keep=1)
        return parts.content() | parts.what_follows()
    saves = BackgroundSaves(parts.world, timeout=60.0)
    saves.start(folder / case, STEP, parts.learner, take_snapshot(parts.sampler), keep=1)
    outcome = parts.content() | parts.what_follows()
    assert saves.finish() == checkpoint_of(folder, case)
    assert saves.finish() is None
    return outcome


def load_case(models: Path, case: str, folder: Path, parallel: dict[str, int]) -> dict[str, Any]:
    checkpoint = checkpoint_of(folder, case)
    parts = Parts(model_of(models, case) if "lora" in CASES[case] else checkpoint.model, case, parallel)
    saved_on = load_checkpoint(checkpoint, parts.learner, parts.sampler)
    return {"saved_on": saved_on} | parts.content() | parts.what_follows()


def model_of(models: Path, case: str) -> Path:
    return models / ("experts" if case == "experts" else "dense")


def checkpoint_of(folder: Path, case: str) -> Checkpoint:
    return Checkpoint(folder / case / f"step_{STEP:06d}", STEP)


def fail_case(models: Path, case: str, folder: Path, parallel: dict[str, int]) -> list[dict[str, Any]]:
    """What every rank is told when rank 1 cannot write, and what is in the folder then."""
    parts = Parts(model_of(models, case), case, parallel)
    saves = BackgroundSaves(parts.world, timeout=60.0)
    found = []

    def save() -> None:
        save_checkpoint(folder, STEP, parts.learner, take_snapshot(parts.sampler), keep=1)

    def save_in_background() -> None:
        saves.start(folder, STEP, parts.learner, take_snapshot(parts.sampler), keep=1)
        saves.finish()

    save_checkpoint(folder, 1, parts.learner, take_snapshot(parts.sampler), keep=1)
    for module, function in WRITERS:
        for attempt in (save, save_in_background):
            with pytest.MonkeyPatch.context() as patch:
                if parts.world.rank == 1:
                    patch.setattr(module, function, full_disk)
                with pytest.raises(CheckpointError) as caught:
                    attempt()
            found.append({"told": parts.world.all_gather_object(str(caught.value)), "left": sorted(os.listdir(folder))})
    save()
    return found


WRITERS = ((model_files, "save_file"), (optimizer.HuggingFaceStorageWriter, "write_data"), (files, "entry_of"))


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


DO = {"save": save_case, "load": load_case, "fail": fail_case}


def main() -> None:
    """PLAN is a list of [what to do, case, folder, parallel]."""
    models, plan, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = json.loads(plan.read_text())
    outcomes = [DO[do](models, case, Path(folder), parallel) for do, case, folder, parallel in lines]
    if dist.get_rank() == 0:
        torch.save(outcomes, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
