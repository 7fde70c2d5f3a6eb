"""The check of a contestant's result against float64 eager.

The loss is that of all tokens. Sampled are rows of the gradient of logits or hidden states, and rows of the gradient of
the head (vocabulary entries, targets among them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.formulas import FORMULAS
from benchmarks.problem import Problem, seeded

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

    def errors(self, result: Result) -> dict[str, float]:
        """Return the errors by name, as in ``Tolerance``."""
        if result.logprobs is not None:
            exact = self.problem.exact
            found = {"logprob": _worst(result.logprobs.flatten(), exact.logprobs)}
            if result.entropy is not None:
                found["entropy"] = _worst(result.entropy.flatten(), exact.entropy)
            return found
        assert result.loss is not None
        first, *others = (gradient.reshape(-1, gradient.shape[-1]) for gradient in result.gradients)
        found = {"loss": _worst(result.loss, self.loss), "gradient": _relative(first[self.rows], self.row_gradient)}
        if self.column_gradient is not None and others:
            found["dweight"] = _relative(others[0][self.columns], self.column_gradient)
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


def find_truth(problem: Problem) -> Truth:
    """Compute the loss and sample its gradients."""
    config, tokens, exact = problem.config, problem.tokens, problem.exact
    device, ids = tokens.target_ids.device, tokens.target_ids
    logprobs, entropy = (x.clone().requires_grad_() for x in (exact.logprobs, exact.entropy))
    loss = FORMULAS[config.objective](logprobs, tokens._replace(entropy=entropy))
    slope, bonus = torch.autograd.grad(loss, (logprobs, entropy), materialize_grads=True)

    def dlogits(rows: Tensor, columns: Tensor) -> Tensor:
        """∂ℓ/∂x_j = [j is the target] − p_j; ∂H/∂x_j = −p_j (log p_j + H)."""
        logs = problem.exact_logits(rows, columns) - exact.normalizer[rows, None]
        from_logprobs = slope[rows, None] * ((ids[rows, None] == columns).double() - logs.exp())
        return from_logprobs - bonus[rows, None] * logs.exp() * (logs + exact.entropy[rows, None])

    generator = seeded(device.type, 1)
    rows = torch.randperm(config.n_tokens, generator=generator, device=device)[:_ROWS]
    some = torch.randperm(config.vocab, generator=generator, device=device)[:_COLUMNS]
    row_gradient, columns, column_gradient = dlogits(rows, torch.arange(config.vocab, device=device)), some, None
    if config.level == "hidden":
        hidden, weight = problem.head()
        row_gradient, columns = row_gradient @ weight.double(), torch.cat([some, ids[rows]]).unique()
        column_gradient = dlogits(torch.arange(config.n_tokens, device=device), columns).t() @ hidden.double()
    return Truth(problem, loss.detach(), rows, row_gradient, columns, column_gradient)


def _worst(got: Tensor, truth: Tensor) -> float:
    return float((got.detach().double() - truth).abs().max())


def _relative(got: Tensor, truth: Tensor) -> float:
    return float((got.detach().double() - truth).norm() / truth.norm())
