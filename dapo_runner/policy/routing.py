"""Routing replay for mixtures of experts (Zheng et al. 2025, GSPO, arXiv 2507.18071, §5.3).

In an update a token goes to the same experts as when its old log-prob was computed; otherwise the ratio would compare
two networks. Only the choice is replayed: the weights of the experts come from the current router.

In transformers a layer with experts is a module with a child ``experts``. It chooses with top-k over scores [U, E]. All
its top-k calls are replayed, also those over groups of experts.

Legend: U computed positions, E experts of a layer, K choices of a position over all layers (experts and groups).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dapo_runner.config import ConfigError

# Names of their number, and of the number that a token uses, in configurations.
N_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
N_USED = ("num_experts_per_tok", "top_k_experts", "moe_k")
_TOP_K = (torch.topk, torch.Tensor.topk)


class Routing:
    """Record and replay the choices of a model's layers with experts."""

    def __init__(self, model: nn.Module) -> None:
        """Raise ConfigError for a model without such layers."""
        blocks = [module for module in model.modules() if "experts" in dict(module.named_children())]
        if not blocks:
            raise ConfigError(f"loss.routing_replay: expected a mixture of experts, got {type(model).__name__}")
        self.layers = [_Layer(block) for block in blocks]

    def follow(self, experts: Tensor | None) -> None:
        """Set the choice of the next pass and its recomputation: [U, K] from ``chosen``, or None for the router's."""
        for layer in self.layers:
            layer.replayed = []
        if experts is not None:
            widths = [width for layer in self.layers for width in layer.widths]
            if experts.shape[-1] != sum(widths):
                wanted = f"expected {sum(widths)} experts of each token from the engine, got {experts.shape[-1]}"
                raise ConfigError(f"loss.routing_replay: {wanted}. Set it to trainer.")
            parts = iter(experts.split(widths, dim=-1))
            for layer in self.layers:
                layer.replayed = [next(parts) for _ in layer.widths]

    def chosen(self) -> Tensor:
        """Return the choice of the last pass: [U, K] on the CPU, uint8 for up to 256 experts, else int16."""
        return torch.cat([choice for layer in self.layers for choice in layer.choices], dim=-1).cpu()

    def check(self, run: Callable[[], Tensor], n_positions: int) -> None:
        """Run two passes. Raise ConfigError if a layer's choices cannot be recorded or replaying has no effect."""
        self.follow(None)
        for layer in self.layers:
            layer.n_calls = 0
        before = run()
        for layer in self.layers:
            layer.widths = [choice.shape[-1] for choice in layer.choices]
            if layer.n_calls != 1 or not layer.choices or any(len(choice) != n_positions for choice in layer.choices):
                name = type(layer.block).__name__
                raise ConfigError(f"loss.routing_replay: requires one top-k over experts, got {name}. Set it to null.")
            others = zip(layer.choices, layer.n_experts, strict=True)
            layer.replayed = [(choice.long() + 1) % n_experts for choice, n_experts in others]
        if torch.equal(run(), before):
            raise ConfigError("loss.routing_replay: has no effect with this router. Set it to null.")
        self.follow(None)


class _Layer(TorchFunctionMode):
    """Replace top-k while a layer with experts runs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.choices: list[Tensor] = []  # the indices [U, k] of each top-k of the last pass
        self.replayed: list[Tensor] = []  # the indices for the next pass; empty for the router's choice
        self.widths: list[int] = []  # k of each top-k
        self.n_experts: list[int] = []  # E of each top-k
        self.n_calls = 0
        self._forward = block.forward
        block.forward = self._run  # not hooks: after an interrupt the second of a pair would not run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.choices, self.n_experts = [], []
        self.n_calls += 1
        with self:
            return self._forward(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K or not _over_scores(*args, **kwargs):
            return func(*args, **kwargs)
        scores: Tensor = args[0] if args else kwargs["input"]
        if self.replayed:
            indices = self.replayed[len(self.choices)].long()
            found = torch.return_types.topk((scores.gather(-1, indices), indices))
        else:
            found = func(*args, **kwargs)
        n_experts = scores.shape[-1]
        self.choices.append(found.indices.to(torch.uint8 if n_experts <= 256 else torch.int16))
        self.n_experts.append(n_experts)
        return found


def _over_scores(input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> bool:
    """Return whether a top-k is over the last dimension of [positions, scores]."""
    return input.dim() == 2 and dim in (-1, 1)
