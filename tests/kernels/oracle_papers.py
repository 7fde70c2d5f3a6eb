"""Every row of the table by its paper's equation, in plain autograd. Nothing here is imported from the package.

The papers maximise J; each function returns the loss -J, with the paper's constants. Same legend as ``oracle.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import Span, binary_divergence, covariances, highest, share_down, share_up
from torch import Tensor

MAX_TOKENS = 12.0  # Dr. GRPO's constant, which its users choose


@dataclass
class Flat:
    """What the paper functions read. ``logprobs`` carries the gradient; the rest is constant."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor
    live: list[bool]
    spans: list[Span]
    entropy: Tensor | None = None
    drawn: frozenset[int] = frozenset()  # Clip-Cov's random index set

    def sequences(self) -> list[list[int]]:
        """Token indices that train, per sequence; sequences without one are left out."""
        per_sequence = [[t for t in range(a, b) if self.live[t]] for a, b in self.spans]
        return [tokens for tokens in per_sequence if tokens]

    def tokens(self) -> list[int]:
        return [t for tokens in self.sequences() for t in tokens]

    def ratio(self, t: int) -> Tensor:
        """r_t = pi(y_t) / pi_old(y_t)."""
        return torch.exp(self.logprobs[t] - self.old_logprobs[t])

    def moved(self, tokens: list[int]) -> float:
        """sum_t log(pi / pi_old) over tokens of a response, without a gradient."""
        return sum(float(self.logprobs[t].detach() - self.old_logprobs[t]) for t in tokens)

    def k3(self, t: int) -> Tensor:
        """D_KL = pi_ref/pi - log(pi_ref/pi) - 1."""
        ref_over_new = torch.exp(self.ref_logprobs[t]) / torch.exp(self.logprobs[t])
        return ref_over_new - torch.log(ref_over_new) - 1


def mean(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum() / len(terms)


def smaller(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's min(r A, clip(r, 1-low, 1+high) A)."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def ppo_paper(x: Flat, eps: float = 0.2) -> Tensor:
    """PPO (arXiv 1707.06347) eq. 7: E_t[min(r_t A_t, clip(r_t, 1-eps, 1+eps) A_t)]."""
    return -mean([smaller(x.ratio(t), x.advantages[t], eps, eps) for t in x.tokens()])


def grpo_paper(x: Flat, eps: float = 0.2, beta: float = 0.04) -> Tensor:
    """DeepSeekMath (arXiv 2402.03300) eq. 3 and 4: 1/G sum_i 1/|o_i| sum_t { min[..] - beta D_KL }."""
    means = []
    for tokens in x.sequences():
        means.append(mean([smaller(x.ratio(t), x.advantages[t], eps, eps) - beta * x.k3(t) for t in tokens]))
    return -mean(means)


def dapo_paper(x: Flat, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """DAPO (arXiv 2503.14476) eq. 8 with one mean over all tokens, the two clip ranges decoupled."""
    return -mean([smaller(x.ratio(t), x.advantages[t], eps_low, eps_high) for t in x.tokens()])


def dr_grpo_paper(x: Flat, eps: float = 0.2) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783) eq. 4 and its listing: 1/G sum_i sum_t min(...) / MAX_TOKENS, no KL."""
    sums = []
    for tokens in x.sequences():
        sums.append(torch.stack([smaller(x.ratio(t), x.advantages[t], eps, eps) for t in tokens]).sum() / MAX_TOKENS)
    return -mean(sums)


def sequence_ratio(x: Flat, tokens: list[int]) -> Tensor:
    """GSPO's s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|)."""
    return torch.exp(torch.stack([x.logprobs[t] - x.old_logprobs[t] for t in tokens]).sum() / len(tokens))


def gspo_paper(x: Flat, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """GSPO (arXiv 2507.18071) eq. 5 and 7: 1/G sum_i min(s_i A_i, clip(s_i) A_i), A_i that of the first token."""
    terms = []
    for tokens in x.sequences():
        terms.append(smaller(sequence_ratio(x, tokens), x.advantages[tokens[0]], eps_low, eps_high))
    return -mean(terms)


def gspo_token_paper(x: Flat, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """GSPO-token (same paper) eq. 13 and 14: s_it = sg[s_i] pi(y_it) / sg[pi(y_it)], an advantage per token."""
    means = []
    for tokens in x.sequences():
        s_i = math.exp(x.moved(tokens) / len(tokens))
        p = torch.exp(x.logprobs)
        means.append(mean([smaller(s_i * p[t] / p[t].detach(), x.advantages[t], eps_low, eps_high) for t in tokens]))
    return -mean(means)


def luspo_paper(x: Flat, eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> Tensor:
    """LUSPO (arXiv 2602.05261): GSPO's min(s_i A_i, clip(s_i) A_i), times the length of the response."""
    terms = []
    for tokens in x.sequences():
        gain = smaller(sequence_ratio(x, tokens), x.advantages[tokens[0]], eps_low, eps_high)
        terms.append(gain * len(tokens))
    return -mean(terms)


def gmpo_paper(x: Flat, eps: float = 0.4) -> Tensor:
    """GMPO (arXiv 2507.20673): (prod_t c_t)^(1/|o|) A, c_t of r_t and clip(r_t, e^-eps, e^eps) the one with the smaller
    product with A; the advantage is that of the sequence's first token."""
    terms = []
    for tokens in x.sequences():
        a, product = x.advantages[tokens[0]], torch.ones((), dtype=x.logprobs.dtype)
        for t in tokens:
            clipped = torch.clamp(x.ratio(t), math.exp(-eps), math.exp(eps))
            product = product * (torch.minimum if float(a) > 0 else torch.maximum)(x.ratio(t), clipped)
        terms.append(product ** (1 / len(tokens)) * a)
    return -mean(terms)


def cispo_paper(x: Flat, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5: 1/sum|o_i| sum sg(clip(r, 1-eps_low, 1+eps_high)) A log pi."""
    terms = []
    for t in x.tokens():
        weight = torch.clamp(x.ratio(t).detach(), 1 - eps_low, 1 + eps_high)
        terms.append(weight * x.advantages[t] * x.logprobs[t])
    return -mean(terms)


def reinforce_paper(x: Flat) -> Tensor:
    """REINFORCE (Williams 1992): grad J = E[A grad log pi]."""
    return -mean([x.advantages[t] * x.logprobs[t] for t in x.tokens()])


def sapo_paper(x: Flat, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """SAPO (arXiv 2511.20347) eq. 5: 1/G sum_i 1/|y_i| sum_t f(r) A, with eq. 6: f(r) = sigmoid(tau (r - 1)) 4/tau, tau
    by the sign of the advantage."""
    means = []
    for tokens in x.sequences():
        terms = []
        for t in tokens:
            tau = tau_positive if float(x.advantages[t]) > 0 else tau_negative
            terms.append((4 / tau) / (1 + torch.exp(-tau * (x.ratio(t) - 1))) * x.advantages[t])
        means.append(mean(terms))
    return -mean(means)


def clip_cov_paper(x: Flat, eps: float = 1.0) -> Tensor:
    """Clip-Cov (arXiv 2505.22617): r A, which the authors' script clips at 0 and 2; 0 for the random index set."""
    terms = [smaller(x.ratio(t), x.advantages[t], eps, eps) for t in x.tokens()]
    return -mean([0 * term if t in x.drawn else term for t, term in zip(x.tokens(), terms, strict=True)])


def kl_cov_paper(x: Flat, beta: float = 1.0, share: float = 2e-4) -> Tensor:
    """KL-Cov (same paper) eq. 14: r A unclipped, and |log pi - log pi_old| on the tokens of highest covariance."""
    scores = covariances(x.logprobs.detach(), x.advantages, x.live)
    penalised, terms = highest(scores, share_down(x.live, share)), []
    for t in x.tokens():
        penalty = beta * torch.abs(x.logprobs[t] - x.old_logprobs[t]) if t in penalised else 0.0
        terms.append(x.ratio(t) * x.advantages[t] - penalty)
    return -mean(terms)


def top_entropy_paper(x: Flat, share: float = 0.2) -> Tensor:
    """Beyond the 80/20 rule (arXiv 2506.01939) eq. 5: DAPO's token mean with the indicator H_t >= tau_share."""
    kept = highest({t: float(x.entropy[t]) for t in x.tokens()}, share_up(x.live, share))
    return -mean([smaller(x.ratio(t), x.advantages[t], 0.2, 0.28) * (t in kept) for t in x.tokens()])


def spo_paper(x: Flat, threshold: float = 0.9, eps: float = 0.2) -> Tensor:
    """SPO's probability mask (arXiv 2505.23564, section 4.3): M_t = 1 where pi_old <= threshold; only these train."""
    terms = []
    for t in x.tokens():
        m = 1.0 if math.exp(float(x.old_logprobs[t])) <= threshold else 0.0
        terms.append(m * smaller(x.ratio(t), x.advantages[t], eps, eps))
    return -mean(terms)


def two_sided_paper(x: Flat, eps: float = 0.2, delta: float = 4.0, beta: float = 0.001) -> Tensor:
    """INTELLECT-2 (arXiv 2505.07291), two-sided GRPO: min(min(r, delta) A, clip(r) A) - beta D_KL in GRPO's means."""
    means = []
    for tokens in x.sequences():
        terms = []
        for t in tokens:
            r, a = x.ratio(t), x.advantages[t]
            gain = torch.minimum(torch.clamp(r, max=delta) * a, torch.clamp(r, 1 - eps, 1 + eps) * a)
            terms.append(gain - beta * x.k3(t))
        means.append(mean(terms))
    return -mean(means)


def vespo_paper(x: Flat) -> Tensor:
    """VESPO (arXiv 2602.10693): sg[W^k exp(lambda (1 - W))] A log pi, W the ratio of the whole response; (k, lambda) is
    (2, 3) for A >= 0 and (3, 2) for A < 0, and one mean over all tokens, as in its code."""
    terms = []
    for tokens in x.sequences():
        w = math.exp(x.moved(tokens))
        for t in tokens:
            k, decay = (2.0, 3.0) if float(x.advantages[t]) >= 0 else (3.0, 2.0)
            terms.append(w**k * math.exp(decay * (1 - w)) * x.advantages[t] * x.logprobs[t])
    return -mean(terms)


def dppo_paper(x: Flat, kind: str, delta: float) -> Tensor:
    """DPPO (arXiv 2602.04879): the mask of eq. 12, the weight sg[r] of eq. 23 without its bound, over all tokens."""
    terms = []
    for t in x.tokens():
        r, a = float(x.ratio(t).detach()), float(x.advantages[t])
        new, old = math.exp(float(x.logprobs[t].detach())), math.exp(float(x.old_logprobs[t]))
        outside = binary_divergence(kind, old, new) > delta
        m = 0.0 if outside and ((a > 0 and r > 1) or (a < 0 and r < 1)) else 1.0
        terms.append(m * r * a * x.logprobs[t])
    return -mean(terms)


def dppo_tv_paper(x: Flat) -> Tensor:
    return dppo_paper(x, "tv", 0.2)


def dppo_kl_paper(x: Flat) -> Tensor:
    return dppo_paper(x, "kl", 0.05)


def opsm_paper(x: Flat, delta: float = 0.5, eps: float = 0.2) -> Tensor:
    """DeepSeek-V3.2 (arXiv 2512.02556) eq. 8 and 9, without its KL: nothing where A < 0 and the mean of
    log(pi_old / pi) over the response is above delta."""
    means = []
    for tokens in x.sequences():
        far, terms = -x.moved(tokens) / len(tokens) > delta, []
        for t in tokens:
            m = 0.0 if far and float(x.advantages[t]) < 0 else 1.0
            terms.append(m * smaller(x.ratio(t), x.advantages[t], eps, eps))
        means.append(mean(terms))
    return -mean(means)


def dro_paper(x: Flat, beta: float = 0.05) -> Tensor:
    """DRO (arXiv 2405.19107) with pi_old as its reference, token by token: A log pi - beta/2 (log pi/pi_old)^2."""
    terms = []
    for t in x.tokens():
        distance = x.logprobs[t] - x.old_logprobs[t]
        terms.append(x.advantages[t] * x.logprobs[t] - beta / 2 * distance * distance)
    return -mean(terms)


def lite_ppo_paper(x: Flat) -> Tensor:
    """Lite PPO (arXiv 2508.08221) section 5: the critic-free PPO loss with one mean over all tokens of the batch."""
    return ppo_paper(x)


# Row of the table → its equation, by the functions' names.
PAPERS: dict[str, Callable[[Flat], Tensor]] = {
    name.removesuffix("_paper"): function for name, function in globals().items() if name.endswith("_paper")
}
