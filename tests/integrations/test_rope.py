"""Rotary frequencies that follow the longest sequence of a batch: from which length on PolicyLoss refuses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
from policy_batches import VOCAB, network
from torch import Tensor

from dapo_kernels.integrations.rope import fixed_frequencies
from dapo_kernels.integrations.torch import PolicyLoss

SHORT, LONG = 10, 64
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
PHI3 = {"max_position_embeddings": LONG, "original_max_position_embeddings": 16, "pad_token_id": 0}
FULL, SLIDING = "full_attention", "sliding_attention"
BY_LAYER = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0},
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, str] | None]] = {
    "default": ("Llama", {}, None),
    "yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
    "dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, (32, "dynamic")),
    "longrope": ("Phi3", PHI3 | {"rope_scaling": {"rope_type": "longrope", **FACTORS}}, (16, "longrope")),
    "in one kind of layers": ("Gemma3", {"layer_types": [SLIDING, FULL], "rope_parameters": BY_LAYER}, (32, "dynamic")),
}


@torch.no_grad()
def logprobs_of_first(policy: PolicyLoss, longest: int, layout: str) -> Tensor:
    """Of a sequence of 10 tokens beside one of ``longest``."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (SHORT, longest)]
    if layout == "packed":
        ids, borders = torch.cat(rows), torch.tensor([0, SHORT, SHORT + longest], dtype=torch.int32)
        return policy(ids, ids.roll(-1), cu_seqlens=borders, mode="logprobs").logprobs[: SHORT - 1]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return policy(ids, ids.roll(-1, 1), mode="logprobs").logprobs[0, : SHORT - 1]


@pytest.mark.parametrize("name", MODELS)
def test_no_length_changes_the_logprobs_of_another_sequence(name: str) -> None:
    """Up to the limit. One token more is refused, and leaves the model as it was."""
    kind, config, limit = MODELS[name]
    model = network(kind, **{"max_position_embeddings": 32, **config})
    assert fixed_frequencies(model.config) == limit
    policy = PolicyLoss(model)
    longest = LONG if limit is None else limit[0]
    for layout in ("padded", "packed"):
        alone = logprobs_of_first(policy, 1, layout)
        torch.testing.assert_close(logprobs_of_first(policy, longest, layout), alone, atol=1e-5, rtol=0)
        if limit is not None:
            with pytest.raises(ValueError, match=rf"input_ids.*{limit[1]}"):
                logprobs_of_first(policy, longest + 1, layout)
            torch.testing.assert_close(logprobs_of_first(policy, longest, layout), alone, atol=1e-5, rtol=0)


def test_the_shortest_limit_of_all_layers_counts() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    config = SimpleNamespace(rope_parameters={SLIDING: longrope, FULL: BY_LAYER[FULL]}, max_position_embeddings=32)
    config.get_text_config = lambda decoder: config
    assert fixed_frequencies(config) == (16, "longrope")
