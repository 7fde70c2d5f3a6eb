"""A user-defined loss per token: ``objective=`` as a function, differentiated by autograd in O(tokens).

    def fn(logprobs, entropy, tokens):      # each [n]; entropy is None unless requested with entropy=True
        ratio = (logprobs - tokens.old_logprobs).exp()
        return -ratio * tokens.advantages   # losses [n], before aggregation

The kernels over the vocabulary only need ∂L/∂ℓ and ∂L/∂H per token. The function gets the tokens of one chunk at a
time, so a token's loss must depend only on that token.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.records import Slopes, Tokens, on_host


class OwnTokens(NamedTuple):
    """The inputs of a user-defined objective, each [n] and without gradient; zero at tokens that do not train.

    Example:
        >>> import torch
        >>> from torch import Tensor
        >>> from dapo_kernels import OwnTokens, policy_loss
        >>> def reinforce(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
        ...     return -logprobs * tokens.advantages
        >>> policy_loss(torch.tensor([-0.5]), None, torch.tensor([2.0]), objective=reinforce).loss.item()
        1.0
    """

    old_logprobs: Tensor  # if the call has none (on-policy), the log-probs, detached
    advantages: Tensor
    ref_logprobs: Tensor | None
    importance_weights: Tensor  # ones if the call has none; multiply the policy term by them

    @classmethod
    def of(cls, tokens: Tokens, logprobs: Tensor) -> OwnTokens:
        counts = tokens.live & (tokens.weights != 0)

        def alive(x: Tensor) -> Tensor:
            return torch.where(counts, x, 0.0)

        return cls(
            alive(logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs),
            alive(tokens.advantages),
            None if tokens.ref_logprobs is None else alive(tokens.ref_logprobs),
            torch.ones_like(logprobs) if tokens.importance_weights is None else alive(tokens.importance_weights),
        )


OwnLoss = Callable[[Tensor, "Tensor | None", OwnTokens], Tensor]


def name_of(function: OwnLoss) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def user_loss(function: OwnLoss, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
    """Return Σ weight·loss, 0-d and differentiable in ``logprobs`` and ``entropy``, [n].

    Raises:
        TypeError, ValueError: the function did not return a loss per token.
    """
    counts = tokens.live & (tokens.weights != 0)
    logprobs = torch.where(counts, logprobs, 0.0)
    entropy = None if entropy is None else torch.where(counts, entropy, 0.0)
    given = OwnTokens.of(tokens, logprobs)
    losses = function(logprobs, entropy, given)
    expected = f"objective {name_of(function)!r} must return a loss per token, a floating-point tensor [n]="
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        got = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"{expected}{list(logprobs.shape)}, got {got}")
    if losses.shape != logprobs.shape:
        raise ValueError(f"{expected}{list(logprobs.shape)}, got {list(losses.shape)}: aggregate= adds them up")
    if torch.is_grad_enabled() and logprobs.requires_grad and not losses.requires_grad:
        raise ValueError(
            f"objective {name_of(function)!r}: its losses do not depend on logprobs (is there a detach()?)"
        )
    _check_function(function, losses, logprobs, entropy, given, counts)
    return torch.where(counts, tokens.weights * torch.where(counts, losses, 0.0), 0.0).sum()


def _check_function(
    function: OwnLoss, losses: Tensor, logprobs: Tensor, entropy: Tensor | None, given: OwnTokens, counts: Tensor
) -> None:
    """Call the function again on every other token in reverse, detached: a mean, a cumulative sum or a neighbour would
    give other losses, and a parameter of the caller's losses that require a gradient.
    """
    some = torch.arange(len(logprobs) - 1, -1, -2, device=logprobs.device)
    part = OwnTokens._make(None if x is None else x[some] for x in given)
    again = function(logprobs[some].detach(), None if entropy is None else entropy[some].detach(), part)
    if again.requires_grad:
        raise ValueError(
            f"objective {name_of(function)!r}: its losses must have a gradient only through logprobs and entropy. "
            "Detach other tensors, such as parameters"
        )
    if torch.compiler.is_compiling():  # what follows would wait for values
        return
    same = torch.isclose(again, losses.detach()[some], rtol=1e-4, atol=1e-6, equal_nan=True) | ~counts[some]
    if not on_host(same):
        torch._assert_async(same.all())
    elif not bool(same.all()):
        raise ValueError(
            f"objective {name_of(function)!r} must treat tokens independently: the loss of a token changed with the "
            "others (or it draws random numbers, or changes its arguments). It gets a chunk of the batch at a time. "
            "Compute what needs the whole batch (a mean, a norm) before: in advantages or importance_weights"
        )


def user_slopes(function: OwnLoss, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> tuple[Tensor, Slopes]:
    """Return the loss of ``user_loss``, detached, with ∂/∂logprobs and ∂/∂entropy."""
    # Inside an operator, torch disables autograd and its tracking of views.
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(keys.AutogradFunctionality).remove(keys.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    # Hooks for saved tensors belong to the caller's graph: a checkpoint would recompute its module for this graph.
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch._C._ForceDispatchKeyGuard(included, excluded), no_hooks, torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (logprobs, entropy) if x is not None]
        loss = user_loss(function, leaves[0], leaves[1] if len(leaves) > 1 else None, tokens)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    dead = ~tokens.live | (tokens.weights == 0)

    def alive(slope: Tensor | None) -> Tensor | None:
        return None if slope is None else slope.masked_fill(dead, 0.0)

    d_logprobs = alive(slopes[0])
    if d_logprobs is None:
        d_logprobs = torch.zeros_like(logprobs)
    return loss.detach(), Slopes(d_logprobs, alive(slopes[1]) if len(slopes) > 1 else None)


# --- as an argument of an operator, which takes numbers ---------------------------------------------------

_by_number: dict[int, OwnLoss] = {}
_numbers = itertools.count(1)


def registered(number: int) -> OwnLoss | None:
    """Return the function of a number; None for 0."""
    return _by_number[number] if number else None


@contextmanager
def as_number(function: OwnLoss | None) -> Iterator[int]:
    """Yield a number that identifies the function inside the context; in a compiled graph, permanently."""
    if function is None:
        yield 0
    elif torch.compiler.is_compiling():
        yield _number_for_good(function)
    else:
        number = next(_numbers)
        _by_number[number] = function
        try:
            yield number
        finally:
            del _by_number[number]


def may_be_compiled_in(function: OwnLoss | None) -> bool:
    """Return whether a compiled graph may contain the function as a constant that an operator calls. A function with a
    closure or defaults is traced instead, so that the graph has guards on those values.
    """
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    return code.co_argcount == 3 and code.co_kwonlyargcount == 0 and not code.co_freevars


def _number_for_good(function: OwnLoss) -> int:
    number = next(_numbers)
    _by_number[number] = function
    return number


# torch.compile makes the result a constant of the graph.
_number_for_good._dynamo_marked_constant = True  # type: ignore[attr-defined]
