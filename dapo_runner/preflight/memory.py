"""Estimate the memory of one GPU with formulas, for the dry run and to compare with `--simulate`."""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, AutoConfig

from dapo_kernels.engine.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_DEVICE_CHUNK_BYTES
from dapo_runner.config import Config, LoraConfig, ModelConfig
from dapo_runner.config.run import is_cuda
from dapo_runner.engines.engine import engine_class
from dapo_runner.policy.lengths import loading, local_file
from dapo_runner.policy.routing import N_EXPERTS, N_USED

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TINY_VOCABULARY = 64  # at least the vocabulary of the tiny model
GPUS_OF_A_MACHINE = 8  # assumed in estimates
CRITIC = "critic's weights and optimizer states"
SENT = "weights for the servers"  # rank 0's copy if they are sent by NCCL
BESIDE = ("reference weights", "reference's float32 average", CRITIC, SENT)  # in all phases; not part of a simulation
FLOAT32 = 4  # bytes per value of master weights, gradients and AdamW moments
GPU_MEMORY = int(79.1 * 2**30)  # bytes that torch reports for an A100 or H100 of 80 GB
ENGINE, ASLEEP = "engine's weights", "weights of the engine (rollout.vllm.sleep)"
JUDGE, COPIES = "judge's weights", "copies of run.async_save"  # a judge is on the GPU only while it judges
_SIZES = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
_SIZES += ["num_key_value_heads", "head_dim", "vocab_size"]
_NEEDED = {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"}
# Models of the recipes, for estimates without a download: the sizes in their published config.json.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B": dict(zip(_SIZES, ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064), strict=True)),
    "Qwen/Qwen2.5-32B": dict(zip(_SIZES, ("qwen2", 64, 5120, 27648, 40, 8, 128, 152064), strict=True)),
    "Qwen/Qwen3-8B-Base": dict(zip(_SIZES, ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936), strict=True)),
}


class ModelShape(NamedTuple):
    """The sizes of a decoder with gated MLP and rotary attention, also of a mixture of experts."""

    layers: int
    hidden: int
    vocabulary: int
    intermediate: int  # of all experts together
    active: int  # of the experts of a token
    experts: int  # of a token; 0 for a dense MLP
    attention: int  # heads × head dimension
    key_value: int  # key/value heads × head dimension
    tied: bool

    @property
    def block(self) -> int:
        """Number of parameters of one layer."""
        matrices = 2 * self.hidden * (self.attention + self.key_value) + 3 * self.hidden * self.intermediate
        return matrices + 2 * self.hidden

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.head * (1 if self.tied else 2) + self.hidden

    def adapter_parameters(self, lora: LoraConfig) -> int:
        sides = {"q": self.attention, "o": self.attention, "k": self.key_value, "v": self.key_value}
        sides |= {} if self.experts else dict.fromkeys(("gate", "up", "down"), self.intermediate)
        names = [f"{name}_proj" for name in sides] if isinstance(lora.targets, str) else lora.targets
        widths = (self.hidden + side for name, side in sides.items() if f"{name}_proj" in names)
        return self.layers * lora.rank * sum(widths)


def model_shape(model: ModelConfig, key: str = "model.path") -> ModelShape | None:
    """Return the sizes of a model on this machine or of a recipe; None if they are unknown."""
    values = model_values(model, key) or {}
    experts = next((values[name] for name in N_EXPERTS if values.get(name)), 0)
    width: Any = (values.get("moe_intermediate_size") if experts else None) or values.get("intermediate_size")
    used = next((values[name] for name in N_USED if values.get(name)), 1) if experts else 0
    if not all(isinstance(n, int) and n > 0 for n in (width, experts or 1, used or 1, *map(values.get, _NEEDED))):
        return None  # also for a list with the value of each layer
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    mlps = ((experts or 1) * width, (used or 1) * width, used)
    attention = (heads * head_dim, (values.get("num_key_value_heads") or heads) * head_dim)
    tied = bool(values.get("tie_word_embeddings", False))
    return ModelShape(values["num_hidden_layers"], hidden, values["vocab_size"], *mlps, *attention, tied)


def model_values(model: ModelConfig, key: str = "model.path") -> dict[str, Any] | None:
    """Return the config.json of a model's text part, or the published sizes of a recipe's model; None if unknown."""
    if model.tiny is not None:
        values = dict(model.tiny, num_hidden_layers=model.tiny.layers, num_attention_heads=model.tiny.heads)
        return values | {"vocab_size": TINY_VOCABULARY, "tie_word_embeddings": True}
    path = local_file(model.path or "", "config.json")
    if path is None:
        return PUBLISHED.get(model.path or "")
    with loading(key, "a configuration", path):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found.get("model_type") in CONFIG_MAPPING:  # its class has the defaults of values that the file leaves out
            return AutoConfig.for_model(**found).get_text_config(decoder=True).to_dict()
        return found | found.get("text_config", {})


def memory_estimate(config: Config, shape: ModelShape) -> dict[str, int]:
    """Return bytes per GPU by purpose (on a CPU: of the process), to within a factor of about 1.5. Memory per parameter
    is divided by the GPUs that share one copy of the weights, memory per position by those that share a sequence, the
    engine's copy by those that share it.
    """
    gpus, lora, size = config.parallel.gpus, config.model.lora, BYTES[config.model.dtype]
    trained = shape.parameters if lora is None else shape.adapter_parameters(lora)
    whole, frozen = shape.parameters * size, 0 if lora is None else shape.parameters * size
    shards, positions = -(-gpus // config.parallel.replicate), largest_micro_batch(config) / config.parallel.sequence
    reference = _parameters_of(config.reference_path, shape)
    has_masters, wide = gpus == 1 and (size != FLOAT32 or config.optimizer.offload), config.model.float32_logits
    states = {CRITIC: 0.0} if config.optimizer.offload and _on_gpus(config) else _states(config, shape)
    critic = _critic_parameters(config, shape) * size if has_masters else 0
    chunk = DEFAULT_DEVICE_CHUNK_BYTES if _on_gpus(config) else DEFAULT_CHUNK_BYTES
    terms = {
        # With several GPUs, shards are float32 and gathered in dtype. One GPU keeps weights in dtype and in float32.
        "weights": (frozen + trained * (FLOAT32 if gpus > 1 else size)) / shards,
        **states,
        "gathered for a pass": _gathered(shape, size) if gpus > 1 else 0,
        "activations of a micro-batch": positions * _activations(config, shape) * size,
        "logits of a chunk": min(chunk, positions * shape.vocabulary * (FLOAT32 if wide else size)),
        "reference weights": reference * size / shards if config.loads_reference else 0,
        JUDGE: _judge(config),
        CRITIC: states[CRITIC] + critic,
    }
    if config.rollout.engine_spec.is_remote:
        terms[SENT] = whole if config.rollout.server.transfer == "nccl" else 0
    else:
        terms |= {ENGINE: whole / config.parallel.rollout_tensor, **_cache(config, shape)}
    return {what: math.ceil(amount) for what, amount in terms.items() if amount}


def host_estimate(config: Config, shape: ModelShape) -> dict[str, int]:
    """Return the bytes by purpose that the GPUs of a machine offload to the host."""
    size, states = BYTES[config.model.dtype], _states(config, shape)
    ranks = min(config.parallel.gpus, GPUS_OF_A_MACHINE)
    if not _on_gpus(config):
        return {}
    terms = dict(states) if config.optimizer.offload else {}
    if config.model.gradient_checkpointing == "offload":
        positions = largest_micro_batch(config) // config.parallel.sequence
        terms["layer inputs (model.gradient_checkpointing)"] = positions * shape.layers * shape.hidden * size
    if engine_class(config).takes_adapters(config) and config.rollout.vllm.sleep:
        terms[ASLEEP] = shape.parameters * size / config.parallel.rollout_tensor
    terms[JUDGE] = _judge(config)
    if config.run.async_save:
        optimizer, model, _ = checkpoint_parts(config, shape)
        terms[COPIES] = optimizer / -(-config.parallel.gpus // config.parallel.replicate) + model / config.parallel.gpus
    return {what: math.ceil(ranks * amount) for what, amount in terms.items() if amount}


def checkpoint_parts(config: Config, shape: ModelShape) -> tuple[int, int, int]:
    """Return the bytes of a checkpoint's optimizer/, model/ and adapter/. Nothing else in it is large."""
    lora, size, critic = config.model.lora, BYTES[config.model.dtype], _critic_parameters(config, shape)
    adapters = 0 if lora is None else shape.adapter_parameters(lora)
    is_exact = config.parallel.gpus == 1 and size == FLOAT32 and lora is None  # model/ has the float32 weights
    values = (2 if is_exact else 3) * (adapters or shape.parameters) + 3 * critic
    values += 0 if config.loss.reference_ema is None else shape.parameters
    return values * FLOAT32, shape.parameters * size, adapters * size


def largest_micro_batch(config: Config) -> int:
    """Return the largest number of positions of a micro-batch. A mini-batch may be smaller than the token budget."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1
    return min(config.optimizer.token_budget, config.mini_batch_size * longest)


def too_large_for_host(size: int) -> str | None:
    """Return both sizes if this machine has less memory than ``size``."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"about {size / 2**30:.1f} GiB of memory, got {here / 2**30:.1f}" if size > here else None


def phase_estimate(config: Config, estimate: dict[str, int]) -> dict[str, int]:
    """Return the bytes per GPU while the policy trains and while the engine samples; nothing on a CPU."""
    if not _on_gpus(config):
        return {}
    trains = sum(size for what, size in estimate.items() if not what.startswith((ENGINE, "KV cache", JUDGE)))
    held = sum(estimate.get(what, 0) for what in ("weights", "float32 masters", "AdamW moments", JUDGE, *BESIDE))
    generating, waiting = engine_memory(config, estimate)
    return {"update": trains + waiting, "rollout": held + generating}


def engine_memory(config: Config, estimate: dict[str, int]) -> tuple[int, int]:
    """Return the bytes on the GPU of an engine that samples and of one that is idle. A sleeping vLLM takes none."""
    vllm, weights = config.rollout.vllm, estimate.get(ENGINE, 0)
    if not config.rollout.engine_spec.reserves_memory:
        return sum(size for what, size in estimate.items() if what.startswith((ENGINE, "KV cache"))), weights
    return (reserved := int(vllm.gpu_memory * GPU_MEMORY)), 0 if vllm.sleep else reserved


def _states(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return the bytes of the float32 tensors beside the weights, which `optimizer.offload` keeps on the host."""
    lora, gpus, is_rounded = config.model.lora, config.parallel.gpus, BYTES[config.model.dtype] != FLOAT32
    trained = (shape.parameters if lora is None else shape.adapter_parameters(lora)) * FLOAT32
    shards, keeps_average = -(-gpus // config.parallel.replicate), is_rounded and config.loss.reference_ema is not None
    critic = _critic_parameters(config, shape)
    return {
        "float32 masters": trained if gpus == 1 and (is_rounded or config.optimizer.offload) else 0,
        "gradients": trained / shards,
        "AdamW moments": 2 * trained / shards,
        "reference's float32 average": shape.parameters * FLOAT32 / shards if keeps_average else 0,
        CRITIC: (3 * FLOAT32 * critic + max(0, FLOAT32 * critic - trained)) / shards,
    }


def _gathered(shape: ModelShape, size: int) -> int:
    """Return the bytes of whole tensors on each GPU: embeddings and head, this layer and the next one, gradients of
    head and layer, and the layer's gradient in float32 on its way to the shards.
    """
    embeddings = shape.head * (1 if shape.tied else 2)
    return (embeddings + 2 * shape.block) * size + (shape.head + shape.block) * size + shape.block * FLOAT32


def _activations(config: Config, shape: ModelShape) -> int:
    """Return the values per position kept for the backward pass. With checkpointing: each layer's input, and all values
    of one layer. Not counted: further norms (Gemma), shared experts, the router, embeddings and the last norm.
    """
    layer, way = (8 + 2 * shape.experts) * shape.hidden + 4 * shape.active, config.model.gradient_checkpointing
    layer += 5 * (shape.attention + shape.key_value)  # with norms of queries and keys; 2 to 3 without
    inputs = 0 if way == "offload" and _on_gpus(config) else shape.layers * shape.hidden
    return inputs + layer if way else shape.layers * layer


def _critic_parameters(config: Config, policy: ModelShape) -> int:
    """Return the parameters of a critic. Its activations, and as many gradients, reuse the policy's memory."""
    return 0 if config.critic is None else _parameters_of(config.critic.path, policy)


def _judge(config: Config) -> int:
    """Return the bytes of a judge in this process. It is bfloat16 on a GPU, float32 on a CPU."""
    judge = config.reward.judge
    if judge is None or judge.url is not None:
        return 0
    shape = model_shape(ModelConfig(path=judge.model), "reward.judge.model")
    return 0 if shape is None else shape.parameters * (2 if _on_gpus(config) else 4)


def _parameters_of(path: str | None, policy: ModelShape) -> int:
    """Return the parameters of a model, or of the policy without a path; 0 for an unknown model."""
    shape = policy if path is None else model_shape(ModelConfig(path=path), "critic, loss.reference, distillation")
    return 0 if shape is None else shape.parameters


def _cache(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return the bytes of the engine's KV cache. vLLM queues the responses that do not fit into its cache."""
    rollout, longest = config.rollout, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    one = 2 * longest * shape.layers * shape.key_value * BYTES[config.model.dtype] / config.parallel.rollout_tensor
    if rollout.engine_spec.reserves_memory and not _on_gpus(config):
        return {"KV cache": rollout.vllm.kv_cache_gib * 2**30}
    if rollout.engine_spec.reserves_memory:
        return {"KV cache, for one response at full length": one}
    return {"KV cache, all responses at full length": rollout.max_batch_sequences * one}


def _on_gpus(config: Config) -> bool:
    return config.parallel.gpus > 1 or is_cuda(config.run.device)
