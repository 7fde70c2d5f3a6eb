"""What the training loop asks of a rollout engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_runner.config import ENGINES, Config
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.policy.weights import checkpoint_weights, stored_tensors
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Prompt, SamplingParams

Groups = list[list[Completion]]


class EngineContext(NamedTuple):
    """What an engine is made of: a model in transformers' format, its tokenizer, and where it runs.

    ``note`` is called with a line when a part of the engine fails or is back.
    """

    source: str | Path
    tokenizer: Any
    config: Config
    device: torch.device
    world: World
    note: Callable[[str], None]


class RolloutEngine(ABC):
    """Samples responses, with weights of its own, so that it holds the old policy while the new one trains."""

    @classmethod  # noqa: B027
    def check(cls, config: Config) -> None:
        """Raise ConfigError where this machine lacks what the engine needs. Loads nothing."""

    @classmethod
    @abstractmethod
    def load(cls, context: EngineContext) -> RolloutEngine:
        """Return an engine with the weights of ``context.source``. Raises ConfigError, see ``check``."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Groups:
        """Return ``n`` completions for each prompt, in the prompts' order.

        ``sampling`` is one for all, or one for each prompt: a prefix is continued by a prompt that ends in
        it, with the ``max_tokens`` that are left. The same call over the same weights gives the same tokens.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights, all of them, by name. Raises ValueError when names or shapes do not
        match.
        """

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
        """Return the answers that this rank measures, each with the name of who gave them.

        The list is as long on each rank, with (None, []) where there is nothing to measure. By default each engine is
        asked the same, and its own ranks measure its answers. Collective.
        """
        answers = world.run_and_gather(lambda: self.generate(prompts, sampling))
        name = "" if world.is_single_process else f" on rank {world.rank}"
        return [(name, answers[world.data_rank * world.layout.sequence])]


def engine_class(config: Config) -> type[RolloutEngine]:
    """Return the class that `rollout.engine` names."""
    found: type[RolloutEngine] = resolve_name(ENGINES[config.rollout.engine])
    return found


def open_engine(
    config: Config,
    source: str | Path,
    device: torch.device,
    world: World = SINGLE_PROCESS,
    note: Callable[[str], None] = lambda _: None,
) -> RolloutEngine:
    """Return the engine of `rollout.engine`, see ``RolloutEngine.load``."""
    tokenizer = load_tokenizer(source, config.model)
    return engine_class(config).load(EngineContext(source, tokenizer, config, device, world, note))


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
