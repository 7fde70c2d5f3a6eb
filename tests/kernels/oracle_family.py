"""The rest of the family, longhand: sequence ratios, soft gates, selections. Nothing here is imported from the package.

Same legend and same two statements as ``oracle.py``: ``*_paper`` functions follow one paper's equation each, and
``family_loss`` states every option one branch at a time. A selection of tokens is a set of indices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import MATH_DTYPE, Case, Solution, logits_of
from oracle import Flat, Options, Span, TokenInputs, aggregate, kl_term, policy_term, row_entropy, row_log_softmax
from torch import Tensor

# --- one paper, one function ------------------------------------------------------------------------------


def gspo_paper(x: Flat, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """GSPO (arXiv 2507.18071) eq. 5 and 7, with the advantage of the sequence's first token.

    J = 1/G sum_i min(s_i A_i, clip(s_i) A_i),  s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|).
    """
    terms = []
    for tokens in x.sequences():
        new = sum((x.logprobs[t] for t in tokens), torch.zeros((), dtype=x.logprobs.dtype))
        old = sum((x.old_logprobs[t] for t in tokens), torch.zeros((), dtype=x.logprobs.dtype))
        s = torch.exp((new - old) / len(tokens))
        a = x.advantages[tokens[0]]
        terms.append(torch.minimum(s * a, torch.clamp(s, 1 - eps_low, 1 + eps_high) * a))
    return -torch.stack(terms).sum() / len(terms)


def gspo_token_paper(x: Flat, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """GSPO-token (same paper) eq. 13 and 14: s_it = sg[s_i] pi(y_it) / sg[pi(y_it)], an advantage per token."""
    per_sequence = []
    for tokens in x.sequences():
        mean = sum(float(x.logprobs[t].detach() - x.old_logprobs[t]) for t in tokens) / len(tokens)
        total = torch.zeros((), dtype=x.logprobs.dtype)
        for t in tokens:
            p = torch.exp(x.logprobs[t])
            s = math.exp(mean) * p / p.detach()
            a = x.advantages[t]
            total = total + torch.minimum(s * a, torch.clamp(s, 1 - eps_low, 1 + eps_high) * a)
        per_sequence.append(total / len(tokens))
    return -torch.stack(per_sequence).sum() / len(per_sequence)


def cispo_paper(x: Flat, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5: 1/sum|o_i| sum sg(clip(r, 1-eps_low, 1+eps_high)) A log pi."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t]).detach()
            terms.append(torch.clamp(r, 1 - eps_low, 1 + eps_high) * x.advantages[t] * x.logprobs[t])
    return -torch.stack(terms).sum() / len(terms)


def lite_ppo_paper(x: Flat, eps: float = 0.2) -> Tensor:
    """Lite PPO (arXiv 2508.08221) section 5: the critic-free PPO loss with one mean over all tokens of the batch."""
    sequences = x.sequences()
    total = torch.zeros((), dtype=x.logprobs.dtype)
    for tokens in sequences:
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            a = x.advantages[t]
            total = total - torch.minimum(r * a, torch.clamp(r, 1 - eps, 1 + eps) * a)
    return total / sum(len(tokens) for tokens in sequences)


def sapo_paper(x: Flat, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """SAPO (arXiv 2511.20347) eq. 6: f(r) = sigmoid(tau (r - 1)) 4/tau, tau by the sign of the advantage.

    The paper takes the mean of f(r) A over each response, then over responses; the row of the table is a token mean,
    and so is this function. ``sapo_paper_mean`` is the paper's own.
    """
    terms = sapo_terms(x, tau_positive, tau_negative)
    return torch.stack([term for tokens in terms for term in tokens]).sum() / sum(len(tokens) for tokens in terms)


def sapo_paper_mean(x: Flat, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """SAPO eq. 5: 1/G sum_i 1/|y_i| sum_t f(r) A."""
    means = [torch.stack(tokens).sum() / len(tokens) for tokens in sapo_terms(x, tau_positive, tau_negative)]
    return torch.stack(means).sum() / len(means)


def sapo_terms(x: Flat, tau_positive: float, tau_negative: float) -> list[list[Tensor]]:
    """-f(r) A of every token, by sequence."""
    per_sequence = []
    for tokens in x.sequences():
        terms = []
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            tau = tau_positive if float(x.advantages[t]) > 0 else tau_negative
            terms.append(-(4 / tau) / (1 + torch.exp(-tau * (r - 1))) * x.advantages[t])
        per_sequence.append(terms)
    return per_sequence


def clip_cov_paper(x: Flat, dropped: set[int], eps: float = 0.2) -> Tensor:
    """Clip-Cov (arXiv 2505.22617) eq. 12: the PPO loss, and nothing for the tokens of the random index set."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            a = x.advantages[t]
            j = torch.minimum(r * a, torch.clamp(r, 1 - eps, 1 + eps) * a)
            terms.append(torch.zeros_like(j) if t in dropped else j)
    return -torch.stack(terms).sum() / len(terms)


def kl_cov_paper(x: Flat, penalised: set[int], beta: float = 1.0) -> Tensor:
    """KL-Cov (same paper) eq. 14: r A unclipped, and |log pi - log pi_old| on the tokens of highest covariance."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            delta = x.logprobs[t] - x.old_logprobs[t]
            j = torch.exp(delta) * x.advantages[t]
            terms.append(j - beta * torch.abs(delta) if t in penalised else j)
    return -torch.stack(terms).sum() / len(terms)


def top_entropy_paper(x: Flat, entropy: Tensor, share: float = 0.2) -> Tensor:
    """Beyond the 80/20 rule (arXiv 2506.01939) eq. 5: DAPO's token mean with the indicator H_t >= tau_share."""
    sequences = x.sequences()
    kept = highest({t: float(entropy[t]) for tokens in sequences for t in tokens}, share_up(sequences, share))
    total = torch.zeros((), dtype=x.logprobs.dtype)
    for tokens in sequences:
        for t in tokens:
            if t in kept:
                r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
                a = x.advantages[t]
                total = total + torch.minimum(r * a, torch.clamp(r, 0.8, 1.28) * a)
    return -total / sum(len(tokens) for tokens in sequences)


def spo_paper(x: Flat, threshold: float = 0.9, eps: float = 0.2) -> Tensor:
    """SPO's probability mask (arXiv 2505.23564, section 4.3): M_t = 1 where pi_old <= threshold; only these train."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            m = 1.0 if math.exp(float(x.old_logprobs[t])) <= threshold else 0.0
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            a = x.advantages[t]
            terms.append(m * torch.minimum(r * a, torch.clamp(r, 1 - eps, 1 + eps) * a))
    return -torch.stack(terms).sum() / len(terms)


def two_sided_paper(x: Flat, eps: float = 0.2, delta: float = 4.0, beta: float = 0.001) -> Tensor:
    """INTELLECT-2 (arXiv 2505.07291), two-sided GRPO: min(min(r, delta) A, clip(r) A) - beta D_KL in GRPO's means."""
    per_sequence = []
    for tokens in x.sequences():
        total = torch.zeros((), dtype=x.logprobs.dtype)
        for t in tokens:
            r, a = torch.exp(x.logprobs[t] - x.old_logprobs[t]), x.advantages[t]
            surrogate = torch.minimum(torch.clamp(r, max=delta) * a, torch.clamp(r, 1 - eps, 1 + eps) * a)
            ref_over_new = torch.exp(x.ref_logprobs[t] - x.logprobs[t])
            total = total + surrogate - beta * (ref_over_new - torch.log(ref_over_new) - 1)
        per_sequence.append(total / len(tokens))
    return -torch.stack(per_sequence).sum() / len(per_sequence)


def gmpo_paper(x: Flat, eps: float = 0.4) -> Tensor:
    """GMPO (arXiv 2507.20673): (prod_t c_t)^(1/|o|) A, c_t of r_t and clip(r_t, e^-eps, e^eps) the one with the smaller
    product with A; the advantage is that of the sequence's first token."""
    terms = []
    for tokens in x.sequences():
        a, product = x.advantages[tokens[0]], torch.ones((), dtype=x.logprobs.dtype)
        for t in tokens:
            r = torch.exp(x.logprobs[t] - x.old_logprobs[t])
            clipped = torch.clamp(r, math.exp(-eps), math.exp(eps))
            product = product * (torch.minimum(r, clipped) if float(a) > 0 else torch.maximum(r, clipped))
        terms.append(product ** (1 / len(tokens)) * a)
    return -torch.stack(terms).sum() / len(terms)


def luspo_paper(x: Flat, eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> Tensor:
    """LUSPO (arXiv 2602.05261): GSPO's min(s_i A_i, clip(s_i) A_i), times the length of the response."""
    terms = []
    for tokens in x.sequences():
        s = torch.exp(torch.stack([x.logprobs[t] - x.old_logprobs[t] for t in tokens]).sum() / len(tokens))
        a = x.advantages[tokens[0]]
        terms.append(torch.minimum(s * a, torch.clamp(s, 1 - eps_low, 1 + eps_high) * a) * len(tokens))
    return -torch.stack(terms).sum() / len(terms)


def vespo_paper(x: Flat) -> Tensor:
    """VESPO (arXiv 2602.10693): sg[W^k exp(lambda (1 - W))] A log pi, W the ratio of the whole response; (k, lambda) is
    (2, 3) for A >= 0 and (3, 2) for A < 0, and one mean over all tokens, as in its code."""
    terms = []
    for tokens in x.sequences():
        w = math.exp(sum(float(x.logprobs[t].detach() - x.old_logprobs[t]) for t in tokens))
        for t in tokens:
            k, decay = (2.0, 3.0) if float(x.advantages[t]) >= 0 else (3.0, 2.0)
            terms.append(w**k * math.exp(decay * (1 - w)) * x.advantages[t] * x.logprobs[t])
    return -torch.stack(terms).sum() / len(terms)


def binary_divergence(kind: str, old: float, new: float, floor: float = 0.0) -> float:
    """Between the token and all others (arXiv 2602.04879, eq. 13 and 14); `floor` for those that are left with none."""
    if kind == "tv":
        return abs(old - new)
    old_rest, rest = (max(1 - p, 0.0) for p in (old, new))
    return old * math.log(old / new) + old_rest * math.log((old_rest + floor) / (rest + floor))


def dppo_paper(x: Flat, kind: str, delta: float, most: float = math.inf) -> Tensor:
    """DPPO (arXiv 2602.04879): the mask of eq. 12, the weight sg[min(r, C)] of eq. 23, one mean over all tokens."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            r, a = math.exp(float(x.logprobs[t].detach() - x.old_logprobs[t])), float(x.advantages[t])
            new, old = math.exp(float(x.logprobs[t].detach())), math.exp(float(x.old_logprobs[t]))
            outside = binary_divergence(kind, old, new) > delta
            m = 0.0 if outside and ((a > 0 and r > 1) or (a < 0 and r < 1)) else 1.0
            terms.append(m * min(r, most) * a * x.logprobs[t])
    return -torch.stack(terms).sum() / len(terms)


def opsm_paper(x: Flat, delta: float = 0.5, eps: float = 0.2) -> Tensor:
    """DeepSeek-V3.2 (arXiv 2512.02556) eq. 8 and 9, without its KL: nothing where A < 0 and the mean of
    log(pi_old / pi) over the response is above delta."""
    per_sequence = []
    for tokens in x.sequences():
        distance = sum(float(x.old_logprobs[t] - x.logprobs[t].detach()) for t in tokens) / len(tokens)
        total = torch.zeros((), dtype=x.logprobs.dtype)
        for t in tokens:
            r, a = torch.exp(x.logprobs[t] - x.old_logprobs[t]), x.advantages[t]
            if not (float(a) < 0 and distance > delta):
                total = total + torch.minimum(r * a, torch.clamp(r, 1 - eps, 1 + eps) * a)
        per_sequence.append(total / len(tokens))
    return -torch.stack(per_sequence).sum() / len(per_sequence)


def dro_paper(x: Flat, beta: float = 0.05) -> Tensor:
    """DRO (arXiv 2405.19107) with pi_old as its reference, token by token: A log pi - beta/2 (log pi/pi_old)^2."""
    terms = []
    for tokens in x.sequences():
        for t in tokens:
            distance = x.logprobs[t] - x.old_logprobs[t]
            terms.append(x.advantages[t] * x.logprobs[t] - beta / 2 * distance * distance)
    return -torch.stack(terms).sum() / len(terms)


# --- selections -------------------------------------------------------------------------------------------


def share_up(sequences: Sequence[Sequence[int]], share: float) -> int:
    """A share of the live tokens, rounded up; 0.2 of 10 is 2 although 0.2 is a little more than a fifth in binary."""
    return max(1, math.ceil(round(share * sum(len(tokens) for tokens in sequences), 9)))


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


# --- every option, one branch at a time -------------------------------------------------------------------


@dataclass(frozen=True)
class Family(Options):
    """All fields of an objective, by the names of the public API."""

    ratio: str = "token"
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    vespo: tuple[float, float, float, float] | None = None
    off_policy_mask: float | None = None
    kl_to: str = "reference"
    top_entropy: float | None = None
    clip_cov: tuple[float, float, float] | None = None
    kl_cov: tuple[float, float] | None = None
    max_old_prob: float | None = None

    def keywords(self) -> dict[str, Any]:
        """As keyword overrides of a call on "ppo", without the fields this surrogate does not read."""
        said = dataclasses.asdict(self)
        if self.surrogate in ("sapo", "reinforce"):
            del said["clip_low"], said["clip_high"]
        if self.surrogate != "sapo":
            del said["sapo_tau"]
        return said

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0 and self.kl_to == "reference"


FAMILY: dict[str, Family] = {
    "ppo": Family(),
    "grpo": Family(aggregate="seq-mean-token-mean", kl_coef=0.04),
    "dapo": Family(clip_high=0.28),
    "dr_grpo": Family(aggregate="seq-mean-token-sum-norm", length_norm=12.0),
    "gspo": Family(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="seq-mean-token-mean"),
    "gspo_token": Family(ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, aggregate="seq-mean-token-mean"),
    "cispo": Family(surrogate="cispo", clip_low=1.0, clip_high=4.0),
    "lite_ppo": Family(),
    "reinforce": Family(surrogate="reinforce"),
    "clip_cov": Family(clip_cov=(2e-4, 1.0, 5.0)),
    "kl_cov": Family(clip_low=1.0, clip_high=math.inf, kl_cov=(2e-4, 1.0)),
    "top_entropy": Family(clip_high=0.28, top_entropy=0.2),
    "spo": Family(max_old_prob=0.9),
    "sapo": Family(surrogate="sapo"),
    "two_sided": Family(dual_clip=4.0, kl_coef=0.001, aggregate="seq-mean-token-mean"),
    "gmpo": Family(
        ratio="sequence_clipped",
        clip_low=-math.expm1(-0.4),
        clip_high=math.expm1(0.4),
        aggregate="seq-mean-token-mean",
    ),
    "luspo": Family(ratio="sequence", clip_low=2e-3, clip_high=2.5e-3, aggregate="seq-mean-token-sum"),
    "vespo": Family(surrogate="reinforce", vespo=(2.0, 3.0, 3.0, 2.0)),
    "dppo_tv": Family(surrogate="dppo_tv"),
    "dppo_kl": Family(surrogate="dppo_kl", clip_low=0.05, clip_high=0.05),
    "opsm": Family(off_policy_mask=0.5, aggregate="seq-mean-token-mean"),
    "dro": Family(surrogate="reinforce", kl_coef=0.05, kl_estimator="k2", kl_to="old"),
}


def token_clip(delta: Tensor, advantage: Tensor, o: Options) -> tuple[Tensor, str]:
    """A token's log-ratio within the clip range that its advantage minds, and which bound it hit."""
    at = float(delta.detach())
    if float(advantage) > 0 and at > math.log(1 + o.clip_high):
        return torch.full_like(delta, math.log(1 + o.clip_high)), "high"
    if float(advantage) < 0 and o.clip_low < 1 and at < math.log(1 - o.clip_low):
        return torch.full_like(delta, math.log(1 - o.clip_low)), "low"
    return delta, ""


def log_ratios(x: TokenInputs, live: Sequence[bool], spans: Sequence[Span], o: Family) -> dict[int, Tensor]:
    """The log-ratio each live token's surrogate sees."""
    level = o.ratio
    # On-policy: the old policy is this policy at this moment, so the ratio is 1 and carries a gradient.
    old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs
    out: dict[int, Tensor] = {}
    for start, stop in spans:
        tokens = [t for t in range(start, stop) if live[t]]
        for t in tokens:
            if level == "token":
                out[t] = x.logprobs[t] - old[t]
                continue
            deltas = [x.logprobs[u] - old[u] for u in tokens]
            if level == "sequence_clipped":
                deltas = [token_clip(d, x.advantages[u], o)[0] for d, u in zip(deltas, tokens, strict=True)]
            mean = torch.stack(deltas).sum() / len(tokens)
            out[t] = mean.detach() + x.logprobs[t] - x.logprobs[t].detach() if level == "sequence_token" else mean
    return out


def sequence_weights(x: TokenInputs, live: Sequence[bool], spans: Sequence[Span], o: Family) -> dict[int, float]:
    """What a sequence multiplies the policy terms of its live tokens by."""
    out: dict[int, float] = {}
    for start, stop in spans:
        tokens = [t for t in range(start, stop) if live[t]]
        deltas = [0.0 if x.old_logprobs is None else float(x.logprobs[t].detach() - x.old_logprobs[t]) for t in tokens]
        for t in tokens:
            out[t], negative = 1.0, float(x.advantages[t]) < 0
            if o.vespo is not None:
                k, decay = o.vespo[2:] if negative else o.vespo[:2]
                out[t] = math.exp(k * sum(deltas) + decay * (1 - math.exp(sum(deltas))))
            if o.off_policy_mask is not None and negative and -sum(deltas) / len(tokens) > o.off_policy_mask:
                out[t] = 0.0
    return out


def surrogate_term(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, o: Family) -> tuple[Tensor, str]:
    """The token's policy loss and which limit it hit."""
    if o.surrogate in ("clip", "reinforce"):
        return policy_term(torch.exp(log_ratio), logprob, advantage, o)
    rho, a = torch.exp(log_ratio), float(advantage)
    if a == 0.0:
        return torch.zeros_like(logprob), ""
    if o.surrogate == "cispo":
        value = float(rho.detach())
        hit = "low" if value < 1 - o.clip_low else "high" if value > 1 + o.clip_high else ""
        return -torch.clamp(rho.detach(), 1 - o.clip_low, 1 + o.clip_high) * advantage * logprob, hit
    if o.surrogate in ("dppo_tv", "dppo_kl"):
        old, new = math.exp(float((logprob - log_ratio).detach())), math.exp(float(logprob.detach()))
        moved = binary_divergence(o.surrogate[-2:], old, new, floor=1e-8)
        if a > 0 and new > old and moved > o.clip_high:
            return torch.zeros_like(logprob), "high"
        if a < 0 and new < old and moved > o.clip_low:
            return torch.zeros_like(logprob), "low"
        most = math.inf if o.dual_clip is None else o.dual_clip
        hit = "dual" if float(rho.detach()) > most else ""
        return -torch.clamp(rho.detach(), max=most) * advantage * logprob, hit
    assert o.surrogate == "sapo"
    tau = o.sapo_tau[0] if a > 0 else o.sapo_tau[1]
    return -advantage * torch.sigmoid(tau * (rho - 1)) * (4 / tau), ""


def batch_selection(x: TokenInputs, live: Sequence[bool], spans: Sequence[Span], o: Family) -> set[int]:
    """The tokens that the objective's batch selection picks; for clip_cov, the candidates of the draw."""
    tokens = [t for t in range(len(live)) if live[t]]
    if o.top_entropy is not None:
        assert x.entropy is not None
        return highest({t: float(x.entropy[t].detach()) for t in tokens}, share_up([tokens], o.top_entropy))
    scores = covariances(x.logprobs.detach(), x.advantages, live)
    if o.kl_cov is not None:
        return highest(scores, share_down(live, o.kl_cov[0]))
    if o.clip_cov is not None:
        deltas = log_ratios(x, live, spans, o)
        left_alone = [t for t in tokens if not surrogate_term(deltas[t], x.logprobs[t], x.advantages[t], o)[1]]
        return {t for t in left_alone if o.clip_cov[1] < scores[t] < o.clip_cov[2]}
    return set()


def trains(x: TokenInputs, t: int, o: Family, selected: set[int]) -> bool:
    """Whether a live token has a loss at all."""
    if o.top_entropy is not None and t not in selected:
        return False
    if o.max_old_prob is None:
        return True
    assert x.old_logprobs is not None
    return math.exp(float(x.old_logprobs[t])) <= o.max_old_prob


def family_token(
    x: TokenInputs, t: int, o: Family, log_ratio: Tensor, weight: float, selected: set[int]
) -> tuple[Tensor, str, float]:
    """Loss of one live token that trains, the limit it hit, its KL estimate."""
    logprob = x.logprobs[t]
    loss, hit = surrogate_term(log_ratio, logprob, x.advantages[t], o)
    old = logprob.detach() if x.old_logprobs is None else x.old_logprobs[t]
    if o.ratio == "sequence_clipped":
        hit = token_clip(logprob.detach() - old, x.advantages[t], o)[1]
    loss = loss * weight
    if o.clip_cov is not None and t in selected:
        loss = torch.zeros_like(loss)
    if x.importance_weights is not None:
        loss = loss * x.importance_weights[t]
    kl = torch.zeros_like(loss)
    if o.kl_coef:
        assert x.ref_logprobs is not None
        kl = kl_term(torch.exp(log_ratio), logprob, old if o.kl_to == "old" else x.ref_logprobs[t], o)
        loss = loss + o.kl_coef * kl
    if o.kl_cov is not None and t in selected:
        loss = loss + o.kl_cov[1] * torch.abs(logprob - old)
    if o.entropy_coef:
        assert x.entropy is not None
        loss = loss - o.entropy_coef * x.entropy[t]
    return loss, hit, float(kl.detach())


def family_loss(
    x: TokenInputs,
    live: Sequence[bool],
    spans: Sequence[Span],
    o: Family,
    denominator: float | None = None,
    selected: Iterable[int] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss and metric sums of a batch. ``selected`` replaces the batch selection; clip_cov draws none."""
    if selected is None:
        selected = batch_selection(x, live, spans, o) if o.clip_cov is None else ()
    chosen = set(selected)
    zero = torch.zeros((), dtype=x.logprobs.dtype)
    deltas, weights = log_ratios(x, live, spans, o), sequence_weights(x, live, spans, o)
    losses: dict[int, Tensor] = {}
    names = "tokens clip_low clip_high clip_high_prob clip_dual ratio approx_kl ref_kl entropy"
    m = dict.fromkeys(names.split(), 0.0)
    for t in sorted(deltas):
        loss, hit, kl = family_token(x, t, o, deltas[t], weights[t], chosen)
        losses[t] = loss if trains(x, t, o, chosen) else zero
        m["tokens"] += 1
        m["ratio"] += float(torch.exp(deltas[t].detach()))
        m["ref_kl"] += kl
        if x.old_logprobs is not None:
            m["approx_kl"] += float(x.old_logprobs[t] - x.logprobs[t].detach())
        if x.entropy is not None:
            m["entropy"] += float(x.entropy[t].detach())
        if hit:
            m[f"clip_{hit}"] += 1
        if hit == "high":
            m["clip_high_prob"] += float(torch.exp(x.logprobs[t].detach()))
    m["ratio_max"] = max((float(torch.exp(d.detach())) for d in deltas.values()), default=0.0)
    return aggregate(losses, spans, o, denominator, zero), m


# --- from a case ------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """A case's differentiable per-token values; dead tokens hold 0."""

    leaves: dict[str, Tensor]
    inputs: TokenInputs
    live: list[bool]


def case_rows(
    case: Case,
    o: Family,
    dtype: torch.dtype,
    *,
    on_policy: bool = False,
    weighted: bool = False,
    advantages: Tensor | None = None,
) -> Rows:
    """Log-probs and entropies of a case, leaves in `dtype`, arithmetic in float32 at least."""
    math_dtype = MATH_DTYPE[dtype]
    leaves = {name: leaf.detach().to(dtype, copy=True).requires_grad_() for name, leaf in case.leaves.items()}
    live = [bool(m) for m in case.mask.tolist()]
    rows = torch.tensor([t for t in range(len(live)) if live[t]], dtype=torch.int64)
    token_leaf = "logits" if "logits" in leaves else "hidden"
    logits = logits_of({**leaves, token_leaf: leaves[token_leaf][rows]}, case.softcap).to(math_dtype)
    tau = torch.as_tensor(case.temperature, dtype=math_dtype).expand(len(live))
    logprobs = torch.zeros(len(live), dtype=math_dtype)
    entropy = torch.zeros(len(live), dtype=math_dtype)
    if rows.numel():
        picked = [row_log_softmax(z, tau[t])[case.target_ids[t]] for z, t in zip(logits, rows.tolist(), strict=True)]
        spread = [row_entropy(z, tau[t]) for z, t in zip(logits, rows.tolist(), strict=True)]
        logprobs = logprobs.index_put((rows,), torch.stack(picked))
        entropy = entropy.index_put((rows,), torch.stack(spread))
    inputs = TokenInputs(
        logprobs,
        (case.advantages if advantages is None else advantages).to(math_dtype),
        old_logprobs=None if on_policy else case.old_logprobs.to(math_dtype),
        ref_logprobs=case.ref_logprobs.to(math_dtype) if o.kl_coef else None,
        importance_weights=case.importance_weights.to(math_dtype) if weighted else None,
        entropy=entropy,
    )
    return Rows(leaves, inputs, live)


def family_solve(
    case: Case,
    o: Family,
    *,
    dtype: torch.dtype = torch.float64,
    denominator: float | None = None,
    selected: Iterable[int] | None = None,
    grad_output: float = 1.0,
    loss_of: Callable[[Rows], Tensor] | None = None,
    **kwargs: Any,
) -> Solution:
    """Autograd through ``family_loss`` (or through ``loss_of``): float64 is the truth, the case's dtype is eager."""
    rows = case_rows(case, o, dtype, **kwargs)
    if loss_of is None:
        loss, metrics = family_loss(rows.inputs, rows.live, case.spans, o, denominator, selected)
    else:
        loss, metrics = loss_of(rows), {}
    if loss.requires_grad:
        (loss * grad_output).backward()
    grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in rows.leaves.items()}
    entropy = rows.inputs.entropy
    assert entropy is not None
    return Solution(loss.detach(), grads, rows.inputs.logprobs.detach(), entropy.detach(), metrics)


def selection_mask(case: Case, selected: Iterable[int]) -> Tensor:
    """bool ``[T]`` from indices."""
    mask = torch.zeros(sum(case.lengths), dtype=torch.bool)
    for t in selected:
        mask[t] = True
    return mask
