"""The whole of DAPO in TRL, the loss from hidden states. Half a minute on a CPU, nothing downloaded.

    pip install 'dapo-kernels[runner,trl]' && python examples/trl_dapo.py

A small transformer with random weights learns to write two digits backwards and to stop, by reward alone: each
completion earns the share of its digits that are right, and loses 1/8 for each token after the third.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from dapo_kernels.integrations.trl import DapoGRPOTrainer  # first line. Was: from trl import GRPOTrainer
from dapo_runner.config import TinyModelConfig
from dapo_runner.tiny_model import make_model, make_tokenizer

DIGITS = 2


def digits_right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    wanted = [prompt.rstrip("=")[::-1] for prompt in prompts]
    return [
        sum(a == b for a, b in zip(text[:DIGITS], answer, strict=False)) / DIGITS
        for text, answer in zip(completions, wanted, strict=True)
    ]


def main(steps: int = 120, seed: int = 0) -> list[float]:
    """Trains; returns the mean reward, one number for ten steps."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    sizes = TinyModelConfig(layers=2, hidden_size=64, heads=4, intermediate_size=128)
    numbers = random.Random(seed)
    prompts = ["".join(numbers.choices("0123456789", k=DIGITS)) + "=" for _ in range(4096)]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        loss_type="dapo",
        epsilon_high=0.28,
        num_generations=16,
        per_device_train_batch_size=256,
        steps_per_generation=2,  # two updates from every round of generation
        gradient_accumulation_steps=1,
        max_completion_length=DIGITS + 3,  # the digits, the token that ends a text, and two too many
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        bf16=False,
        seed=seed,
    )
    trainer = DapoGRPOTrainer(  # second line. Was: GRPOTrainer(
        model=make_model(sizes, tokenizer, max_positions=16),
        processing_class=tokenizer,
        reward_funcs=digits_right,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        dynamic_sampling=True,  # replaces groups of equal rewards
        on_sampling_exhausted="train_partial",  # at the end, nearly all groups are right
        overlong_cache_length=8,  # the soft punishment grows from 0 to −1 over these tokens, …
        overlong_max_length=DIGITS + 1 + 8,  # … up to this length
    )
    trainer.train()
    return [entry["rewards/digits_right/mean"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    rewards = main()
    print(f"mean reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
