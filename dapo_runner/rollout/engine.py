"""What the loop asks of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo_runner.policy.weights import checkpoint_weights, stored_tensors
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Prompt, SamplingParams


class RolloutEngine(Protocol):
    """Holds weights of its own, so that it can sample from the old policy while the new one trains."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
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

    def release(self) -> None:
        """Give up what memory can be given up until ``update_weights``: the policy is about to train."""
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


def check_lengths(prompts: Sequence[Prompt], each: Sequence[SamplingParams], longest: int) -> None:
    """Raises ValueError for a prompt that leaves less room in ``longest`` tokens than its ``max_tokens``."""
    for prompt, item in zip(prompts, each, strict=True):
        if len(prompt.token_ids) + item.max_tokens > longest:
            raise ValueError(
                f"generate: expected prompt and response within {longest} tokens, got {len(prompt.token_ids)} + "
                f"{item.max_tokens}; raise rollout.max_prompt_tokens"
            )


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy into ``model`` in place, casting to the dtype of its tensors. Raises ValueError on any mismatch."""
    mine = dict(stored_tensors(model))
    for name, tensor in _checked(mine, weights):
        mine[name].copy_(tensor)


def loadable_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a policy's weights under the names that vLLM loads: those of a checkpoint.

    ``model``: the engine's as transformers makes it, on the meta device. Raises ValueError on any mismatch.
    """
    return checkpoint_weights(model, _checked(dict(stored_tensors(model)), weights))


def _checked(expected: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the same weights. Raises ValueError at the first that is not of ``expected``, when the ones before it have
    been handed on already, and at the end where one has not come.
    """
    missing = set(expected)
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(f"update_weights: the engine's model has no parameter {name!r}")
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"update_weights: {name} must be {list(expected[name].shape)} like the engine's, got "
                f"{list(tensor.shape)}"
            )
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"update_weights: expected every parameter, {', '.join(sorted(missing))} did not come")


def stop_token_ids(configured: int | list[int] | None, tokenizer: Any) -> list[int]:
    """The tokens that end a response: ``eos_token_id`` of the generation config, and the tokenizer's own.

    Raises ValueError when neither names one.
    """
    named = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    ids = {token for token in named if token is not None}
    if not ids:
        raise ValueError(
            "rollout: expected an end-of-sequence token in the generation config or the tokenizer, found none"
        )
    return sorted(ids)
