"""Build the components of a run."""

from __future__ import annotations

import gc
from pathlib import Path

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import Checkpoint
from dapo_runner.config import Config, cautions
from dapo_runner.data.dataset import Dataset, load_data
from dapo_runner.logging.progress import Progress
from dapo_runner.policy.lengths import check_lengths
from dapo_runner.policy.model import load_policy, load_tokenizer
from dapo_runner.rewards.scoring import unmatchable_answers
from dapo_runner.run.context import RunContext
from dapo_runner.run.folder import TINY_MODEL
from dapo_runner.tiny_model import ensure_tiny_model

MANY_PROMPTS = 100_000


def initial_model(config: Config, progress: Progress) -> str | Path:
    """Return the path or name of a new run's policy. Make the tiny model if the configuration asks for it."""
    if config.model.path is not None:
        return config.model.path
    return ensure_tiny_model(config, config.run_dir / TINY_MODEL, progress.note)


def build_dataset(config: Config, source: str | Path, context: RunContext) -> Dataset:
    """Load the prompts, tokenized for the model ``source``, and note cautions about them. Raises ConfigError."""
    world, note = context.world, context.progress.note
    world.run_or_raise_everywhere(lambda: check_lengths(config, source, download=True))
    dataset = world.run_or_raise_everywhere(lambda: load_data(config, load_tokenizer(source, config.model)))
    note(f"data: {dataset.report.describe()}")
    if len(dataset.train) >= MANY_PROMPTS:  # a full collection would take seconds to go through them
        gc.collect()
        gc.freeze()
    for caution in cautions(config):
        note(caution)
    if (unmatchable := unmatchable_answers(config, dataset.train, dataset.heldout)) is not None:
        note(unmatchable)
    return dataset


def build_learner(config: Config, checkpoint: Checkpoint | None, context: RunContext) -> Learner:
    """Load the policy, the reference and the critic that the configuration needs, and make the optimizers.

    With LoRA the base model is loaded, not that of the checkpoint, into which the adapters are merged.
    """
    world, device, progress = context.world, context.device, context.progress
    start = world.broadcast_from_rank0(lambda: initial_model(config, progress))
    source = start if checkpoint is None or config.model.lora is not None else checkpoint.model
    replay, seed = bool(config.loss.routing_replay), config.run.seed
    policy = load_policy(source, config.model, device, seed, world, replay)
    reference = critic = None
    if config.loads_reference:
        reference = load_policy(config.reference_path or start, config.model, device, world=world, role="reference")
    if config.critic is not None:
        critic = load_policy(config.critic.path or start, config.model, device, world=world, role="critic")
    return Learner(policy, config, reference, critic, context.clock)
