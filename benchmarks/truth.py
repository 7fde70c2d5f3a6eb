"""The check of a contestant's result against float64 eager, on sampled rows.

The normalizers of all rows are float64 up to ``FULL_LIMIT`` logits. Beyond that they are float64 on the sampled rows
and float32 eager on the others, which enter the loss and the head's gradient as one of N. Sampled are rows of the
gradient of logits or hidden states, and rows of the gradient of the head (vocabulary entries, targets among them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.formulas import FORMULAS
from benchmarks.problem import Problem, seeded

FULL_LIMIT = 2**27
_ROWS, _COLUMNS = 48, 64


class Result(NamedTuple):
    """What a contestant computed: in "forward" mode log-probs [N] (and entropies), in "train" loss and gradients."""

    loss: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    logprobs: Tensor | None = None
    entropy: Tensor | None = None


class Tolerance(NamedTuple):
    """Largest accepted errors: of the loss (its tokens are of size 1), of a gradient (‖error‖/‖truth‖ over the
    sample), of a log-prob or an entropy (absolute)."""

    loss: float
    gradient: float
    logprob: float


# By what rounds: nothing but float32; the result (or the logits) to bfloat16; the log-probs themselves to bfloat16,
# whose spacing is 0.06 near −11 and 3 % of the ratio with it.
TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-4, 1e-4),
    "bfloat16 tensors": Tolerance(2e-3, 2e-2, 5e-2),
    "bfloat16 softmax": Tolerance(2e-2, 5e-2, 2e-1),
}


@dataclass
class Truth:
    """Float64 results: ``rows`` [R] of the first gradient, ``columns`` [C] of the head's."""

    problem: Problem
    loss: Tensor
    rows: Tensor
    row_gradient: Tensor
    columns: Tensor
    column_gradient: Tensor | None
    logprobs: Tensor
    entropy: Tensor | None

    def errors(self, result: Result) -> dict[str, float]:
        """Return the errors by name, as in ``Tolerance``."""
        if result.logprobs is not None:
            found = {"logprob": _worst(result.logprobs.flatten()[self.rows], self.logprobs)}
            if result.entropy is not None and self.entropy is not None:
                found["entropy"] = _worst(result.entropy.flatten()[self.rows], self.entropy)
            return found
        assert result.loss is not None
        found = {"loss": _worst(result.loss, self.loss)}
        width = result.gradients[0].shape[-1]
        found["gradient"] = _relative(
            result.gradients[0].reshape(-1, width)[self.rows], self.row_gradient, "the sampled rows"
        )
        if self.column_gradient is not None and len(result.gradients) > 1:
            found["dweight"] = _relative(
                result.gradients[1][self.columns], self.column_gradient, "the sampled rows of dW"
            )
        return found


def exceeded(errors: dict[str, float], rounding: str) -> str | None:
    """Return why these errors are too large for a contestant with this rounding, or ``None``."""
    allowed = TOLERANCES[rounding]
    limits = {"loss": allowed.loss, "logprob": allowed.logprob, "entropy": allowed.logprob}
    for name, error in errors.items():
        limit = limits.get(name, allowed.gradient)
        if not error <= limit:
            return f"{name} is off by {error:.2e}, allowed {limit:.0e} ({rounding})"
    return None


def find_truth(problem: Problem, full_limit: int = FULL_LIMIT) -> Truth:
    """Compute the float64 results, one block of logits at a time; of all rows up to ``full_limit`` logits."""
    config, tokens = problem.config, problem.tokens
    device = tokens.target_ids.device
    generator = seeded(device, 1)
    rows = torch.randperm(config.n_tokens, generator=generator, device=device)[:_ROWS].sort().values
    normalizer, entropies = problem.normalizer.double(), None
    if config.n_tokens * config.vocab <= full_limit:
        _store_exact(problem)
        normalizer = problem.exact["normalizer"].clone()
        entropies = problem.exact["entropy"] if config.entropy else None
    sampled = problem.logits_of(rows, torch.float64)
    normalizer[rows] = sampled.logsumexp(1)
    logprobs = _target_logits(problem) - normalizer
    logprobs.requires_grad_(True)
    if config.objective == "entropy_bonus":
        entropies = (_wide_entropies(problem) if entropies is None else entropies).clone().requires_grad_(True)
    loss = FORMULAS[config.objective](logprobs, tokens._replace(entropy=entropies))
    (slope,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    probabilities = (sampled - normalizer[rows, None]).exp()
    dlogits = -slope[rows, None] * probabilities
    if entropies is not None and entropies.requires_grad:  # ∂H/∂x_j = −p_j (log p_j + H)
        (bonus,) = torch.autograd.grad(loss, entropies)
        logs = sampled - normalizer[rows, None]
        dlogits -= bonus[rows, None] * probabilities * (logs - (probabilities * logs).sum(1, keepdim=True))
    dlogits[torch.arange(len(rows), device=device), tokens.target_ids[rows]] += slope[rows]
    row_gradient, column_gradient, columns = dlogits, None, rows.new_empty(0)
    if config.level == "hidden":
        hidden, weight = problem.head()
        row_gradient = dlogits @ weight.double()
        some = torch.randperm(config.vocab, generator=generator, device=device)[:_COLUMNS]
        columns = torch.cat([some, tokens.target_ids[rows[:_COLUMNS]]]).unique()
        whole = problem.logits_of(slice(None), torch.float64, columns).sub_(normalizer[:, None]).exp_()
        is_target = (tokens.target_ids[:, None] == columns).double()
        weights = (is_target - whole) * slope[:, None]
        if entropies is not None and entropies.requires_grad:
            weights -= bonus[:, None] * whole * (whole.log() + entropies.detach()[:, None])
        column_gradient = weights.t() @ hidden.double()
    entropy = normalizer[rows] - (probabilities * sampled).sum(1) if config.entropy else None
    return Truth(
        problem,
        loss.detach(),
        rows,
        row_gradient,
        columns,
        column_gradient,
        logprobs.detach()[rows],
        entropy,
    )


def _wide_entropies(problem: Problem) -> Tensor:
    """Return entropies [N] of eager float32 PyTorch, for problems that are too large for float64."""
    found = torch.empty_like(problem.normalizer, dtype=torch.float64)
    for part, logits in problem.row_blocks(torch.float32):
        found[part] = problem.normalizer[part] - (logits.softmax(1) * logits).sum(1)
    return found


def _store_exact(problem: Problem) -> None:
    """Store float64 normalizers, and entropies if the configuration needs them, of all rows in ``problem.exact``."""
    exact, wants_entropy = problem.exact, problem.config.entropy
    if "normalizer" in exact and ("entropy" in exact or not wants_entropy):
        return
    found = {"normalizer": torch.empty_like(problem.normalizer, dtype=torch.float64)}
    found |= {"entropy": torch.empty_like(found["normalizer"])} if wants_entropy else {}
    for part, logits in problem.row_blocks(torch.float64):
        normalizer = logits.logsumexp(1)
        found["normalizer"][part] = normalizer
        if wants_entropy:
            found["entropy"][part] = normalizer - (logits.softmax(1) * logits).sum(1)
    exact.update(found)


def _target_logits(problem: Problem) -> Tensor:
    """Return the float64 logits [N] of the targets."""
    ids = problem.tokens.target_ids
    if problem.pristine is not None:
        return problem.pristine.gather(1, ids[:, None]).squeeze(1).double()
    hidden, weight = problem.head()
    return (hidden.double() * weight[ids].double()).sum(1)


def _worst(got: Tensor, truth: Tensor) -> float:
    return float((got.detach().double() - truth).abs().max())


def _relative(got: Tensor, truth: Tensor, what: str) -> float:
    size = float(truth.norm())
    if size == 0:
        raise ValueError(f"the true gradient of {what} is zero: nothing to check; sample more")
    return float((got.detach().double() - truth).norm()) / size
