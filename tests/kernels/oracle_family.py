"""The rest of the family, longhand: sequence ratios, soft gates, selections. Nothing here is imported from the package.

Same legend as ``oracle.py``. ``family_loss`` states every option one branch at a time, independently of the papers'
equations in ``oracle_papers.py``. A selection of tokens is a set of indices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import MATH_DTYPE, Case, Solution, logits_of
from oracle import Options, Span, TokenInputs, aggregate, kl_term, policy_term, row_entropy, row_log_softmax
from torch import Tensor

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
    "sapo": Family(surrogate="sapo", aggregate="seq-mean-token-mean"),
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


def binary_divergence(kind: str, old: float, new: float, floor: float = 0.0) -> float:
    """Between the token and all others (arXiv 2602.04879, eq. 13 and 14); `floor` for those that are left with none."""
    if kind == "tv":
        return abs(old - new)
    old_rest, rest = (max(1 - p, 0.0) for p in (old, new))
    return old * math.log(old / new) + old_rest * math.log((old_rest + floor) / (rest + floor))


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
    if o.kl_cov is not None and t in selected:
        loss = loss + o.kl_cov[1] * torch.abs(logprob - old)
    if x.importance_weights is not None:
        loss = loss * x.importance_weights[t]
    kl = torch.zeros_like(loss)
    if o.kl_coef:
        assert x.ref_logprobs is not None
        kl = kl_term(torch.exp(log_ratio), logprob, old if o.kl_to == "old" else x.ref_logprobs[t], o)
        loss = loss + o.kl_coef * kl
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
