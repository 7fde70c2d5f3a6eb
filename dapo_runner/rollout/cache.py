"""A key-value cache that grows by blocks.

transformers' own dynamic layer concatenates at every token: each step copies all that went before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

BLOCK = 64


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """``keys`` and ``values`` [B, heads, length, D] are views of buffers with room for more."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < new:
            self._grow(key_states, value_states, old, new)
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, old:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None  # the selected rows are copies; the next update gives them room again

    def _grow(self, key_states: Tensor, value_states: Tensor, old: int, new: int) -> None:
        room = -(-(new + new // 2) // BLOCK) * BLOCK
        buffers = []
        for states, held in ((key_states, self.keys), (value_states, self.values)):
            buffer = states.new_empty(*states.shape[:-2], room, states.shape[-1])
            if old:
                buffer[:, :, :old] = held
            buffers.append(buffer)
        self._buffers = (buffers[0], buffers[1])


def growing_cache(config: Any) -> DynamicCache:
    """A cache for a model of this configuration. Layers with a window, or without attention, keep their own
    kind.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
