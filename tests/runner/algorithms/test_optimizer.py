"""AdamW moves the weights as its paper says, with the settings of the recipe (arXiv 1711.05101, Algorithm 2)."""

from __future__ import annotations

import torch
from builders import make_config, pack_mini_batch, random_sequences

from dapo_runner.algorithms.learner import Learner
from dapo_runner.policy.model import Policy

LR, BETAS, EPS, DECAY = 1e-2, (0.8, 0.7), 1e-4, 0.3


def test_two_updates_with_betas_and_weight_decay(policy: Policy) -> None:
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "warmup_steps": 0, "grad_clip": None}
    learner = Learner(policy, make_config(optimizer=settings))
    weights = {name: p.detach().double() for name, p in policy.model.named_parameters()}
    gradients: list[dict[str, torch.Tensor]] = []

    def record(*_: object) -> None:
        named = policy.model.named_parameters()
        gradients.append({name: p.grad.double() for name, p in named if p.grad is not None})

    learner.optimizer.register_step_pre_hook(record)
    for seed in range(2):
        learner.update(pack_mini_batch(learner, random_sequences(8, seed=seed), 256), 0)
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    for t, of_update in enumerate(gradients, start=1):
        for name, gradient in of_update.items():
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient**2
            mean, square = first[name] / (1 - BETAS[0] ** t), second[name] / (1 - BETAS[1] ** t)
            weights[name] -= LR * DECAY * weights[name] + LR * mean / (square.sqrt() + EPS)
    assert len(gradients) == 2
    for name, p in policy.model.named_parameters():
        assert torch.allclose(p.double(), weights[name], rtol=1e-5, atol=1e-6), name
