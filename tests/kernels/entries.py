"""One case through any entry point and either layout, results in the packed layout.

The padded form of a case holds NaN (and target -100) wherever its mask is off beyond the sequences' ends.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from cases import Case, logits_of, pad, unpad
from torch import Tensor

from dapo_kernels import Objective, dapo_loss, linear_dapo_loss, policy_loss

LOGITS_ENTRIES = ("logits", "inplace", "policy")
FILLS = {"mask": 0, "target_ids": -100, "selection": 1}


class Laid:
    """Flat tensors ``[T, ...]`` in the layout of a call, and back."""

    def __init__(self, case: Case, layout: str) -> None:
        self.lengths, self.padded, self.width = case.lengths, layout == "padded", max(case.lengths) + 2

    def out(self, flat: Tensor, name: str = "") -> Tensor:
        if not self.padded:
            return flat
        return pad(flat, self.lengths, self.width, FILLS.get(name, math.nan))

    def back(self, tensor: Tensor) -> Tensor:
        return unpad(tensor, self.lengths) if self.padded else tensor


def token_values(case: Case) -> tuple[Tensor, Tensor]:
    """Float32 log-probs and entropies of a case's rows, computed in float64; what a caller of policy_loss holds."""
    with torch.no_grad():
        logits = logits_of({name: leaf.double() for name, leaf in case.leaves.items()}, case.softcap)
        logp = torch.log_softmax(logits / torch.as_tensor(case.temperature, dtype=torch.float64).reshape(-1, 1), -1)
        picked = logp.gather(1, case.target_ids[:, None])[:, 0]
        return picked.float(), -(logp.exp() * logp).sum(-1).float()


def call(
    entry: str,
    case: Case,
    objective: str | Objective,
    *,
    layout: str = "packed",
    grad_output: float = 1.0,
    on_policy: bool = False,
    weighted: bool = False,
    advantages: Tensor | None = None,
    with_entropy: bool = False,
    **kwargs: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """``(out, gradients by leaf)``; per-token results and gradients come back packed.

    ``selection`` and ``ref_logprobs`` are passed as flat tensors (a selection also as a threshold). The leaves of
    "policy" are ``logprobs`` and, with ``with_entropy``, ``entropy``.
    """
    laid = Laid(case, layout)
    per_token: dict[str, Any] = {
        "mask": case.mask,
        **({"importance_weights": case.importance_weights} if weighted else {}),
        **{name: kwargs.pop(name) for name in ("ref_logprobs", "selection") if kwargs.get(name) is not None},
    }
    per_token = {
        name: laid.out(value, name) if isinstance(value, Tensor) and value.dim() else value
        for name, value in per_token.items()
    }
    a = case.advantages if advantages is None else advantages
    a = laid.out(a) if a.shape == case.advantages.shape else a
    old = None if on_policy else laid.out(case.old_logprobs)
    shared = {"objective": objective, **per_token, **({} if laid.padded else {"cu_seqlens": case.cu_seqlens}), **kwargs}
    leaves, out = _call_entry(entry, case, laid, old, a, shared, with_entropy)
    if out.loss.requires_grad:
        (out.loss * grad_output).backward()
    grads = {}
    for name, leaf in leaves.items():
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grads[name] = grad if name in ("weight", "bias") else laid.back(grad)
    entropy = None if out.entropy is None else laid.back(out.entropy)
    return out._replace(logprobs=laid.back(out.logprobs), entropy=entropy), grads


def _call_entry(
    entry: str, case: Case, laid: Laid, old: Tensor | None, a: Tensor, shared: dict[str, Any], with_entropy: bool
) -> tuple[dict[str, Tensor], Any]:
    if entry == "policy":
        logprobs, entropy = (laid.out(x).requires_grad_() for x in token_values(case))
        leaves = {"logprobs": logprobs, **({"entropy": entropy} if with_entropy else {})}
        return leaves, policy_loss(logprobs, old, a, entropy=leaves.get("entropy"), **shared)
    tau = case.temperature
    shared["temperature"] = laid.out(tau) if isinstance(tau, Tensor) and tau.dim() else tau
    ids = laid.out(case.target_ids, "target_ids")
    leaves = {k: v if k in ("weight", "bias") else laid.out(v.detach()) for k, v in case.leaves.items()}
    leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
    if entry == "linear":
        head = {"bias": leaves.get("bias"), "softcap": case.softcap}
        return leaves, linear_dapo_loss(leaves["hidden"], leaves["weight"], ids, old, a, **head, **shared)
    assert entry in ("logits", "inplace")
    logits = leaves["logits"]
    # The in-place form consumes its argument, which may not be a leaf that autograd accumulates into twice.
    return leaves, dapo_loss(logits, ids, old, a, inplace_backward=entry == "inplace", **shared)
