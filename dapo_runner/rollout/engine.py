"""Rollout engines: what the training loop asks of one, and what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import Config
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.weights import checkpoint_weights, stored_tensors
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Prompt, SamplingParams

Groups = list[list[Completion]]
Note = Callable[[str], None]


class RolloutEngine(ABC):
    """Samples responses, with weights of its own, so that it holds the old policy while the new one trains."""

    @classmethod  # noqa: B027
    def check(cls, config: Config) -> None:
        """Raise ConfigError where this machine lacks what the engine needs. Loads nothing."""

    @classmethod
    @abstractmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> RolloutEngine:
        """Return an engine with the weights of ``source``, a model in transformers' format. Raises ConfigError.

        ``note`` is called with a line when a part of the engine fails or is back.
        """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Groups:
        """Return ``n`` completions for each prompt, in the prompts' order.

        ``sampling`` is one for all, or one for each prompt: a prefix is continued by a prompt that ends in
        it, with the ``max_tokens`` that are left. They may differ in ``n``, ``stop``, ``max_tokens``, ``seed`` and
        ``index``. The same call over the same weights gives the same tokens.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over all weights of the policy, by name. Raises ValueError where names or shapes do not match."""

    def release(self) -> None:  # noqa: B027
        """Free what memory can be freed until ``update_weights``: the policy is about to train."""

    def close(self) -> None:  # noqa: B027
        """End what is under way in other threads."""

    @property
    def is_unprobed(self) -> bool:
        """Whether a part of the engine is back that has not been probed since."""
        return False

    def answers_to_probe(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, world: World
    ) -> list[tuple[str | None, Groups]]:
        """Return the answers that this rank measures, each with the name of who gave them. Collective.

        The list is as long on each rank, with (None, []) where there is nothing to measure. By default each engine is
        asked the same, and its own ranks measure its answers.
        """
        answers = world.run_and_gather(lambda: self.generate(prompts, sampling))
        name = "" if world.is_single_process else f" on rank {world.rank}"
        return [(name, answers[world.data_rank * world.layout.sequence])]


def engine_class(config: Config) -> type[RolloutEngine]:
    """Return the class that `rollout.engine` names."""
    found: type[RolloutEngine] = resolve_name(config.rollout.engine_spec.implementation)
    return found


def open_engine(
    config: Config,
    source: str | Path,
    device: torch.device,
    world: World = SINGLE_PROCESS,
    note: Note = lambda _: None,
) -> RolloutEngine:
    """Return the engine of `rollout.engine`, see ``RolloutEngine.load``."""
    return engine_class(config).load(source, config, device, world, note)


def sampling_of_each(
    prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    return [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy into ``model`` in place, casting to the dtype of its tensors. Raises ValueError on any mismatch."""
    own = dict(stored_tensors(model))
    for name, tensor in _checked(own, weights):
        own[name].copy_(tensor)


def loadable_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a policy's weights under the names of a checkpoint, which vLLM loads. Raises ValueError on any mismatch.

    ``model``: the engine's as transformers makes it, on the meta device.
    """
    return checkpoint_weights(model, _checked(dict(stored_tensors(model)), weights))


def _checked(expected: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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
    """Return the tokens that end a response: ``eos_token_id`` of the generation config, and the tokenizer's own."""
    named = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    ids = {token for token in named if token is not None}
    if not ids:
        raise ValueError("rollout: expected eos_token_id in the generation config or the tokenizer, got none")
    return sorted(ids)
