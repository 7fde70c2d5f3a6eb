"""Every row of the table by its paper's equation, in plain autograd. Nothing here is imported from the package.

The papers maximise J; each function returns the loss -J, with the paper's constants. Same legend as ``oracle.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import TokenInputs, binary_divergence, covariances, highest, share_down, share_up
from torch import Tensor

MAX_TOKENS = 12.0  # Dr. GRPO's constant, which its users choose


@dataclass
class Flat(TokenInputs):
    """What the paper functions read. ``logprobs`` carries the gradient; the rest is constant."""

    drawn: frozenset[int] = frozenset()  # Clip-Cov's random index set

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


def over_tokens(x: Flat, gain: Callable[[int], Tensor]) -> Tensor:
    """-1/sum|o_i| sum_i sum_t gain(t)."""
    return -mean([gain(t) for t in x.tokens])


def over_responses(x: Flat, gain: Callable[[list[int]], Tensor]) -> Tensor:
    """-1/G sum_i gain(o_i)."""
    return -mean([gain(tokens) for tokens in x.sequences()])


def over_means(x: Flat, gain: Callable[[int], Tensor]) -> Tensor:
    """-1/G sum_i 1/|o_i| sum_t gain(t)."""
    return over_responses(x, lambda tokens: mean([gain(t) for t in tokens]))


def smaller(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's min(r A, clip(r, 1-low, 1+high) A)."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def ppo_paper(x: Flat, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO (arXiv 1707.06347) eq. 7: E_t[min(r_t A_t, clip(r_t, 1-eps, 1+eps) A_t)]."""
    return over_tokens(x, lambda t: smaller(x.ratio(t), x.advantages[t], low, high))


def lite_ppo_paper(x: Flat) -> Tensor:
    """Lite PPO (arXiv 2508.08221) section 5: the critic-free PPO loss with one mean over all tokens of the batch."""
    return ppo_paper(x)


def grpo_paper(x: Flat, eps: float = 0.2, beta: float = 0.04) -> Tensor:
    """DeepSeekMath (arXiv 2402.03300) eq. 3 and 4: 1/G sum_i 1/|o_i| sum_t { min[..] - beta D_KL }."""
    return over_means(x, lambda t: smaller(x.ratio(t), x.advantages[t], eps, eps) - beta * x.k3(t))


def dapo_paper(x: Flat) -> Tensor:
    """DAPO (arXiv 2503.14476) eq. 8 with one mean over all tokens, the two clip ranges decoupled."""
    return ppo_paper(x, 0.2, 0.28)


def dr_grpo_paper(x: Flat, eps: float = 0.2) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783) eq. 4 and its listing: 1/G sum_i sum_t min(...) / MAX_TOKENS, no KL."""

    def gain(tokens: list[int]) -> Tensor:
        return torch.stack([smaller(x.ratio(t), x.advantages[t], eps, eps) for t in tokens]).sum() / MAX_TOKENS

    return over_responses(x, gain)


def gspo_gain(x: Flat, tokens: list[int], low: float, high: float) -> Tensor:
    """min(s A, clip(s) A), s = (pi(y) / pi_old(y))^(1/|y|), A that of the first token."""
    ratio = torch.exp(torch.stack([x.logprobs[t] - x.old_logprobs[t] for t in tokens]).sum() / len(tokens))
    return smaller(ratio, x.advantages[tokens[0]], low, high)


def gspo_paper(x: Flat) -> Tensor:
    """GSPO (arXiv 2507.18071) eq. 5 and 7: 1/G sum_i min(s_i A_i, clip(s_i) A_i)."""
    return over_responses(x, lambda tokens: gspo_gain(x, tokens, 3e-4, 4e-4))


def gspo_token_paper(x: Flat) -> Tensor:
    """GSPO-token (same paper) eq. 13 and 14: s_it = sg[s_i] pi(y_it) / sg[pi(y_it)], an advantage per token."""
    p = torch.exp(x.logprobs)

    def gain(tokens: list[int]) -> Tensor:
        s_i = math.exp(x.moved(tokens) / len(tokens))
        return mean([smaller(s_i * p[t] / p[t].detach(), x.advantages[t], 3e-4, 4e-4) for t in tokens])

    return over_responses(x, gain)


def luspo_paper(x: Flat) -> Tensor:
    """LUSPO (arXiv 2602.05261): GSPO's min(s_i A_i, clip(s_i) A_i), times the length of the response."""
    return over_responses(x, lambda tokens: gspo_gain(x, tokens, 2e-3, 2.5e-3) * len(tokens))


def gmpo_paper(x: Flat, eps: float = 0.4) -> Tensor:
    """GMPO (arXiv 2507.20673): (prod_t c_t)^(1/|o|) A, c_t of r_t and clip(r_t, e^-eps, e^eps) the one with the smaller
    product with A; the advantage is that of the sequence's first token."""

    def gain(tokens: list[int]) -> Tensor:
        a, product = x.advantages[tokens[0]], torch.ones((), dtype=x.logprobs.dtype)
        for t in tokens:
            clipped = torch.clamp(x.ratio(t), math.exp(-eps), math.exp(eps))
            product = product * (torch.minimum if float(a) > 0 else torch.maximum)(x.ratio(t), clipped)
        return product ** (1 / len(tokens)) * a

    return over_responses(x, gain)


def cispo_paper(x: Flat, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5: 1/sum|o_i| sum sg(clip(r, 1-eps_low, 1+eps_high)) A log pi."""
    weight = torch.clamp(torch.exp(x.logprobs - x.old_logprobs), 1 - eps_low, 1 + eps_high).detach()
    return over_tokens(x, lambda t: weight[t] * x.advantages[t] * x.logprobs[t])


def reinforce_paper(x: Flat) -> Tensor:
    """REINFORCE (Williams 1992): grad J = E[A grad log pi]."""
    return over_tokens(x, lambda t: x.advantages[t] * x.logprobs[t])


def sapo_paper(x: Flat, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """SAPO (arXiv 2511.20347) eq. 5: 1/G sum_i 1/|y_i| sum_t f(r) A, with eq. 6: f(r) = sigmoid(tau (r - 1)) 4/tau, tau
    by the sign of the advantage."""

    def gain(t: int) -> Tensor:
        tau = tau_positive if float(x.advantages[t]) > 0 else tau_negative
        return (4 / tau) / (1 + torch.exp(-tau * (x.ratio(t) - 1))) * x.advantages[t]

    return over_means(x, gain)


def clip_cov_paper(x: Flat, eps: float = 1.0) -> Tensor:
    """Clip-Cov (arXiv 2505.22617): r A, which the authors' script clips at 0 and 2; 0 for the random index set."""
    return over_tokens(x, lambda t: smaller(x.ratio(t), x.advantages[t], eps, eps) * (t not in x.drawn))


def kl_cov_paper(x: Flat, beta: float = 1.0, share: float = 2e-4) -> Tensor:
    """KL-Cov (same paper) eq. 14: r A unclipped, and |log pi - log pi_old| on the tokens of highest covariance."""
    scores = covariances(x.logprobs.detach(), x.advantages, x.live)
    penalised = highest(scores, share_down(x.live, share))
    penalty = beta * torch.abs(x.logprobs - x.old_logprobs)
    return over_tokens(x, lambda t: x.ratio(t) * x.advantages[t] - penalty[t] * (t in penalised))


def top_entropy_paper(x: Flat, share: float = 0.2) -> Tensor:
    """Beyond the 80/20 rule (arXiv 2506.01939) eq. 5: DAPO's token mean with the indicator H_t >= tau_share."""
    kept = highest({t: float(x.entropy[t]) for t in x.tokens}, share_up(x.live, share))
    return over_tokens(x, lambda t: smaller(x.ratio(t), x.advantages[t], 0.2, 0.28) * (t in kept))


def spo_paper(x: Flat, threshold: float = 0.9, eps: float = 0.2) -> Tensor:
    """SPO's probability mask (arXiv 2505.23564, section 4.3): M_t = 1 where pi_old <= threshold; only these train."""
    m = torch.exp(x.old_logprobs) <= threshold
    return over_tokens(x, lambda t: m[t] * smaller(x.ratio(t), x.advantages[t], eps, eps))


def two_sided_paper(x: Flat, eps: float = 0.2, delta: float = 4.0, beta: float = 0.001) -> Tensor:
    """INTELLECT-2 (arXiv 2505.07291), two-sided GRPO: min(min(r, delta) A, clip(r) A) - beta D_KL in GRPO's means."""

    def gain(t: int) -> Tensor:
        r, a = x.ratio(t), x.advantages[t]
        return torch.minimum(torch.clamp(r, max=delta) * a, torch.clamp(r, 1 - eps, 1 + eps) * a) - beta * x.k3(t)

    return over_means(x, gain)


def vespo_paper(x: Flat) -> Tensor:
    """VESPO (arXiv 2602.10693): sg[W^k exp(lambda (1 - W))] A log pi, W the ratio of the whole response; (k, lambda) is
    (2, 3) for A >= 0 and (3, 2) for A < 0, and one mean over all tokens, as in its code."""
    w = {t: math.exp(x.moved(tokens)) for tokens in x.sequences() for t in tokens}

    def gain(t: int) -> Tensor:
        k, decay = (2.0, 3.0) if float(x.advantages[t]) >= 0 else (3.0, 2.0)
        return w[t] ** k * math.exp(decay * (1 - w[t])) * x.advantages[t] * x.logprobs[t]

    return over_tokens(x, gain)


def dppo_gain(x: Flat, t: int, kind: str, delta: float) -> Tensor:
    """DPPO (arXiv 2602.04879): the mask of eq. 12, the weight sg[r] of eq. 23 without its bound."""
    r, a = float(x.ratio(t).detach()), float(x.advantages[t])
    new, old = math.exp(float(x.logprobs[t].detach())), math.exp(float(x.old_logprobs[t]))
    outside = binary_divergence(kind, old, new) > delta
    m = 0.0 if outside and ((a > 0 and r > 1) or (a < 0 and r < 1)) else 1.0
    return m * r * a * x.logprobs[t]


def dppo_tv_paper(x: Flat) -> Tensor:
    return over_tokens(x, lambda t: dppo_gain(x, t, "tv", 0.2))


def dppo_kl_paper(x: Flat) -> Tensor:
    return over_tokens(x, lambda t: dppo_gain(x, t, "kl", 0.05))


def up_paper(x: Flat) -> Tensor:
    """UP-DAPO (arXiv 2607.06987): A log pi for A > 0, DAPO's clip for the others, one mean over all tokens."""

    def gain(t: int) -> Tensor:
        a = x.advantages[t]
        return a * x.logprobs[t] if float(a) > 0 else smaller(x.ratio(t), a, 0.2, 0.28)

    return over_tokens(x, gain)


def opsm_paper(x: Flat, delta: float = 0.5, eps: float = 0.2) -> Tensor:
    """DeepSeek-V3.2 (arXiv 2512.02556) eq. 8 and 9, without its KL: nothing where A < 0 and the mean of
    log(pi_old / pi) over the response is above delta."""
    far = {t: -x.moved(tokens) / len(tokens) > delta for tokens in x.sequences() for t in tokens}

    def gain(t: int) -> Tensor:
        m = 0.0 if far[t] and float(x.advantages[t]) < 0 else 1.0
        return m * smaller(x.ratio(t), x.advantages[t], eps, eps)

    return over_means(x, gain)


def dro_paper(x: Flat, beta: float = 0.05) -> Tensor:
    """DRO (arXiv 2405.19107) with pi_old as its reference, token by token: A log pi - beta/2 (log pi/pi_old)^2."""
    distance = x.logprobs - x.old_logprobs
    return over_tokens(x, lambda t: x.advantages[t] * x.logprobs[t] - beta / 2 * distance[t] ** 2)


# Row of the table → its equation, by the functions' names.
PAPERS: dict[str, Callable[[Flat], Tensor]] = {
    name.removesuffix("_paper"): function for name, function in globals().items() if name.endswith("_paper")
}
