"""What the wall time of a step amounts to: tokens a second, the share of the devices' peak, memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import Any

import torch

GIB = 2**30
# bfloat16 flops a second without sparsity, from the makers' data sheets, by a part of the device's name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}


def training_flops(model: Any, lengths: Iterable[int]) -> float:
    """Of forward and backward passes over sequences of so many positions: 6 for each parameter but the embeddings, and
    6·L² for each unit of a layer's heads, of causal attention. What checkpointing computes again does not count.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        parameters -= model.get_input_embeddings().weight.numel()
    return sum(6.0 * parameters * n + 6.0 * config.num_hidden_layers * width * n**2 for n in lengths)


def peak_flops(device: torch.device) -> float | None:
    """Of one device; None where nobody has written it down."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """GiB: on a GPU what torch has had allocated at most, on a CPU what the process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed_figures(
    flops: float, positions: int, seconds: Mapping[str, float], ranks: int, peak: float | None
) -> dict[str, float]:
    """tokens_per_second: positions trained on, of all ranks, over the whole step. mfu: the share of the devices' peak
    while they made forward and backward passes; left out where the peak is not known.
    """
    figures = {"ranks": float(ranks), "tokens_per_second": positions / sum(seconds.values())}
    busy = seconds.get("forward_backward", 0.0)
    return figures if peak is None or not busy else {**figures, "mfu": flops / (busy * ranks * peak)}


def speed_line(figures: Mapping[str, float]) -> str:
    """For a person; empty where nothing was measured."""
    shown = (
        ("ranks", "{:.0f} ranks"),
        ("tokens_per_second", "{:,.0f} trained tokens/s"),
        ("mfu", "MFU {:.0%}"),
        ("memory_gib", "{:.1f} GiB"),
    )
    return ", ".join(
        form.format(figures[key]) for key, form in shown if key in figures and (key, figures[key]) != ("ranks", 1.0)
    )
