"""What a run is made of: policy and learner, the rollout engine, the sampler that runs ahead."""

from __future__ import annotations

from pathlib import Path

import torch

from dapo_runner.algorithms.learner import Learner, make_learner
from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.checkpoint import Checkpoint
from dapo_runner.config import Config
from dapo_runner.folder import TINY_MODEL
from dapo_runner.logging.progress import Progress
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import load_critic, load_policy, load_reference
from dapo_runner.rollout.asynchronous import AheadSampler
from dapo_runner.rollout.group_buffer import DynamicSampler
from dapo_runner.run.tiny_model import ensure_tiny_model
from dapo_runner.timing import StepClock


def open_learner(
    config: Config,
    folder: Path,
    checkpoint: Checkpoint | None,
    device: torch.device,
    progress: Progress,
    clock: StepClock,
    world: World,
) -> Learner:
    """The policy, where the loss or the reward has a reference that one, where there are values the critic, and the
    optimizers.

    Adapters are put on the model that training started from: what a checkpoint holds has them merged in.
    """
    start = world.broadcast_from_rank0(lambda: initial_model(config, folder, progress))
    source = start if checkpoint is None or config.model.lora is not None else checkpoint.model
    shared = config.critic is not None and config.critic.share_trunk
    replay, seed = config.loss.routing_replay, config.run.seed
    policy = load_policy(source, config.model, device, seed, world, replay, "shared" if shared else "policy")
    own_reference = config.model.lora is not None and config.loss.reference is None
    reference, critic = None, policy if shared else None
    if uses_reference(config) and not own_reference:
        reference = load_reference(config.loss.reference or start, config.model, device, world)
    if config.critic is not None and not shared:
        critic = load_critic(config.critic.path or start, config.model, device, world)
    return make_learner(policy, config, reference, critic, clock)


def initial_model(config: Config, folder: Path, progress: Progress) -> str | Path:
    """Where the policy starts from."""
    if config.model.path is not None:
        return config.model.path
    return ensure_tiny_model(config, folder / TINY_MODEL, progress.note)


def sampled_ahead(sampler: DynamicSampler, config: Config) -> AheadSampler:
    rollout = config.rollout
    rounds = rollout.max_staleness + 1 if rollout.partial else 1
    return AheadSampler(sampler, rollout.max_staleness, config.run.steps, rollout.server.round_within, rounds)
