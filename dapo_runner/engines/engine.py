"""The interface of rollout engines, and their shared code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import Policy
from dapo_runner.policy.weights import checkpoint_weights, stored_tensors
from dapo_runner.types import Completion, GenerateFunction, RolloutRequest

Groups = list[list[Completion]]
Note = Callable[[str], None]


class OpenCall(ABC):
    """A call of ``generate`` that accepts prompts, with one response each, while earlier ones are sampled."""

    def __init__(self) -> None:
        self._open: dict[int, RolloutRequest] = {}

    def add(self, key: int, request: RolloutRequest) -> None:
        """Add a prompt. Its response has the same ``key``, which must differ from those of other open prompts."""
        self._open[key] = request

    @abstractmethod
    def is_ready(self, is_complete: bool) -> bool:
        """Return whether ``work`` can make progress. ``is_complete``: no prompt is added before ``work`` is called."""

    @abstractmethod
    def work(self) -> list[tuple[int, Completion]]:
        """Sample for a while in this thread. Return keys and responses that are complete."""

    def close(self) -> None:  # noqa: B027
        """Drop the prompts without a response."""


class BatchCall(OpenCall):
    """Sample prompts that were added together as one batch, independent of timing. All wait for the longest one."""

    def __init__(self, generate: GenerateFunction) -> None:
        super().__init__()
        self.generate = generate

    def is_ready(self, is_complete: bool) -> bool:
        return bool(self._open) and is_complete

    def work(self) -> list[tuple[int, Completion]]:
        added, self._open = sorted(self._open.items()), {}
        answers = self.generate([request for _, request in added])
        return [(key, completion) for (key, _), (completion,) in zip(added, answers, strict=True)]


class RolloutEngine(ABC):
    """Sample responses. An engine has its own weights: it keeps the old policy while the new one trains."""

    stop_ids: list[int]  # tokens that end a response

    @classmethod  # noqa: B027
    def check(cls, config: Config) -> None:
        """Raise ConfigError if this machine lacks something that the engine needs. Loads nothing."""

    @classmethod
    @abstractmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> RolloutEngine:
        """Return an engine with the weights of ``source``, a model in transformers' format. Raises ConfigError.

        ``note`` is called with a line of text when a part of the engine fails or recovers.
        """

    @abstractmethod
    def generate(self, requests: Sequence[RolloutRequest], priority: int | None = None) -> Groups:
        """Return ``n`` completions for each request, in the order of the requests.

        Their sampling may differ in ``n``, ``stop``, ``max_tokens`` and ``seed``. To continue a prefix, pass a prompt
        that ends in it and the remaining ``max_tokens``. The same call with the same weights returns the same tokens.

        Of several calls in flight, the smallest ``priority`` goes first; None goes before all numbers. An engine that
        runs one call at a time may ignore it.
        """

    def open_call(self, priority: int | None, wake: Callable[[], None], n_prompts: int) -> OpenCall:
        """Begin a call with at most ``n_prompts`` open at the same time. ``wake`` is called, from any thread, when
        ``OpenCall.is_ready`` may have become True for another reason than ``add``.
        """
        return BatchCall(self.generate)

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights with the policy's, by name. Raises ValueError if names or shapes do not match."""

    @classmethod
    def takes_adapters(cls, config: Config) -> bool:
        """Return whether the engine is loaded with the base weights and ``sync`` sends only the adapters."""
        return False

    def sync(self, policy: Policy) -> None:
        """Take over the weights of a policy. Collective."""
        self.update_weights(policy.named_weights())

    def release(self) -> None:  # noqa: B027
        """Free as much memory as possible until new weights come, so that the policy can train."""

    def close(self) -> None:  # noqa: B027
        """End the work in other threads."""

    @property
    def is_unprobed(self) -> bool:
        """Whether a part of the engine has recovered and has not been probed since."""
        return False

    def answers_to_probe(self, requests: Sequence[RolloutRequest], world: World) -> list[tuple[str | None, Groups]]:
        """Return the responses that this rank compares, each with the name of their source. Collective.

        The list has the same length on every rank, padded with (None, []). By default each engine gets the same
        requests, and ranks that share positions compare the responses of all their engines.
        """
        answers, layout = world.run_and_gather(lambda: self.generate(requests)), world.layout
        first = world.data_rank * layout.sequence
        leaders = range(first, first + layout.sequence, min(layout.sequence, layout.rollout_tensor))
        return [("" if world.is_single_process else f" on rank {rank}", answers[rank]) for rank in leaders]


def engine_class(config: Config) -> type[RolloutEngine]:
    return resolve_name(config.rollout.engine_spec.implementation)


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into ``model`` in place, in the dtype of its tensors. Raises ValueError if they do not match."""
    targets = dict(stored_tensors(model))
    for name, tensor in _checked(targets, weights):
        targets[name].copy_(tensor)


def loadable_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a policy's weights with the names of a checkpoint, as vLLM loads them. Raises ValueError on a mismatch.

    ``model``: the engine's model in transformers, on the meta device.
    """
    return checkpoint_weights(model, _checked(dict(stored_tensors(model)), weights))


def _checked(expected: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    missing = set(expected)
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(f"update_weights: the engine's model has no parameter {name!r}")
        if tensor.shape != expected[name].shape:
            wanted, got = list(expected[name].shape), list(tensor.shape)
            raise ValueError(f"update_weights: {name} must be {wanted} like the engine's, got {got}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"update_weights: expected every parameter, did not get {', '.join(sorted(missing))}")


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: ``eos_token_id`` of the generation config and of the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    named = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    ids = sorted({token for token in named if token is not None})
    size = model.config.get_text_config(decoder=True).vocab_size
    if not ids or ids[-1] >= size:
        raise ConfigError(f"model.path: expected end tokens (eos_token_id) below {size}, the vocab_size, got {ids}")
    return ids
