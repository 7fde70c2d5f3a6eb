"""What the wall time of a step amounts to: tokens a second, the share of the devices' peak, memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import Any

import torch

# bfloat16 FLOPS without sparsity, from the makers' data sheets, by a part of the device's name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}
SHOWN = {"tokens_per_second": "{:,.0f} trained tokens/s", "mfu": "MFU {:.0%}", "memory_gib": "{:.1f} GiB"}


def training_flops(model: Any, lengths: Iterable[int]) -> float:
    """Return the FLOPs of forward and backward passes over sequences of these lengths: 6 for each parameter but the
    embeddings, and 6·L² for each unit of a layer's heads, of causal attention. Recomputation does not count.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        parameters -= model.get_input_embeddings().weight.numel()
    return sum(6.0 * parameters * n + 6.0 * config.num_hidden_layers * width * n**2 for n in lengths)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOPS of one device; None for one that ``PEAKS`` does not know."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """Return GiB: of a GPU what torch has allocated at most, of a CPU what the process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed_figures(
    flops: float, positions: int, seconds: Mapping[str, float], ranks: int, peak: float | None
) -> dict[str, float]:
    """Return the positions that all ranks trained on per second of the step, and as mfu the share of the devices' peak
    during forward and backward passes; without mfu where the peak is not known.
    """
    figures = {"ranks": float(ranks), "tokens_per_second": positions / sum(seconds.values())}
    busy = seconds.get("forward_backward", 0.0)
    return figures if peak is None or not busy else {**figures, "mfu": flops / (busy * ranks * peak)}


def speed_line(figures: Mapping[str, float]) -> str:
    """Return the figures for the console."""
    return ", ".join(form.format(figures[key]) for key, form in SHOWN.items() if key in figures)
