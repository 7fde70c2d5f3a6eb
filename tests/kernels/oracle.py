"""The losses longhand: rows of logits, every option one branch at a time, selections. Nothing here is imported from the
package, and ``oracle_papers.py`` states the papers' equations a second time, independently of this file.

Legend: T tokens, V vocabulary, S sequences. Log-probs and all per-token inputs are flat ``[T]`` tensors; a
sequence is a ``(start, stop)`` span of that axis; ``live`` lists which tokens train; a selection of tokens is a set of
indices. Every function works in the dtype of ``logprobs``: float64 gives the truth, float32 what eager PyTorch reaches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]
PROMPT_MEAN = "prompt-mean-token-mean"


# --- rows -------------------------------------------------------------------------------------------------


def row_log_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``[..., V]`` log-probs: z - log(sum exp z), z = logits / temperature, one temperature or one per row."""
    z = logits / torch.as_tensor(temperature, dtype=logits.dtype).unsqueeze(-1)
    peak = z.detach().amax(-1, keepdim=True)
    return z - (peak + torch.log(torch.sum(torch.exp(z - peak), -1, keepdim=True)))


def row_entropy(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """H = -sum p log p over the whole row, with 0 log 0 = 0 for tokens of logit -inf."""
    logp = row_log_softmax(logits, temperature)
    return -torch.sum(torch.exp(logp) * logp.masked_fill(logp == -math.inf, 0.0), -1)


# --- options ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The fields of an objective, by the names of the public API."""

    surrogate: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    vespo: tuple[float, float, float, float] | None = None
    off_policy_mask: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_to: str = "reference"
    kl_through_ratio: bool = False
    entropy_coef: float = 0.0
    aggregate: str = "token-mean"
    length_norm: float | None = None
    top_entropy: float | None = None
    clip_cov: tuple[float, float, float] | None = None
    kl_cov: tuple[float, float] | None = None
    max_old_prob: float | None = None

    def keywords(self) -> dict[str, Any]:
        """As keyword overrides of a call on "ppo", without the fields that this objective does not read."""
        fields = dataclasses.asdict(self)
        if self.surrogate in ("sapo", "reinforce"):
            del fields["clip_low"], fields["clip_high"]
        if self.surrogate == "up":
            del fields["clip_high"]
        if self.surrogate != "sapo":
            del fields["sapo_tau"]
        if self.kl_coef == 0:
            del fields["kl_to"], fields["kl_through_ratio"]
        return fields

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0 and self.kl_to == "reference"


@dataclass
class TokenInputs:
    """Per-token inputs, ``[T]`` each; ``None`` where the call leaves them out. ``groups`` [S]: prompts of sequences."""

    logprobs: Tensor
    advantages: Tensor
    live: list[bool]
    spans: Sequence[Span]
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    entropy: Tensor | None = None
    groups: Sequence[int] | None = None

    @property
    def tokens(self) -> list[int]:
        return [t for t in range(len(self.live)) if self.live[t]]

    def sequences(self) -> list[list[int]]:
        """Token indices that train, per sequence; sequences without one are left out."""
        per_sequence = [[t for t in range(a, b) if self.live[t]] for a, b in self.spans]
        return [tokens for tokens in per_sequence if tokens]

    @property
    def old(self) -> Tensor:
        """On-policy, the old policy is this policy at this moment: the ratio is 1 and carries a gradient."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs


# --- selections -------------------------------------------------------------------------------------------


def share_up(live: Sequence[bool], share: float) -> int:
    """A share of the live tokens, rounded up; 0.2 of 10 is 2 although 0.2 is a little more than a fifth in binary."""
    return max(1, math.ceil(round(share * sum(live), 9)))


def share_down(live: Sequence[bool], share: float) -> int:
    """A share of the live tokens, rounded down, at least one."""
    return max(1, math.floor(round(share * sum(live), 9)))


def highest(scores: dict[int, float], count: int) -> set[int]:
    """Indices of the `count` highest scores; the earlier token wins a tie."""
    return set(sorted(scores, key=lambda t: (-scores[t], t))[:count])


def covariances(logprobs: Tensor, advantages: Tensor, live: Sequence[bool]) -> dict[int, float]:
    """(log pi_t - mean log pi) (A_t - mean A) of the live tokens (arXiv 2505.22617, eq. 10)."""
    tokens = [t for t in range(len(live)) if live[t]]
    if not tokens:
        return {}
    mean_l = sum(float(logprobs[t]) for t in tokens) / len(tokens)
    mean_a = sum(float(advantages[t]) for t in tokens) / len(tokens)
    return {t: (float(logprobs[t]) - mean_l) * (float(advantages[t]) - mean_a) for t in tokens}


def batch_selection(x: TokenInputs, o: Options) -> set[int]:
    """The tokens that the objective's batch selection picks; for clip_cov, the candidates of the draw."""
    if o.top_entropy is not None:
        return highest({t: float(x.entropy[t].detach()) for t in x.tokens}, share_up(x.live, o.top_entropy))
    if o.kl_cov is None and o.clip_cov is None:
        return set()
    scores = covariances(x.logprobs.detach(), x.advantages, x.live)
    if o.kl_cov is not None:
        return highest(scores, share_down(x.live, o.kl_cov[0]))
    deltas = log_ratios(x, o)
    within = [t for t in x.tokens if o.clip_cov[1] < scores[t] < o.clip_cov[2]]
    return {t for t in within if not policy_term(x, t, o, deltas[t])[1]}


# --- one token --------------------------------------------------------------------------------------------


def token_clip(delta: Tensor, advantage: Tensor, o: Options) -> tuple[Tensor, str]:
    """A token's log-ratio within the clip range that its advantage minds, and which bound it hit."""
    at = float(delta.detach())
    if float(advantage) > 0 and at > math.log(1 + o.clip_high):
        return torch.full_like(delta, math.log(1 + o.clip_high)), "high"
    if float(advantage) < 0 and o.clip_low < 1 and at < math.log(1 - o.clip_low):
        return torch.full_like(delta, math.log(1 - o.clip_low)), "low"
    return delta, ""


def log_ratios(x: TokenInputs, o: Options) -> dict[int, Tensor]:
    """The log-ratio each live token's surrogate sees."""
    out: dict[int, Tensor] = {}
    for tokens in x.sequences():
        deltas = [x.logprobs[t] - x.old[t] for t in tokens]
        if o.ratio == "token":
            out.update(zip(tokens, deltas, strict=True))
            continue
        if o.ratio == "sequence_clipped":
            deltas = [token_clip(d, x.advantages[t], o)[0] for d, t in zip(deltas, tokens, strict=True)]
        mean = torch.stack(deltas).sum() / len(tokens)
        for t in tokens:
            own = x.logprobs[t] - x.logprobs[t].detach()
            out[t] = mean.detach() + own if o.ratio == "sequence_token" else mean
    return out


def sequence_weights(x: TokenInputs, o: Options) -> dict[int, float]:
    """What a sequence multiplies the policy terms of its live tokens by."""
    out: dict[int, float] = {}
    for tokens in x.sequences():
        total = sum(float(x.logprobs[t].detach() - x.old[t]) for t in tokens)
        for t in tokens:
            out[t], negative = 1.0, float(x.advantages[t]) < 0
            if o.vespo is not None:
                k, decay = o.vespo[2:] if negative else o.vespo[:2]
                out[t] = math.exp(k * total + decay * (1 - math.exp(total)))
            if o.off_policy_mask is not None and negative and -total / len(tokens) > o.off_policy_mask:
                out[t] = 0.0
    return out


def binary_divergence(kind: str, old: float, new: float, floor: float = 0.0) -> float:
    """Between the token and all others (arXiv 2602.04879, eq. 13 and 14); `floor` for those that are left with none."""
    if kind == "tv":
        return abs(old - new)
    old_rest, rest = (max(1 - p, 0.0) for p in (old, new))
    return old * math.log(old / new) + old_rest * math.log((old_rest + floor) / (rest + floor))


def policy_term(x: TokenInputs, t: int, o: Options, log_ratio: Tensor) -> tuple[Tensor, str]:
    """The token's policy loss and which limit it hit: "", "low", "high" or "dual"."""
    logprob, advantage, ratio = x.logprobs[t], x.advantages[t], torch.exp(log_ratio)
    zero, rho, a = torch.zeros_like(logprob), float(ratio.detach()), float(advantage)
    if a == 0.0:
        return zero, ""
    if o.ratio == "sequence_clipped":  # its tokens are clipped, not their mean
        return -ratio * advantage, token_clip(logprob.detach() - x.old[t], advantage, o)[1]
    if o.surrogate == "reinforce":
        return -advantage * logprob, ""
    if o.surrogate == "sapo":
        tau = o.sapo_tau[0] if a > 0 else o.sapo_tau[1]
        return -advantage * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), ""
    if o.surrogate == "cispo":
        hit = "low" if rho < 1 - o.clip_low else "high" if rho > 1 + o.clip_high else ""
        return -torch.clamp(ratio.detach(), 1 - o.clip_low, 1 + o.clip_high) * advantage * logprob, hit
    if o.surrogate.startswith("dppo"):
        old, new = math.exp(float((logprob - log_ratio).detach())), math.exp(float(logprob.detach()))
        moved = binary_divergence(o.surrogate[-2:], old, new, floor=1e-8)
        if a > 0 and new > old and moved > o.clip_high:
            return zero, "high"
        if a < 0 and new < old and moved > o.clip_low:
            return zero, "low"
        most = math.inf if o.dual_clip is None else o.dual_clip
        return -torch.clamp(ratio.detach(), max=most) * advantage * logprob, "dual" if rho > most else ""
    if o.surrogate == "up" and a > 0:
        return -advantage * logprob, ""
    assert o.surrogate in ("clip", "up")
    if a > 0 and rho > 1 + o.clip_high:
        return zero - (1 + o.clip_high) * advantage, "high"
    if a < 0 and rho < 1 - o.clip_low:
        return zero - (1 - o.clip_low) * advantage, "low"
    if a < 0 and o.dual_clip is not None and rho > o.dual_clip:
        return zero - o.dual_clip * advantage, "dual"
    return -ratio * advantage, ""


def kl_term(log_ratio: Tensor, logprob: Tensor, ref_logprob: Tensor, o: Options) -> Tensor:
    """Schulman's estimators of KL(pi || pi_ref) from one sample, d = log pi_ref - log pi."""
    d = ref_logprob - logprob
    if o.kl_estimator == "k1":
        return -d
    if o.kl_estimator == "k2":
        return d * d / 2
    assert o.kl_estimator == "k3"
    k3 = torch.exp(d) - d - 1
    return torch.exp(log_ratio) * k3 if o.kl_through_ratio else k3


def token_loss(
    x: TokenInputs, t: int, o: Options, log_ratio: Tensor, weight: float, selected: set[int]
) -> tuple[Tensor, str, float]:
    """Loss of one live token that trains, the limit it hit, its KL estimate."""
    logprob = x.logprobs[t]
    loss, hit = policy_term(x, t, o, log_ratio)
    loss = loss * weight
    if o.clip_cov is not None and t in selected:
        loss = torch.zeros_like(loss)
    if o.kl_cov is not None and t in selected:
        loss = loss + o.kl_cov[1] * torch.abs(logprob - x.old[t])
    if x.importance_weights is not None:
        loss = loss * x.importance_weights[t]
    kl = torch.zeros_like(loss)
    if o.kl_coef:
        reference = x.old if o.kl_to == "old" else x.ref_logprobs
        kl = kl_term(log_ratio, logprob, reference[t], o)
        loss = loss + o.kl_coef * kl
    if o.entropy_coef:
        loss = loss - o.entropy_coef * x.entropy[t]
    return loss, hit, float(kl.detach())


def trains(x: TokenInputs, t: int, o: Options, selected: set[int]) -> bool:
    """Whether a live token has a loss at all."""
    if o.top_entropy is not None and t not in selected:
        return False
    return o.max_old_prob is None or math.exp(float(x.old[t])) <= o.max_old_prob


# --- a batch ----------------------------------------------------------------------------------------------


def aggregate(losses: dict[int, Tensor], x: TokenInputs, o: Options, denominator: float | None) -> Tensor:
    """One scalar from the live tokens' losses. ``losses`` maps a token's index to its loss."""
    if not losses:
        return torch.zeros((), dtype=x.logprobs.dtype)
    parts = [(group, tokens) for group, tokens in enumerate(x.sequences())]
    if o.aggregate == PROMPT_MEAN:
        named = zip(x.groups, x.spans, strict=True)
        parts = [(group, [t for t in range(a, b) if x.live[t]]) for group, (a, b) in named]
    totals = {group: torch.zeros((), dtype=x.logprobs.dtype) for group, tokens in parts if tokens}
    counts = dict.fromkeys(totals, 0)
    for group, tokens in parts:
        for t in tokens:
            totals[group] = totals[group] + losses[t]
            counts[group] += 1
    if o.aggregate in ("seq-mean-token-mean", PROMPT_MEAN):
        totals = {group: total / counts[group] for group, total in totals.items()}
    count = len(losses) if o.aggregate == "token-mean" else len(totals)
    if o.aggregate == "seq-mean-token-sum-norm":
        totals = {group: total / o.length_norm for group, total in totals.items()}
    return torch.stack(list(totals.values())).sum() / (count if denominator is None else denominator)


def batch_loss(
    x: TokenInputs, o: Options, denominator: float | None = None, selected: Iterable[int] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss and metric sums of a batch. ``selected`` replaces the batch selection; clip_cov draws none."""
    if selected is None:
        selected = batch_selection(x, o) if o.clip_cov is None else ()
    chosen = set(selected)
    deltas, weights = log_ratios(x, o), sequence_weights(x, o)
    losses: dict[int, Tensor] = {}
    names = "tokens clip_low clip_high clip_high_prob clip_dual ratio ratio_max approx_kl ref_kl entropy nonfinite"
    m = dict.fromkeys(names.split(), 0.0)
    for t in sorted(deltas):
        loss, hit, kl = token_loss(x, t, o, deltas[t], weights[t], chosen)
        losses[t] = loss if trains(x, t, o, chosen) else torch.zeros_like(loss)
        logprob, ratio = float(x.logprobs[t].detach()), float(torch.exp(deltas[t].detach()))
        m["tokens"] += 1
        m["ratio"] += ratio
        m["ratio_max"] = max(m["ratio_max"], ratio)
        m["ref_kl"] += kl
        m["nonfinite"] += not math.isfinite(logprob)
        if x.old_logprobs is not None:
            m["approx_kl"] += float(x.old_logprobs[t]) - logprob
        if x.entropy is not None:
            m["entropy"] += float(x.entropy[t].detach())
        if hit:
            m[f"clip_{hit}"] += 1
        if hit == "high":
            m["clip_high_prob"] += math.exp(logprob)
    return aggregate(losses, x, o, denominator), m
