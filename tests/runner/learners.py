"""Learners of small models, and what one of their updates does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import make_config
from torch import Tensor

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.optimizer import MasterWeights
from dapo_runner.config import Config
from dapo_runner.parallel.sharding import whole
from dapo_runner.parallel.world import SINGLE_PROCESS, World, make_layout, make_world
from dapo_runner.policy import model as policy_model
from dapo_runner.policy.model import Policy, load_policy

CPU = torch.device("cpu")
OPTIMIZER = {"mini_batch_size": None, "token_budget": 96, "warmup_steps": 0, "lr": 1e-3, "grad_clip": None}
LENGTHS = {"max_prompt_tokens": 7, "max_response_tokens": 17}


def config_of(path: str | Path, dtype: str = "float32", **sections: Any) -> Config:
    """The configuration of a small run that trains the model at ``path``; sections as in ``make_config``."""
    model = {"tiny": None, "path": str(path), "dtype": dtype, **sections.pop("model", {})}
    optimizer, rollout = OPTIMIZER | sections.pop("optimizer", {}), LENGTHS | sections.pop("rollout", {})
    return make_config(model=model, optimizer=optimizer, rollout=rollout, **sections)


def learner_of(path: str | Path, dtype: str = "float32", **sections: Any) -> Learner:
    return open_learner(path, config_of(path, dtype, **sections))


def open_learner(path: str | Path, config: Config, world: World = SINGLE_PROCESS) -> Learner:
    """With a reference and a critic where the configuration wants them. Reference and policy differ, and the critic's
    values are not all zero.
    """
    policy = load_policy(path, config.model, CPU, 5, world, bool(config.loss.routing_replay))
    reference = critic = None
    if config.uses_reference and config.model.lora is None:
        teacher = path if config.distillation is None else config.distillation.teacher
        reference = load_policy(teacher, config.model, CPU, world=world, role="reference")
        scale_weights(reference, 1.1)
    if config.critic is not None:
        critic = load_policy(path, config.model, CPU, world=world, role="critic")
        with torch.no_grad():
            weight = critic.model.value_head.weight
            weight.copy_(weight * 0 + 0.01)
    return Learner(policy, config, reference, critic)


def world_of(config: Config) -> World:
    """This process among those of the default group; alone without one."""
    if not dist.is_initialized():
        return SINGLE_PROCESS
    size = dist.get_world_size()
    return make_world(make_layout(config, size, size), dist.get_rank(), "cpu")


def check_each_kind_once() -> None:
    """In this process, for ranks: of like models ``load_policy`` checks the first alone. A check is nine passes."""
    check, seen = policy_model.check_policy, set[Any]()

    def once(policy: Policy) -> None:
        kind = (policy.world.layout, type(policy.model), hasattr(policy.model, "value_head"), policy.compute)
        if kind not in seen or policy.routing is not None:  # whose check counts the experts
            seen.add(kind)
            check(policy)

    policy_model.check_policy = once


def scale_weights(policy: Policy, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(factor)


def update(learner: Learner, mini: MiniBatch, step: int = 0) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Take an update. Return the gradients that the optimizers were given, whole and by name, and the metrics."""
    found: dict[str, Tensor] = {}
    hooks = [part.optimizer.register_step_pre_hook(keep(part, found)) for part in learner.parts() if part.optimizer]
    try:
        metrics = learner.update(mini, step)
    finally:
        for hook in hooks:
            hook.remove()
    return found, metrics


def keep(part: MasterWeights, found: dict[str, Tensor]) -> Any:
    def hook(*_: object) -> None:
        for name, tensor in part.tensors.items():
            if tensor.grad is not None:
                found[f"{part.prefix}{name}"] = whole(tensor.grad).clone()

    return hook


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, case: str = ""
) -> None:
    """Compare each tensor by the norm of its difference."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), (case, name)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """A copy of the policy's parameters and their masters."""
    masters = {f"master of {name}": tensor for name, tensor in learner.master.tensors.items()}
    every = masters | dict(learner.policy.model.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in every.items()}


def changed(learner: Learner, before: dict[str, Tensor]) -> set[str]:
    """The names of tensors that are no longer those ``before``."""
    return {name for name, tensor in weights_of(learner).items() if not torch.equal(tensor, before[name])}
