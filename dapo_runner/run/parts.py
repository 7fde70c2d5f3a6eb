"""What a run is made of: policy and learner, the rollout engine, the sampler that runs ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dapo_runner.algorithms.learner import Learner, make_learner
from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.checkpoint import Checkpoint
from dapo_runner.config import Config
from dapo_runner.folder import TINY_MODEL
from dapo_runner.logging.progress import Progress
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import load_critic, load_model, load_policy, load_reference, load_tokenizer
from dapo_runner.rollout.asynchronous import AheadSampler
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.group_buffer import DynamicSampler
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.rollout.vllm import VLLMEngine
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


def open_engine(
    config: Config,
    source: str | Path,
    device: torch.device,
    world: World = SINGLE_PROCESS,
    note: Callable[[str], None] = lambda _: None,
) -> RolloutEngine:
    """A rollout engine with weights of its own, loaded from ``source``. ``note`` is told what befalls its servers."""
    tokenizer = load_tokenizer(source, config.model)
    if config.rollout.engine == "server":
        return ServerEngine(source, tokenizer, config, world, note)
    if config.rollout.engine == "vllm":
        return VLLMEngine(source, tokenizer, config, device, world)
    model = load_model(source, config.model, device, "sdpa")
    return HFEngine(model, tokenizer, config.rollout.max_batch_sequences)


def sampled_ahead(sampler: DynamicSampler, config: Config) -> AheadSampler:
    rollout = config.rollout
    rounds = rollout.max_staleness + 1 if rollout.partial else 1
    return AheadSampler(sampler, rollout.max_staleness, config.run.steps, rollout.server.round_within, rounds)
