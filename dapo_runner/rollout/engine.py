"""What the loop asks of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dapo_runner.types import Completion, Prompt, SamplingParams


class RolloutEngine(Protocol):
    """Holds weights of its own, so that it can sample from the old policy while the new one trains."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """``n`` completions for each prompt, in the prompts' order.

        ``sampling`` is one for all, or one for each prompt: a prefix is continued by a prompt that ends in
        it, with the ``max_tokens`` that are left. The same call over the same weights gives the same tokens.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights, all of them, by name. Raises ValueError when names or shapes do not
        match.
        """
        ...


def sampling_of_each(
    prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises ValueError when there are not as many as prompts."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise ValueError(
            f"generate: expected one SamplingParams, or one for each of {len(prompts)} prompts, got {len(sampling)}"
        )
    return list(sampling)


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy into the parameters of ``model`` in place, casting to their dtype. Raises ValueError on any
    mismatch.
    """
    mine = dict(model.named_parameters())
    missing = set(mine)
    for name, tensor in weights:
        if name not in mine:
            raise ValueError(f"update_weights: the engine's model has no parameter {name!r}")
        if mine[name].shape != tensor.shape:
            raise ValueError(
                f"update_weights: {name} must be {list(mine[name].shape)} like the engine's, got {list(tensor.shape)}"
            )
        mine[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"update_weights: expected every parameter, {', '.join(sorted(missing))} did not come")
