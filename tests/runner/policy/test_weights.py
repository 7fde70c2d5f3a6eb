"""The names under which weights go to vLLM are those of a saved checkpoint, for every mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_model
from experts import small_experts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dapo_runner.config import ModelConfig
from dapo_runner.engines.engine import loadable_weights
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.policy.weights import layer_of
from dapo_runner.tiny_model import make_tokenizer

SPARSE = {"first_k_dense_replace": 0}
HEADS = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT = SPARSE | HEADS | {"kv_lora_rank": 16, "q_lora_rank": 24}
INDEXED = LATENT | {"index_n_heads": 2, "index_head_dim": 16}
# The mixtures of transformers 5.19 that vLLM 0.32 serves by a class of its own, with what they need beside small sizes.
PLAIN = (
    "cohere2_moe deepseek_v4 exaone_moe gpt_oss granitemoe granitemoe_swa granitemoeshared hy_v3 inkling_text laguna "
    "llama4_text mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next "
    "qwen4_exp_text"
)
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in PLAIN.split()},
    **{kind: LATENT for kind in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")},
    "afmoe": {"num_dense_layers": 1},
    "deepseek_v32": INDEXED,
    "ernie4_5_moe": {"moe_num_experts": 8},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 32},
    "glm4_moe": SPARSE,
    "glm_moe_dsa": INDEXED | {"mlp_layer_types": ["sparse", "sparse"]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "hy_v4": {"index_n_heads": 2, "index_head_dim": 16},
    "jamba": {"expert_layer_offset": 0, "expert_layer_period": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "longcat_flash": {"zero_expert_num": 2, "moe_topk": 2},
    "nemotron_h": {"layers_block_type": ["moe", "attention"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_is_sent_what_a_checkpoint_holds(kind: str, tmp_path: Path) -> None:
    model = small_experts(kind, **KINDS[kind])
    assert any("expert" in name or "moe" in name for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    with torch.device("meta"):
        received = AutoModelForCausalLM.from_config(model.config)
    sent = dict(loadable_weights(received, Policy(model, make_tokenizer(), "sdpa").named_weights()))
    assert {name: tuple(x.shape) for name, x in sent.items()} == {name: tuple(x.shape) for name, x in saved.items()}
    for name, tensor in saved.items():
        assert torch.equal(sent[name].to(tensor.dtype), tensor), name


def test_what_a_model_computes_in_float32_is_sent_in_float32(tmp_path: Path) -> None:
    """In bfloat16, experts whose corrections differ little would be equal."""
    config = small_experts("ernie4_5_moe", moe_num_experts=8).config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_model(model, make_tokenizer(), tmp_path)
    policy = load_policy(tmp_path, ModelConfig(path=str(tmp_path), dtype="bfloat16"), torch.device("cpu"))
    weights = dict(policy.model.named_parameters())
    precise = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert any(name.endswith("gate.weight") for name in precise)
    assert len(precise) < len(weights)
    with torch.no_grad():
        for name in precise:
            weights[name].add_(torch.linspace(1.0, 1.001, weights[name].numel()).view_as(weights[name]))
    for name, sent in policy.named_weights():
        assert sent.dtype == weights[name].dtype, name
        assert torch.equal(sent, weights[name]), name


def test_the_layer_of_a_tensor_is_the_outermost() -> None:
    assert layer_of("model.layers.3.mlp.experts.7.w1.weight") == "model.layers.3"
    assert layer_of("model.norm.weight") == "model.norm.weight"
