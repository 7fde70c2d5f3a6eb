"""Which models change their rotary frequencies with the length of a batch, and from where on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config

from dapo_kernels.integrations.rope import fixed_frequencies

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS = {
    "default": (LlamaConfig(**SIZES), None),
    "linear": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}), None),
    "yarn": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 4.0}), None),
    "dynamic": (LlamaConfig(**SIZES, rope_scaling={"type": "dynamic", "factor": 4.0}), (32, "dynamic")),
    "longrope": (Phi3Config(**SIZES | LONG, rope_scaling={"rope_type": "longrope", **FACTORS}), (16, "longrope")),
    "one of two kinds of layers": (
        Gemma3TextConfig(
            **SIZES,
            head_dim=8,
            layer_types=[SLIDING, FULL],
            rope_parameters={
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0},
            },
        ),
        (32, "dynamic"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_fixed_up_to_where_it_is_said(name: str) -> None:
    config, limit = CONFIGS[name]
    assert fixed_frequencies(config) == limit
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    short = torch.arange(3, 13)

    def beside(length: int) -> torch.Tensor:
        packed = torch.cat([short, torch.full((length,), 5)])
        positions = torch.cat([torch.arange(10), torch.arange(length)])
        with torch.no_grad():
            out = model.base_model(input_ids=packed[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0, :10]

    alone, longest = beside(1), 32 if limit is None else limit[0]
    torch.testing.assert_close(beside(longest), alone, atol=1e-5, rtol=1e-5)
    moved = float((beside(2 * longest) - alone).abs().max())
    assert moved > 1e-3 if limit else moved < 1e-5
