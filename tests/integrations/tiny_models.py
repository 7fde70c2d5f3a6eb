"""Every causal language model of transformers, small enough to run on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 61

# What configurations call their sizes, and what those are here. Windows and chunks are shorter than a sequence.
_SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size",
    32: "hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim out_hidden_size hidden_size_global "
    "backbone_hidden_size output_channels mm_embed_dim output_proj_dims image_size crop_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff d_inner ffn_hidden_size dim_ff mlp_dim "
    "feed_forward_size",
    24: "expert_ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers eos_token_id "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads index_n_heads "
    "num_decoder_attention_heads num_key_value_heads linear_num_heads linear_num_key_heads linear_num_value_heads "
    "n_mamba_heads num_experts_per_tok moe_topk",
    16: "head_dim attention_head_size dim_head q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim index_topk "
    "index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim "
    "mm_posemb_size position_embedding_size",
    8: "rotary_dim qk_rope_head_dim mamba_d_state ssm_state_size state_size hidden_size_per_layer_input",
    4: "mamba_n_heads mamba_num_heads num_local_experts num_experts n_routed_experts sliding_window window_size "
    "attention_chunk_size chunk_size mamba_chunk_size",
    1: "depth num_blocks n_group topk_group zero_expert_num bos_token_id is_decoder",
    0: "num_kv_shared_layers pad_token_id",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
}
_VALUES = {name: size for size, names in _SIZES.items() for name in names.split()} | {"is_decoder": True}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_LAYERS = ["full_attention", "sliding_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB},
    "codegen": {"n_head": 4, "n_embd": 64},
    "cohere_compass_text": {"layer_types": _LAYERS, "rope_parameters": dict.fromkeys(_LAYERS, _ROPE)},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gemma3n_text": {"layer_types": _LAYERS},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hyperclovax": {"logits_scaling": 0.25},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron_h": {"n_groups": 1},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "num_key_value_heads": 1},
}

# Model types that cannot be built here, and why.
NOT_BUILT = {
    "dbrx": "transformers 5.19 reads attn_config.rope_theta, which its own configuration lacks",
    "gemma3n": "its vision tower needs timm; gemma3n_text is the language model",
    "gemma4_assistant": "drafts tokens from another model's keys and values",
    "gemma4_unified_assistant": "drafts tokens from another model's keys and values",
    "musicgen": "predicts audio codes, several per position",
    "musicgen_melody": "predicts audio codes, several per position",
}


def tiny_config(kind: type[Any], **own: Any) -> Any:
    known = {name: size for name, size in _VALUES.items() if name in kind.__dataclass_fields__}
    for name, part in kind.sub_configs.items():
        if isinstance(own.get(name), dict):
            known[name] = tiny_config(CONFIG_MAPPING[own.pop(name)["model_type"]])
        elif hasattr(part, "__dataclass_fields__"):
            known[name] = tiny_config(part)
    return kind(**known | own)


def tiny_model(model_type: str) -> Any:
    """Return the model with random weights, in eval mode, far enough from uniform that attention matters."""
    config = tiny_config(CONFIG_MAPPING[model_type], **_OWN.get(model_type, {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model
