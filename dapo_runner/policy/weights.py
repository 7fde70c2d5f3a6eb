"""The weights of a model by name, in memory and in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from torch import Tensor

_LAYER = re.compile(r".*?\.\d+(?=\.)")


def stored_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer once. Tied tensors have their first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def layer_of(name: str) -> str:
    """Return the path of a tensor's layer, or the tensor's name if it is in no layer."""
    return layer[0] if (layer := _LAYER.match(name)) else name


def checkpoint_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert ``weights`` from names in memory to those that ``save_pretrained`` writes.

    transformers stores some weights differently in memory: the experts of a layer are one tensor. Only one layer is
    held at a time, so ``weights`` must be in the order of ``stored_tensors``, which keeps those of a layer together.
    ``model`` has the same architecture; it may be on the meta device.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for _, layer in groupby(weights, key=lambda pair: layer_of(pair[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()
