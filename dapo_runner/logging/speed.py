"""Compute the speed of a step: tokens per second, share of the devices' peak FLOPS, memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import Any

import torch

# Dense bfloat16 FLOPS from the vendors' data sheets, by a part of the device's name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}
SHOWN = {"tokens_per_second": "{:,.0f} trained tokens/s", "mfu": "MFU {:.0%}", "memory_gib": "{:.1f} GiB"}


def training_flops(model: Any, lengths: Iterable[int]) -> float:
    """Return the FLOPs of forward and backward passes over sequences of L tokens: 6·L per parameter but embeddings, and
    per layer 6·L²·(heads·head_dim) for causal attention. Recomputation does not count.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        parameters -= model.get_input_embeddings().weight.numel()
    return sum(6.0 * parameters * n + 6.0 * config.num_hidden_layers * width * n**2 for n in lengths)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOPS of one device; None if ``PEAKS`` does not list it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed_figures(
    flops: float, positions: int, seconds: Mapping[str, float], ranks: int, peak: float | None
) -> dict[str, float]:
    """Return trained positions of all ranks per second of the step, and mfu, the share of the devices' peak FLOPS in
    forward and backward passes. mfu is left out if the peak is unknown.
    """
    figures = {"ranks": float(ranks), "tokens_per_second": positions / sum(seconds.values())}
    busy = seconds.get("forward_backward", 0.0)
    return figures if peak is None or not busy else {**figures, "mfu": flops / (busy * ranks * peak)}


def speed_line(figures: Mapping[str, float]) -> str:
    """Return the speed metrics as text for the console."""
    return ", ".join(form.format(figures[key]) for key, form in SHOWN.items() if key in figures)
