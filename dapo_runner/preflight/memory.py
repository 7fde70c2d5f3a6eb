"""The memory of one GPU by formulas: what a dry run prints, and what `--simulate` is compared with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo_kernels.engine.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_DEVICE_CHUNK_BYTES
from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.config import Config, LoraConfig, ModelConfig, TinyModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TINY_VOCABULARY = 64  # more than the characters of arithmetic
GPUS_OF_A_MACHINE = 8  # as far as a plan knows
CRITIC = "critic's weights and AdamW moments"
SENT = "weights for the servers"  # rank 0's copy, where they go by NCCL
FLOAT32 = 4  # bytes: master weights, their gradients and both moments of AdamW


@dataclass(frozen=True, slots=True)
class ModelShape:
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


_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# Models of the recipes that are planned for before they are downloaded: the sizes in their published config.json.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B": dict(zip(_SIZES, ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064), strict=True)),
    "Qwen/Qwen2.5-32B": dict(zip(_SIZES, ("qwen2", 64, 5120, 27648, 40, 8, 128, 152064), strict=True)),
    "Qwen/Qwen3-8B-Base": dict(zip(_SIZES, ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936), strict=True)),
}


def model_shape(model: ModelConfig) -> ModelShape | None:
    """The sizes of a model on this machine, or of a recipe's own; None for another that is not here."""
    if model.tiny is not None:
        return _tiny_shape(model.tiny)
    values = model_values(model)
    if values is None:
        return None
    values = values.get("text_config", values)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    return ModelShape(
        layers=values["num_hidden_layers"],
        hidden=hidden,
        intermediate=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        attention=heads * head_dim,
        key_value=(values.get("num_key_value_heads") or heads) * head_dim,
        tied=bool(values.get("tie_word_embeddings", False)),
    )


def model_values(model: ModelConfig) -> dict[str, Any] | None:
    """The config.json of a model on this machine, or what a recipe needs of it; None for another that is not here."""
    if model.path is None:
        return None
    path = Path(model.path) / "config.json"
    if not path.is_file():
        return PUBLISHED.get(model.path)
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def memory_estimate(config: Config, shape: ModelShape) -> dict[str, int]:
    """Bytes per GPU (on a CPU: of the process) by purpose, to within a factor of about 1.5: enough to tell whether a
    run can fit. What belongs to a parameter is spread over the GPUs that hold one copy of the weights, what belongs to
    a position over those that share a sequence, an engine's copy over those that share it.
    """
    gpus, lora, size = config.parallel.gpus, config.model.lora, BYTES[config.model.dtype]
    trained = shape.parameters if lora is None else shape.adapter_parameters(lora)
    frozen, elsewhere = 0 if lora is None else shape.parameters, config.rollout.engine_spec.is_remote
    shards = gpus // config.parallel.replicate
    positions = math.ceil(config.optimizer.token_budget / config.parallel.sequence)
    terms = {
        # Shards are float32 and rounded when they are gathered; one GPU keeps the rounded weights beside the float32.
        "weights": _shared(frozen * size + trained * (FLOAT32 if gpus > 1 else size), shards),
        "float32 masters": trained * FLOAT32 if gpus == 1 and size != FLOAT32 else 0,
        "gradients": _shared(trained * FLOAT32, shards),
        "AdamW moments": _shared(2 * trained * FLOAT32, shards),
        "gathered for a pass": _gathered(shape, size) if gpus > 1 else 0,
        "activations of a micro-batch": positions * _activations(config, shape) * size,
        "logits of a chunk": min(_chunk_bytes(config), positions * shape.vocabulary * size),
        "reference weights": _shared(shape.parameters * size, shards) if _keeps_reference(config) else 0,
        "reference's float32 average": _shared(shape.parameters * FLOAT32, shards) if _keeps_average(config) else 0,
        **_critic(config, shape, shards),
        SENT: shape.parameters * size if elsewhere and config.rollout.server.transfer == "nccl" else 0,
        "engine's weights": 0 if elsewhere else _shared(shape.parameters * size, config.parallel.rollout_tensor),
        **({} if elsewhere else _cache(config, shape)),
    }
    return {what: amount for what, amount in terms.items() if amount}


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


def _chunk_bytes(config: Config) -> int:
    return DEFAULT_DEVICE_CHUNK_BYTES if _on_gpus(config) else DEFAULT_CHUNK_BYTES


def _shared(amount: int, gpus: int) -> int:
    return math.ceil(amount / gpus)


def _keeps_reference(config: Config) -> bool:
    own = config.model.lora is not None and config.loss.reference is None
    return uses_reference(config) and not own


def _keeps_average(config: Config) -> bool:
    return config.loss.reference_ema is not None and BYTES[config.model.dtype] != FLOAT32


def _critic(config: Config, policy: ModelShape, shards: int) -> dict[str, int]:
    """What one of its own holds all the time. Its gradients and activations are there when the policy's are not."""
    critic, size = config.critic, BYTES[config.model.dtype]
    if critic is None or critic.share_trunk:
        return {}
    shape = policy if critic.path is None else model_shape(ModelConfig(path=critic.path))
    if shape is None:
        return {}
    rounded = size if config.parallel.gpus == 1 and size != FLOAT32 else 0
    return {CRITIC: _shared(shape.parameters * (3 * FLOAT32 + rounded), shards)}


def _cache(config: Config, shape: ModelShape) -> dict[str, int]:
    """The engine's keys and values. vLLM takes what it is given and queues responses that do not fit."""
    rollout, size = config.rollout, BYTES[config.model.dtype]
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    one = _shared(2 * longest * shape.layers * shape.key_value * size, config.parallel.rollout_tensor)
    if not rollout.engine_spec.reserves_memory:
        return {"KV cache, all responses at full length": rollout.max_batch_sequences * one}
    if _on_gpus(config):
        return {"KV cache, for one response at full length": one}
    return {"KV cache": int(rollout.vllm.kv_cache_gib * 2**30)}


def _on_gpus(config: Config) -> bool:
    device = config.run.device
    return config.parallel.gpus > 1 or device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _tiny_shape(tiny: TinyModelConfig) -> ModelShape:
    return ModelShape(
        layers=tiny.layers,
        hidden=tiny.hidden_size,
        intermediate=tiny.intermediate_size,
        vocabulary=TINY_VOCABULARY,
        attention=tiny.hidden_size,
        key_value=tiny.hidden_size,
        tied=True,
    )
