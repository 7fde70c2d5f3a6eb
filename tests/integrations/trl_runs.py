"""Runs of TRL's own trainer and of ours on the same completions, and what they are compared by."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from dapo_kernels.integrations.trl import DapoGRPOTrainer
from dapo_runner.config import TinyModelConfig
from dapo_runner.tiny_model import make_model, make_tokenizer

WIDTH = 12  # longest completion
TIMES = ("step_time", "runtime", "samples_per_second", "steps_per_second")
SIZES = TinyModelConfig(layers=2, hidden_size=32, heads=4, intermediate_size=48)

# 4 micro-batches of 4 completions a generation, 2 to an update, everything used twice: ratios leave 1.
OFF_POLICY = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "max_steps": 5,
}
ON_POLICY = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
}


def save_tiny_model(folder: Path, **changes: Any) -> Path:
    """Random weights and a tokenizer, in transformers' format; ``changes`` to its configuration."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(SIZES, tokenizer, max_positions=64)
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reward(completions: list[str], **_: Any) -> list[float]:
    return [(sum(map(ord, text)) % 7) / 7 for text in completions]


class Rollouts:
    """Completions of ragged length, some cut off, from a generator of their own: two trainers see the same ones.

    ``masked``: some tokens come from a tool. ``sampled``: log-probs of an engine that disagrees a little.
    """

    def __init__(self, masked: bool = False, sampled: bool = False) -> None:
        self.random, self.masked, self.sampled = random.Random(5), masked, sampled

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        completions = [self._completion(tokenizer) for _ in prompts]
        logprobs = [[-3.0 + self.random.gauss(0, 0.4) for _ in ids] for ids in completions]
        out = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs if self.sampled else None}
        if self.masked:
            # The last completion is all tool: nothing of it trains.
            mask = [[int(self.random.random() < 0.7) for _ in ids] for ids in completions]
            out["env_mask"] = [*mask[:-1], [0] * len(mask[-1])]
        return out

    def _completion(self, tokenizer: Any) -> list[int]:
        ids = [self.random.randrange(3, len(tokenizer)) for _ in range(self.random.randint(1, WIDTH))]
        return ids if len(ids) == WIDTH and self.random.random() < 0.5 else [*ids[:-1], tokenizer.eos_token_id]


class Kept(DapoGRPOTrainer):
    """Keeps the generation batches and the rewards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, Any]] = []
        self.rewards: list[Tensor] = []

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.batches.append(super()._generate_and_score_completions(inputs))
        return self.batches[-1]

    def _calculate_rewards(self, *args: Any) -> Tensor:
        self.rewards.append(super()._calculate_rewards(*args))
        return self.rewards[-1]


class Run(NamedTuple):
    trainer: Any
    log: list[dict[str, Any]]
    weights: dict[str, Tensor]
    start: dict[str, Tensor]


def make_trainer(trainer_class: type, model: str | Any, folder: Path, rollouts: Any, **options: Any) -> Any:
    """``options``: fields of ``GRPOConfig``, and ``trainer_options`` for the trainer."""
    trainer_options = options.pop("trainer_options", {})
    settings = {
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 100.0,
        "max_completion_length": WIDTH,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    given = {
        "model": str(model) if isinstance(model, Path) else model,
        "reward_funcs": reward,
        "args": GRPOConfig(output_dir=str(folder), **(settings | options)),
        "train_dataset": Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in (3, 14, 25) for b in (7, 68, 9)]}),
        "eval_dataset": Dataset.from_dict({"prompt": ["1+2=", "33+4="]}),
        "processing_class": make_tokenizer(),
        "rollout_func": rollouts,
    }
    return trainer_class(**(given | trainer_options))


def train(
    trainer_class: type,
    model: str | Any,
    folder: Path,
    rollouts: Any,
    prepare: Any = None,
    resume: str | bool | None = None,
    **options: Any,
) -> Run:
    """Train for a few updates, from a checkpoint to ``resume``; ``prepare`` is called with the trainer."""
    trainer = make_trainer(trainer_class, model, folder, rollouts, **options)
    if prepare is not None:
        prepare(trainer)
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return Run(trainer, trainer.state.log_history, weights, start)


def assert_same_run(ours: Run, theirs: Run) -> None:
    """The same metrics under the same names at every step, and the same weights at the end, after real movement."""
    assert len(ours.log) == len(theirs.log)
    for mine, other in zip(ours.log, theirs.log, strict=True):
        assert mine.keys() == other.keys()
        for name in (name for name in mine if not name.endswith(TIMES)):
            difference = abs(mine[name] - other[name])
            assert difference <= 1e-5 * max(1.0, abs(other[name])), (name, mine["step"], mine[name], other[name])
    moved = max(float((theirs.weights[name] - theirs.start[name]).abs().max()) for name in theirs.weights)
    assert moved > 1e-4
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, atol=1e-6, rtol=1e-6, msg=name)


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)
