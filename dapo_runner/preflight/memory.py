"""The memory of one GPU by formulas: what a dry run prints, and what `--simulate` is compared with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dapo_kernels.engine.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_DEVICE_CHUNK_BYTES
from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.config import Config, LoraConfig, ModelConfig

BYTES = {"float32": 4, "bfloat16": 2}
TINY_VOCABULARY = 64  # more than the characters of arithmetic
GPUS_OF_A_MACHINE = 8  # as far as a plan knows
CRITIC = "critic's weights and AdamW moments"
SENT = "weights for the servers"  # rank 0's copy, where they go by NCCL
FLOAT32 = 4  # bytes: master weights, their gradients and both moments of AdamW
_SIZES = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
_SIZES += ["num_key_value_heads", "head_dim", "vocab_size"]
# Models of the recipes that are planned for before they are downloaded: the sizes in their published config.json.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B": dict(zip(_SIZES, ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064), strict=True)),
    "Qwen/Qwen2.5-32B": dict(zip(_SIZES, ("qwen2", 64, 5120, 27648, 40, 8, 128, 152064), strict=True)),
    "Qwen/Qwen3-8B-Base": dict(zip(_SIZES, ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936), strict=True)),
}


class ModelShape(NamedTuple):
    """The sizes of a decoder with gated MLP and rotary attention."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    attention: int  # heads × head dimension
    key_value: int  # key/value heads × head dimension
    tied: bool

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        matrices = 2 * self.hidden * (self.attention + self.key_value) + 3 * self.hidden * self.intermediate
        return matrices + 2 * self.hidden

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.head * (1 if self.tied else 2) + self.hidden

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Of adapters on every linear layer but the head."""
        widths = 4 * self.hidden + 2 * (self.attention + self.key_value) + 3 * (self.hidden + self.intermediate)
        return self.layers * lora.rank * widths


def model_shape(model: ModelConfig) -> ModelShape | None:
    """Return the sizes of a model on this machine, or of a recipe's own; None for another that is not here."""
    values = model_values(model)
    if values is None:
        return None
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    key_value = (values.get("num_key_value_heads") or heads) * head_dim
    tied = bool(values.get("tie_word_embeddings", False))
    sizes = (values["num_hidden_layers"], hidden, values["intermediate_size"], values["vocab_size"])
    return ModelShape(*sizes, heads * head_dim, key_value, tied)


def model_values(model: ModelConfig) -> dict[str, Any] | None:
    """Return the config.json of a model's text part, or what a recipe needs of it; None for one that is not here."""
    if model.tiny is not None:
        values = dict(model.tiny, num_hidden_layers=model.tiny.layers, num_attention_heads=model.tiny.heads)
        return values | {"vocab_size": TINY_VOCABULARY, "tie_word_embeddings": True}
    path = Path(model.path or "") / "config.json"
    if not path.is_file():
        return PUBLISHED.get(model.path or "")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found | found.get("text_config", {})


def memory_estimate(config: Config, shape: ModelShape) -> dict[str, int]:
    """Return bytes per GPU (on a CPU: of the process) by purpose, to within a factor of about 1.5: enough to tell
    whether a run can fit. What belongs to a parameter is spread over the GPUs that hold one copy of the weights, what
    belongs to a position over those that share a sequence, an engine's copy over those that share it.
    """
    gpus, lora, size = config.parallel.gpus, config.model.lora, BYTES[config.model.dtype]
    trained = shape.parameters if lora is None else shape.adapter_parameters(lora)
    whole, frozen = shape.parameters * size, 0 if lora is None else shape.parameters * size
    shards, positions = gpus // config.parallel.replicate, config.optimizer.token_budget / config.parallel.sequence
    is_own_reference = lora is not None and config.loss.reference is None
    is_rounded = size != FLOAT32
    keeps_average = is_rounded and config.loss.reference_ema is not None
    chunk = DEFAULT_DEVICE_CHUNK_BYTES if _on_gpus(config) else DEFAULT_CHUNK_BYTES
    terms = {
        # Shards are float32 and rounded when they are gathered; one GPU keeps the rounded weights beside the float32.
        "weights": (frozen + trained * (FLOAT32 if gpus > 1 else size)) / shards,
        "float32 masters": trained * FLOAT32 if gpus == 1 and is_rounded else 0,
        "gradients": trained * FLOAT32 / shards,
        "AdamW moments": 2 * trained * FLOAT32 / shards,
        "gathered for a pass": _gathered(shape, size) if gpus > 1 else 0,
        "activations of a micro-batch": positions * _activations(config, shape) * size,
        "logits of a chunk": min(chunk, positions * shape.vocabulary * size),
        "reference weights": whole / shards if uses_reference(config) and not is_own_reference else 0,
        "reference's float32 average": shape.parameters * FLOAT32 / shards if keeps_average else 0,
        CRITIC: _critic_parameters(config, shape) * (3 * FLOAT32 + (size if gpus == 1 and is_rounded else 0)) / shards,
    }
    if config.rollout.engine_spec.is_remote:
        terms[SENT] = whole if config.rollout.server.transfer == "nccl" else 0
    else:
        terms |= {"engine's weights": whole / config.parallel.rollout_tensor, **_cache(config, shape)}
    return {what: math.ceil(amount) for what, amount in terms.items() if amount}


def _gathered(shape: ModelShape, size: int) -> int:
    """Whole on every GPU while they are used: embeddings and head, this layer and the next, the gradients of head and
    layer, and the layer's once more in float32 on its way to the shards.
    """
    embeddings = shape.head * (1 if shape.tied else 2)
    return (embeddings + 2 * shape.block) * size + (shape.head + shape.block) * size + shape.block * FLOAT32


def _activations(config: Config, shape: ModelShape) -> int:
    """Numbers kept per position for the backward: about 8 of hidden and 4 of MLP width a layer, or each layer's input
    and all of the one that is being recomputed.
    """
    layer = 8 * shape.hidden + 4 * shape.intermediate
    return shape.layers * shape.hidden + layer if config.model.gradient_checkpointing else shape.layers * layer


def _critic_parameters(config: Config, policy: ModelShape) -> int:
    """Of a critic of its own. Its gradients and activations are there when the policy's are not."""
    critic = config.critic
    if critic is None or critic.share_trunk:
        return 0
    shape = policy if critic.path is None else model_shape(ModelConfig(path=critic.path))
    return 0 if shape is None else shape.parameters


def _cache(config: Config, shape: ModelShape) -> dict[str, float]:
    """The engine's keys and values. vLLM takes what it is given and queues responses that do not fit."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    one = 2 * longest * shape.layers * shape.key_value * BYTES[config.model.dtype] / config.parallel.rollout_tensor
    if rollout.engine_spec.reserves_memory and not _on_gpus(config):
        return {"KV cache": rollout.vllm.kv_cache_gib * 2**30}
    if rollout.engine_spec.reserves_memory:
        return {"KV cache, for one response at full length": one}
    return {"KV cache, all responses at full length": rollout.max_batch_sequences * one}


def _on_gpus(config: Config) -> bool:
    device = config.run.device
    return config.parallel.gpus > 1 or device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
