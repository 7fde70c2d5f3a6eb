"""One case through any entry point and either layout, results in the packed layout.

The padded form of a case holds NaN (and target -100) wherever its mask is off beyond the sequences' ends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from cases import HEAD, LORA_SCALE, Case, logits_of, pad, unpad
from torch import Tensor

from dapo_kernels import LoraFactors, dapo_loss, linear_dapo_loss, policy_loss

LOGITS_ENTRIES = ("logits", "inplace", "policy")
PER_TOKEN = ("logprobs", "entropy")
OF_SEQUENCES = ("group_ids", "group_tokens")
FILLS = {"mask": 0, "target_ids": -100, "selection": 1}


def spread(x: Tensor) -> Tensor:
    """The same values, every second element in memory; NaN (or 1) between."""
    wide = torch.full((*x.shape, 2), math.nan if x.is_floating_point() else 1).to(x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


STRIDES = {
    "dense": lambda x: x,
    "spread": spread,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "negated": lambda x: torch._neg_view(-x) if x.is_floating_point() else x,  # as the imaginary part of x.conj()
}


class Laid:
    """Flat tensors ``[T, ...]`` in the layout of a call, and back."""

    def __init__(self, case: Case, layout: str, strides: str = "dense") -> None:
        self.lengths, self.padded, self.width = case.lengths, layout == "padded", max(case.lengths) + 2
        self.stride = STRIDES[strides]

    def out(self, flat: Tensor, name: str = "") -> Tensor:
        if name not in HEAD and self.padded:
            flat = pad(flat, self.lengths, self.width, FILLS.get(name, math.nan))
        return self.stride(flat)

    def back(self, tensor: Tensor, name: str = "") -> Tensor:
        return unpad(tensor, self.lengths) if self.padded and name not in HEAD else tensor

    def leaves(self, case: Case) -> dict[str, Tensor]:
        """Copies of the case's leaves that require a gradient."""
        return {name: self.out(x.detach().clone(), name).requires_grad_() for name, x in case.leaves.items()}


def lora_of(leaves: dict[str, Tensor]) -> LoraFactors | None:
    return LoraFactors(leaves["lora_a"], leaves["lora_b"], LORA_SCALE) if "lora_a" in leaves else None


def token_values(case: Case) -> tuple[Tensor, Tensor]:
    """Float32 log-probs and entropies of a case's rows, computed in float64; what a caller of policy_loss holds."""
    with torch.no_grad():
        logits = logits_of({name: leaf.double() for name, leaf in case.leaves.items()}, case.softcap)
        logp = torch.log_softmax(logits / torch.as_tensor(case.temperature, dtype=torch.float64).reshape(-1, 1), -1)
        picked = logp.gather(1, case.target_ids[:, None].clamp(min=0))[:, 0]
        return picked.float(), -(logp.exp() * logp).sum(-1).float()


def poisoned(case: Case, *values: float) -> Case:
    """The case with the values, in turn, in every input wherever the mask is off."""
    dead, filling = ~case.mask, torch.tensor(values).repeat(len(case.mask))[: len(case.mask)]

    def fill(x: Tensor) -> Tensor:
        return torch.where(dead.view(-1, *[1] * (x.dim() - 1)), filling.to(x.dtype).view(-1, *[1] * (x.dim() - 1)), x)

    names = ("old_logprobs", "advantages", "ref_logprobs", "importance_weights")
    leaves = {name: x if name in HEAD else fill(x) for name, x in case.leaves.items()}
    tau = case.temperature
    return replace(
        case,
        **{name: fill(getattr(case, name)) for name in names},
        target_ids=case.target_ids.masked_fill(dead, -100),
        temperature=fill(tau) if isinstance(tau, Tensor) and tau.dim() else tau,
        leaves=leaves,
    )


def call(
    entry: str,
    case: Case,
    objective: Any,
    *,
    layout: str = "packed",
    strides: str = "dense",
    grad_output: float = 1.0,
    on_policy: bool = False,
    weighted: bool = False,
    with_entropy: bool = False,
    **kwargs: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """``(out, gradients by leaf)``; per-token results and gradients come back packed.

    Keywords are of the loss, tensors [T] of them flat. The leaves of "policy" are ``logprobs`` and, with
    ``with_entropy``, ``entropy``: the case's own, or those of its logits.
    """
    laid = Laid(case, layout, strides)
    given = {"advantages": case.advantages, "mask": case.mask, "objective": objective}
    given["old_logprobs"] = None if on_policy else case.old_logprobs
    if weighted:
        given["importance_weights"] = case.importance_weights
    if entry == "policy":
        values = case.leaves if "logprobs" in case.leaves else dict(zip(PER_TOKEN, token_values(case), strict=True))
        leaves = laid.leaves(replace(case, leaves={name: values[name] for name in PER_TOKEN[: 1 + with_entropy]}))
        function: Any = policy_loss
    else:
        given |= {"target_ids": case.target_ids, "temperature": case.temperature}
        leaves = laid.leaves(case)
        function = linear_dapo_loss if entry == "linear" else dapo_loss
    per_token = case.advantages.shape
    given = {
        name: laid.out(x, name) if isinstance(x, Tensor) and x.shape == per_token and name not in OF_SEQUENCES else x
        for name, x in {**given, **kwargs}.items()
    }
    if not laid.padded:
        given["cu_seqlens"] = case.cu_seqlens
    if entry == "linear":
        given |= {"softcap": case.softcap, "lora": lora_of(leaves)}
    elif entry == "inplace":
        given["inplace_backward"] = True
    out = function(**{name: x for name, x in leaves.items() if not name.startswith("lora")}, **given)
    if out.loss.requires_grad:
        (out.loss * grad_output).backward()
    grads = {
        name: laid.back(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, name)
        for name, leaf in leaves.items()
    }
    entropy = None if out.entropy is None else laid.back(out.entropy)
    return out._replace(logprobs=laid.back(out.logprobs), entropy=entropy), grads
