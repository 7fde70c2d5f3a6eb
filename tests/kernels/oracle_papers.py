"""The rows beyond the first five, each by its paper's equation. Nothing here is imported from the package.

Same legend as ``oracle.py``; a selection of tokens is a set of indices.
"""

from __future__ import annotations

import math

import torch
from oracle import Flat
from oracle_family import binary_divergence, highest, share_up
from torch import Tensor


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
    """SAPO (arXiv 2511.20347) eq. 5: 1/G sum_i 1/|y_i| sum_t f(r) A, with eq. 6: f(r) = sigmoid(tau (r - 1)) 4/tau, tau
    by the sign of the advantage.
    """
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
