"""The weights of a model by name: in memory, and as a checkpoint has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from torch import Tensor

_LAYER = re.compile(r".*?\.\d+(?=\.)")


def stored_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer once: tied ones under their first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def layer_of(name: str) -> str:
    """Return the path of the layer that a tensor belongs to, or its own name outside of the layers."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name


def checkpoint_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights``, which have the names of ``model``, as ``save_pretrained`` would write them.

    transformers keeps some weights otherwise in memory: the experts of a layer are one tensor. One layer at a time is
    held.

    Args:
        model: of the same architecture; it may lie on the meta device.
        weights: the tensors of a layer one after the other, as ``stored_tensors`` yields them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for _, layer in groupby(weights, key=lambda pair: layer_of(pair[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()
