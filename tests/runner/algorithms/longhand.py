"""Advantages, weights and losses as their papers print them: one sequence after another, in float64."""

from __future__ import annotations

import copy
import math
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dapo_runner.config import Config, CorrectionConfig
from dapo_runner.policy.model import Policy
from dapo_runner.types import TrainingSequence

Rewards = list[list[float]]  # of each group


def advantages_of(kind: str, rewards: Rewards) -> Rewards:
    """The advantage of each response; for the kinds per token, what its last token earns."""
    every = [reward for group in rewards for reward in group]

    def spread(values: list[float]) -> float:
        return (stdev(values) if len(values) > 1 else 0.0) + 1e-6

    def others(group: list[float], index: int) -> float:
        rest = [reward for place, reward in enumerate(group) if place != index]
        return fmean(rest) if rest else group[index]

    def one(group: list[float], index: int) -> float:
        reward = group[index]
        return {
            "group_std": (reward - fmean(group)) / spread(group),
            "group_mean": reward - fmean(group),
            "batch_std": (reward - fmean(group)) / spread(every),
            "batch_mean": reward - fmean(every),
            "batch_whitened": (reward - fmean(every)) / spread(every),
            "leave_one_out": reward - others(group, index),
            "gae": reward,
            "returns": reward,
            "group_returns": reward - fmean(group),
        }[kind]

    return [[one(group, index) for index in range(len(group))] for group in rewards]


def discounted(values: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount · y_{t+1} of one sequence."""
    sums, running = [], 0.0
    for value in reversed(values.double().tolist()):
        running = value + discount * running
        sums.append(running)
    return torch.tensor(sums[::-1], dtype=torch.float64)


def generalized(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of one sequence (arXiv 1506.02438, eq. 16)."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    return discounted(rewards + gamma * following - values, gamma * lam)


def whitened(parts: dict[int, Tensor]) -> dict[int, Tensor]:
    every = torch.cat(list(parts.values()))
    return {index: (part - every.mean()) / (every.std() + 1e-6) for index, part in parts.items()}


def copy_of(policy: Policy) -> Any:
    """A policy, or critic, as it is now: in float64, with transformers' own attention."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(policy.model.config), attn_implementation="eager")
    model = model.double().eval()
    if hasattr(policy.model, "value_head"):
        model.value_head = copy.deepcopy(policy.model.value_head).double()
    model.load_state_dict(policy.model.state_dict())
    return model


def values_of(critic: Any, sequence: TrainingSequence) -> Tensor:
    """Of the tokens that train, [N]: what is expected before each of them."""
    hidden = critic.base_model(input_ids=sequence.token_ids[None], use_cache=False).last_hidden_state[0, :-1]
    return (hidden @ critic.value_head.weight)[sequence.mask[1:]]


def logits_of(model: Any, sequence: TrainingSequence, temperature: float = 1.0) -> Tensor:
    """Of the tokens that train, [N, V]."""
    logits = model(input_ids=sequence.token_ids[None], use_cache=False).logits[0, :-1] / temperature
    return logits[sequence.mask[1:]]


def logprobs_of(model: Any, sequence: TrainingSequence, temperature: float = 1.0) -> Tensor:
    """Of the tokens that train, [N]."""
    targets = sequence.token_ids[1:][sequence.mask[1:]]
    return logits_of(model, sequence, temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def entropy_of(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def correction_weights(delta: list[float], config: CorrectionConfig) -> list[float]:
    """Of the tokens of one response, from Δ = log π − log μ of each."""
    weights = []
    for own in delta:
        weight = 1.0
        if config.weights is not None:
            ratio = math.exp(min(own if config.weights == "token" else sum(delta), 700))
            weight = max(config.floor, min(config.cap, ratio))
        if config.mask is not None:
            mean = own if config.mask == "token" else fmean(delta)
            lowest = config.lower_bound or 1 / config.bound
            weight *= lowest <= math.exp(min(mean, 700)) <= config.bound
        weights.append(weight)
    return weights


def policy_step(
    config: Config, sequences: list[TrainingSequence], model: Any, reference: Any
) -> tuple[Tensor, dict[str, Any]]:
    """The loss of DAPO (eq. 8) and its relatives over a step in one update, and the metrics of the step."""
    objective = {"clip_high": 0.28, "kl_coef": 0.0, "aggregate": "token-mean", **config.loss.overrides}
    if config.loss.objective == "dr_grpo":
        objective |= {"clip_high": 0.2, "aggregate": "length"}
    temperature, correction = config.rollout.temperature, config.rollout.correction
    losses: dict[int, list[Tensor]] = {}
    deltas, ratios, weights, entropies, n_unknown = [], [], [], [], 0
    for sequence in sequences:
        if not sequence.mask.any():
            continue
        live = sequence.mask[1:]
        own = logprobs_of(model, sequence, temperature)
        engine, advantages = sequence.rollout_logprobs[1:][live].double(), sequence.advantages[1:][live].double()
        known = engine.isfinite()
        engine = engine.where(known, own.detach())  # without a log-prob of the engine, as if both agreed
        from_engine = config.loss.old_logprobs == "engine" or (sequence.age > 0 and correction.weights is None)
        ratio = (own - (engine if from_engine else own.detach())).exp()
        delta = own.detach() - engine
        weight = torch.tensor(correction_weights(delta.tolist(), correction), dtype=torch.float64)
        clipped = ratio.clamp(0.8, 1 + objective["clip_high"])
        loss = -weight * torch.minimum(ratio * advantages, clipped * advantages)
        if objective["kl_coef"]:
            distance = logprobs_of(reference, sequence, temperature).detach() - own
            loss = loss + objective["kl_coef"] * (distance.exp() - distance - 1)
        losses.setdefault(sequence.group_id, []).append(loss)
        deltas += delta[known].tolist()
        weights += weight[known].tolist()
        ratios += ratio.tolist()
        entropies += entropy_of(logits_of(model, sequence, temperature)).tolist()
        n_unknown += int((~known).sum())
    responses = [response for group in losses.values() for response in group]
    total = {
        "token-mean": lambda: torch.cat(responses).mean(),
        "prompt-mean-token-mean": lambda: torch.stack([torch.cat(group).mean() for group in losses.values()]).mean(),
        "length": lambda: torch.stack(
            [response.sum() / config.rollout.max_response_tokens for response in responses]
        ).mean(),
    }[objective["aggregate"]]()
    metrics = {
        "loss": float(total.detach()),
        "ratio": fmean(ratios),
        "ratio_max": max(ratios),
        "entropy": fmean(entropies),
        **mismatch(deltas, weights, correction),
        "rollout_unknown": n_unknown / (n_unknown + len(deltas)),
    }
    return total, metrics


def mismatch(deltas: list[float], weights: list[float], correction: CorrectionConfig) -> dict[str, Any]:
    """Figures over the tokens with a log-prob of the engine."""
    ratios = [math.exp(delta) for delta in deltas]
    found = {
        "rollout_gap": fmean(map(abs, deltas)),
        "rollout_gap_max": max(map(abs, deltas)),
        "rollout_k3": fmean(ratio - delta - 1 for ratio, delta in zip(ratios, deltas, strict=True)),
        "rollout_ess": sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios)),
        "rollout_masked": fmean(weight == 0 for weight in weights),
    }
    if correction.weights is not None:
        limits = (correction.floor, correction.cap)
        found["rollout_truncated"] = fmean(weight in limits and weight > 0 for weight in weights)
    return found


def pair_loss(config: Config, sequences: list[TrainingSequence], model: Any, reference: Any) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7), its hinge (SLiC) and IPO (arXiv 2310.12036), over chosen and rejected in turn."""
    assert config.preference is not None
    margins, terms = [], []
    for sequence in sequences:
        own, other = (logprobs_of(each, sequence, config.rollout.temperature) for each in (model, reference))
        margins.append((own - other.detach()).sum() / (len(own) if config.preference.loss_type == "ipo" else 1))
    beta = config.preference.beta
    for chosen, rejected in zip(margins[::2], margins[1::2], strict=True):
        h = chosen - rejected
        terms.append(
            {
                "sigmoid": -(beta * h).sigmoid().log(),
                "hinge": (1 - beta * h).clamp(min=0),
                "ipo": (h - 1 / (2 * beta)) ** 2,
            }[config.preference.loss_type]
        )
    return torch.stack(terms).mean()


def divergence(beta: float, own: Tensor, teacher: Tensor) -> Tensor:
    """Of logits [N, V], per token (Agarwal et al. 2023, eq. 1, β as in TRL): KL(p‖q) at 1, KL(q‖p) at 0."""
    p, q = own.softmax(-1), teacher.softmax(-1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(-1)

    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    mixture = (1 - beta) * p + beta * q
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """½ max((V − R)², (clip(V, V_old ± c) − R)²) of each token."""
    terms = []
    for value, before, wanted in zip(values, old, returns, strict=True):
        term = (value - wanted) ** 2
        if clip is not None:
            term = torch.maximum(term, (value.clamp(before - clip, before + clip) - wanted) ** 2)
        terms.append(term / 2)
    return torch.stack(terms)
