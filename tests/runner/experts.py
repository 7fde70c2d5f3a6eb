"""Small mixtures of experts of many kinds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_runner.tiny_model import make_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
}


def small_experts(kind: str = "qwen3_moe", **values: Any) -> Any:
    """A model of this kind with random weights, large enough that they matter."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, vocab_size=len(make_tokenizer()), **SIZES | values)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(40.0 if "gate.weight" in name or "router.weight" in name else 4.0)
    return model
