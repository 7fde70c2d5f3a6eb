"""Compute the speed of a step: tokens per second, share of the devices' peak FLOPS, memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dapo_runner.policy.model import Policy
from dapo_runner.policy.routing import N_EXPERTS, N_USED
from dapo_runner.types import TrainingSequence

# Dense bfloat16 FLOPS from the vendors' data sheets, by a part of the device's name.
PEAKS = {"B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12}
PEAKS |= {"A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}


def training_flops(model: Any, lengths: Iterable[int]) -> float:
    """Return the FLOPs of forward and backward passes over sequences of L tokens. A parameter costs 6·L, a frozen one
    4·L, embeddings nothing. Of experts only those of a token count. Causal attention costs 6·L²·heads·head_dim per
    layer. Recomputation does not count.
    """
    config = model.config.get_text_config(decoder=True)
    heads, layers = config.num_attention_heads, getattr(config, "per_layer_config", [config] * config.num_hidden_layers)
    width = sum(heads * (getattr(layer, "head_dim", None) or config.hidden_size // heads) for layer in layers)
    n_experts = next((count for name in N_EXPERTS if (count := getattr(config, name, 0))), 0)
    used = next((k for name in N_USED if (k := getattr(config, name, 0))), n_experts) / n_experts if n_experts else 1.0
    embeddings = model.get_input_embeddings().weight
    per_token = sum(
        (6 if weight.requires_grad else 4) * weight.numel() * (used if ".experts." in name else 1.0)
        for name, weight in model.named_parameters()
        if weight is not embeddings or weight is model.get_output_embeddings().weight
    )
    return sum(per_token * n + 6.0 * width * n**2 for n in lengths)


def speed_metrics(
    policy: Policy, sequences: Iterable[TrainingSequence], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the speed of a step that took ``seconds`` by phase and trained on ``sequences``. Collective.

    tokens_per_second: trained positions of all ranks. mfu: the share of the devices' peak FLOPS in forward and backward
    passes, if the peak is known. memory_gib: the peak of a rank, allocated by torch on a GPU, resident on a CPU.
    """
    lengths = [sequence.length - 1 for sequence in sequences if sequence.mask[1:].any()]  # the rest is not packed
    device, world, busy = policy.device, policy.world, seconds.get("forward_backward", 0.0)
    figures = {"ranks": float(world.size), "tokens_per_second": sum(lengths) / sum(seconds.values())}
    memory, name = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, ""
    if device.type == "cuda":
        memory, name = torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.get_device_name(device)
    peak = next((peak for part, peak in PEAKS.items() if f"{part} " in f"{name.replace('-', ' ')} "), None)
    if peak is not None and busy:
        figures["mfu"] = training_flops(policy.model, lengths) / (busy * world.size * peak)
    return {**figures, "memory_gib": max(world.all_gather_object(memory))}
