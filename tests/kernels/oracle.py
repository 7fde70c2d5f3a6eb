"""The papers' equations, spelled token by token in plain autograd. Nothing here is imported from the package.

Legend: T tokens, V vocabulary, S sequences. Log-probs and all per-token inputs are flat ``[T]`` tensors; a
sequence is a ``(start, stop)`` span of that axis; ``live`` lists which tokens train. Every function works in the
dtype of ``logprobs``: float64 gives the truth, float32 gives what eager PyTorch would have reached.

Two independent statements live here. The ``*_paper`` functions follow one paper's equation each. ``token_loss``,
``aggregate`` and ``batch_metrics`` state the options one branch at a time, for the combinations no paper prints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]


# --- rows -------------------------------------------------------------------------------------------------


def row_log_softmax(logits_row: Tensor, temperature: float | Tensor) -> Tensor:
    """``[V]`` log-probs of one row at a temperature: z - log(sum exp z), z = logits / temperature."""
    z = logits_row / temperature
    peak = z.detach().max()
    return z - (peak + torch.log(torch.sum(torch.exp(z - peak))))


def row_entropy(logits_row: Tensor, temperature: float | Tensor) -> Tensor:
    """H = -sum p log p over the whole row, with 0 log 0 = 0 for tokens of logit -inf."""
    logp = row_log_softmax(logits_row, temperature)
    possible = logp > -math.inf
    return -torch.sum(torch.exp(logp[possible]) * logp[possible])


# --- one paper, one function ------------------------------------------------------------------------------


@dataclass
class Flat:
    """What the paper functions read. ``logprobs`` carries the gradient; the rest is constant."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor
    live: list[bool]
    spans: list[Span]

    def sequences(self) -> list[list[int]]:
        """Token indices that train, per sequence; sequences without one are left out."""
        per_sequence = [[t for t in range(a, b) if self.live[t]] for a, b in self.spans]
        return [tokens for tokens in per_sequence if tokens]


def ppo_paper(x: Flat, eps: float = 0.2) -> Tensor:
    """PPO (arXiv 1707.06347) eq. 7: L = E_t[min(r_t A_t, clip(r_t, 1-eps, 1+eps) A_t)], maximised."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            terms.append(torch.minimum(r * x.advantages[t], torch.clamp(r, 1 - eps, 1 + eps) * x.advantages[t]))
    return -torch.stack(terms).sum() / len(terms)


def grpo_paper(x: Flat, eps: float = 0.2, beta: float = 0.04) -> Tensor:
    """DeepSeekMath (arXiv 2402.03300) eq. 3 and 4.

    J = 1/G sum_i 1/|o_i| sum_t { min[r A, clip(r, 1-eps, 1+eps) A] - beta D_KL },
    D_KL = pi_ref/pi - log(pi_ref/pi) - 1.
    """
    sequences = x.sequences()
    objective = torch.zeros((), dtype=x.logprobs.dtype)
    for tokens in sequences:
        total = torch.zeros((), dtype=x.logprobs.dtype)
        for t in tokens:
            r = torch.exp(x.logprobs[t]) / torch.exp(x.old_logprobs[t])
            surrogate = torch.minimum(r * x.advantages[t], torch.clamp(r, 1 - eps, 1 + eps) * x.advantages[t])
            ref_over_new = torch.exp(x.ref_logprobs[t]) / torch.exp(x.logprobs[t])
            total = total + surrogate - beta * (ref_over_new - torch.log(ref_over_new) - 1)
        objective = objective + total / len(tokens)
    return -objective / len(sequences)


def dapo_paper(x: Flat, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """DAPO (arXiv 2503.14476) eq. 8: one mean over all tokens, the two clip ranges decoupled."""
    sequences = x.sequences()
    n_tokens = sum(len(tokens) for tokens in sequences)
    objective = torch.zeros((), dtype=x.logprobs.dtype)
    for tokens in sequences:
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            unclipped = r * x.advantages[t]
            clipped = torch.clamp(r, 1 - eps_low, 1 + eps_high) * x.advantages[t]
            objective = objective + torch.minimum(unclipped, clipped)
    return -objective / n_tokens


def dr_grpo_paper(x: Flat, max_tokens: float, eps: float = 0.2) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783) eq. 4 and its listing: 1/G sum_i sum_t min(...) / MAX_TOKENS, no KL."""
    sequences = x.sequences()
    per_sequence = []
    for tokens in sequences:
        total = torch.zeros((), dtype=x.logprobs.dtype)
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            total = total + torch.minimum(r * x.advantages[t], torch.clamp(r, 1 - eps, 1 + eps) * x.advantages[t])
        per_sequence.append(total / max_tokens)
    return -torch.stack(per_sequence).sum() / len(sequences)


def reinforce_paper(x: Flat) -> Tensor:
    """REINFORCE (Williams 1992): grad J = E[A grad log pi], hence loss -mean(A log pi)."""
    terms = [x.advantages[t] * x.logprobs[t] for tokens in x.sequences() for t in tokens]
    return -torch.stack(terms).sum() / len(terms)


# --- every option, one branch at a time -------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The fields of an objective, by the names of the public API."""

    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_through_ratio: bool = False
    entropy_coef: float = 0.0
    aggregate: str = "token-mean"
    length_norm: float | None = None

    def keywords(self) -> dict[str, Any]:
        """As keyword overrides of a call; a clip range is left out where the surrogate has no ratio to clip."""
        said = dataclasses.asdict(self)
        if self.surrogate != "clip":
            del said["clip_low"], said["clip_high"]
        return said


ROWS: dict[str, Options] = {
    "ppo": Options(),
    "grpo": Options(aggregate="seq-mean-token-mean", kl_coef=0.04),
    "dapo": Options(clip_high=0.28),
    "dr_grpo": Options(aggregate="seq-mean-token-sum-norm"),
    "reinforce": Options(surrogate="reinforce"),
}


def policy_term(ratio: Tensor, logprob: Tensor, advantage: Tensor, o: Options) -> tuple[Tensor, str]:
    """The token's policy loss and which limit it hit: "", "low", "high" or "dual"."""
    zero, rho = torch.zeros_like(logprob), float(ratio.detach())
    if float(advantage) == 0.0:
        return zero, ""
    if o.surrogate == "reinforce":
        return -advantage * logprob, ""
    assert o.surrogate == "clip"
    if float(advantage) > 0 and rho > 1 + o.clip_high:
        return zero - (1 + o.clip_high) * advantage, "high"
    if float(advantage) < 0 and rho < 1 - o.clip_low:
        return zero - (1 - o.clip_low) * advantage, "low"
    if float(advantage) < 0 and o.dual_clip is not None and rho > o.dual_clip:
        return zero - o.dual_clip * advantage, "dual"
    return -ratio * advantage, ""


def kl_term(ratio: Tensor, logprob: Tensor, ref_logprob: Tensor, o: Options) -> Tensor:
    """Schulman's estimators of KL(pi || pi_ref) from one sample, d = log pi_ref - log pi."""
    d = ref_logprob - logprob
    if o.kl_estimator == "k1":
        return -d
    if o.kl_estimator == "k2":
        return d * d / 2
    assert o.kl_estimator == "k3"
    k3 = torch.exp(d) - d - 1
    return ratio * k3 if o.kl_through_ratio else k3


@dataclass
class TokenInputs:
    """Per-token inputs of the general oracle; ``[T]`` each, ``None`` where the call leaves them out."""

    logprobs: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    entropy: Tensor | None = None


def token_loss(x: TokenInputs, t: int, o: Options) -> tuple[Tensor, dict[str, float]]:
    """Loss of one live token and what it adds to the metrics."""
    logprob = x.logprobs[t]
    # On-policy: the old policy is this policy at this moment, so the ratio is 1 and carries a gradient.
    if x.old_logprobs is None:
        ratio = torch.exp(logprob - logprob.detach()) if bool(logprob.isfinite()) else torch.ones_like(logprob)
        approx_kl = 0.0
    else:
        ratio = torch.exp(logprob - x.old_logprobs[t])
        approx_kl = float(x.old_logprobs[t] - logprob.detach())
    loss, hit = policy_term(ratio, logprob, x.advantages[t], o)
    if x.importance_weights is not None:
        loss = loss * x.importance_weights[t]
    ref_kl = 0.0
    if o.kl_coef:
        assert x.ref_logprobs is not None
        kl = kl_term(ratio, logprob, x.ref_logprobs[t], o)
        loss = loss + o.kl_coef * kl
        ref_kl = float(kl.detach())
    if o.entropy_coef:
        assert x.entropy is not None
        loss = loss - o.entropy_coef * x.entropy[t]
    counts = {
        "tokens": 1.0,
        "clip_low": float(hit == "low"),
        "clip_high": float(hit == "high"),
        "clip_high_prob": math.exp(float(logprob.detach())) * (hit == "high"),
        "clip_dual": float(hit == "dual"),
        "ratio": float(ratio.detach()),
        "approx_kl": approx_kl,
        "ref_kl": ref_kl,
        "entropy": 0.0 if x.entropy is None else float(x.entropy[t].detach()),
        "nonfinite": float(not math.isfinite(float(logprob.detach()))),
    }
    return loss, counts


def aggregate(
    losses: dict[int, Tensor], spans: Sequence[Span], o: Options, denominator: float | None, zero: Tensor
) -> Tensor:
    """One scalar from the live tokens' losses. ``losses`` maps a token's index to its loss."""
    per_sequence = [[losses[t] for t in range(a, b) if t in losses] for a, b in spans]
    per_sequence = [tokens for tokens in per_sequence if tokens]
    if not per_sequence:
        return zero
    total = zero
    for tokens in per_sequence:
        sequence_sum = zero
        for loss in tokens:
            sequence_sum = sequence_sum + loss
        total = total + (sequence_sum / len(tokens) if o.aggregate == "seq-mean-token-mean" else sequence_sum)
    count = len(losses) if o.aggregate == "token-mean" else len(per_sequence)
    total = total / (count if denominator is None else denominator)
    if o.aggregate == "seq-mean-token-sum-norm":
        assert o.length_norm is not None
        total = total / o.length_norm
    return total


def batch_loss(
    x: TokenInputs, live: Sequence[bool], spans: Sequence[Span], o: Options, denominator: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss and the metric sums of a batch."""
    zero = torch.zeros((), dtype=x.logprobs.dtype)
    losses: dict[int, Tensor] = {}
    names = "tokens clip_low clip_high clip_high_prob clip_dual ratio approx_kl ref_kl entropy nonfinite"
    metrics = dict.fromkeys(names.split(), 0.0)
    ratios = []
    for t in range(len(live)):
        if live[t]:
            losses[t], counts = token_loss(x, t, o)
            metrics = {key: metrics[key] + counts[key] for key in metrics}
            ratios.append(counts["ratio"])
    metrics["ratio_max"] = max(ratios, default=0.0)
    return aggregate(losses, spans, o, denominator, zero), metrics
