"""Rotary frequencies that depend on the length of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple


class FixedFrequencies(NamedTuple):
    """The length in tokens up to which frequencies are the same for every sequence, and its ``rope_type``."""

    longest: int
    rope_type: str


def fixed_frequencies(config: Any) -> FixedFrequencies | None:
    """Return the length up to which a model of transformers uses the same rotary frequencies for every sequence.

    Above it, transformers chooses the frequencies of longrope (Phi-3, Phi-4-mini) and of dynamic NTK scaling by the
    largest position of the batch: one long sequence changes the log-probs of all others in it.

    Args:
        config: the model's ``PreTrainedConfig``, or its text part.

    Returns:
        None if frequencies do not depend on lengths.
    """
    text = config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    limits = []
    for parameters in by_layer_type or [rope]:
        kind = parameters.get("rope_type", "default")
        if kind == "longrope":
            limits.append(FixedFrequencies(parameters["original_max_position_embeddings"], kind))
        elif "dynamic" in kind:  # the test of transformers
            limits.append(FixedFrequencies(text.max_position_embeddings, kind))
    return min(limits, default=None)
