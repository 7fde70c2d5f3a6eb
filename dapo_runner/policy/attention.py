"""Attention over packed sequences: no token sees another sequence, and no [T, T] mask is made.

Registered with transformers as ``PACKED_ATTENTION``: every attention layer of a model then calls ``packed_attention``
with the ``Packing`` that the model's forward was given.

Legend: T packed positions, S sequences, n sequences of a bucket, L the longest of them, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dapo_runner.config import ConfigError
from dapo_runner.parallel.ulysses import heads_from_positions, positions_from_heads
from dapo_runner.policy.prefixes import Distinct

PACKED_ATTENTION = "dapo_packed"
Kernel = Literal["sdpa", "varlen"]

# Up to this length plain products are faster than torch's CPU kernel: at 85 positions in bfloat16 12 ms against 89 for
# both passes. They round the probabilities to bfloat16: SmolLM2's gradient on text was 6.4 % off the float32 one, with
# torch's kernel 5.7 %.
SHORT = 128

# Share of a bucket's positions that may be padding. Short sequences pay more for a call of their own.
MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Sequences of similar length as rows of one SDPA call. Padding comes last in a row, where causality hides it.

    rows int64 [n·L]: the computed position of every slot; padding repeats the last position of its row.
    """

    n: int
    length: int
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the sequences of a packed batch lie. Computed are all T positions, or those of ``prefixes.Distinct``."""

    kernel: Kernel
    cu_seqlens: Tensor  # int32 [S+1]
    longest: int
    buckets: tuple[Bucket, ...] = ()  # for the SDPA kernel
    restore: Tensor | None = None  # the slot of every computed position among those of all buckets, int64
    group: dist.ProcessGroup | None = None  # ranks that share the positions


def plan_packing(
    lengths: SequenceOf[int],
    device: torch.device,
    kernel: Kernel,
    distinct: Distinct | None = None,
    group: dist.ProcessGroup | None = None,
) -> Packing:
    """Plan the attention of one forward pass for all layers.

    Args:
        lengths: positions of each sequence, in their order.
        distinct: the positions to compute where that is not all of them, for the SDPA kernel.
        group: the ranks that share the positions.
    """
    starts = list(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device)
    packing = Packing(kernel, cu_seqlens, max(lengths, default=0), group=group)
    if kernel != "sdpa":
        return packing
    buckets, n_slots = [], 0
    restore = torch.empty(starts[-1], dtype=torch.int64)
    for members in _group_by_length(lengths):
        width = lengths[members[0]]
        columns, rows = torch.arange(width), []
        for start, length in ((starts[member], lengths[member]) for member in members):
            rows.append(start + columns.clamp(max=length - 1))  # padding repeats the last position
            restore[start : start + length] = n_slots + columns[:length]
            n_slots += width
        packed = torch.cat(rows)
        packed = packed if distinct is None else distinct.inverse[packed]
        buckets.append(Bucket(len(members), width, packed.to(device)))
    restore = restore if distinct is None else restore[distinct.source]
    return replace(packing, buckets=tuple(buckets), restore=restore.to(device))


def _group_by_length(lengths: SequenceOf[int]) -> list[list[int]]:
    """Return buckets of indices, longest first in each, with at most MAX_PADDING of a bucket padded."""
    buckets: list[list[int]] = []
    filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if buckets:
            slots = lengths[buckets[-1][0]] * (len(buckets[-1]) + 1)
            if filled + lengths[index] >= (1 - MAX_PADDING) * slots:
                buckets[-1].append(index)
                filled += lengths[index]
                continue
        buckets.append([index])
        filled = lengths[index]
    return buckets


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence, without dropout. This is transformers' attention interface.

    Args:
        query: [1, Hq, T, D]; key and value [1, Hk, T, D].
        attention_mask: of ``window_mask``, whose width is the window.

    Returns:
        [1, T, Hq, D], and None for the weights.

    Raises:
        ConfigError: the model needs what is not supported.
    """
    window = _window(type(module).__name__, attention_mask, options)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
    if packing.group is not None:
        query, key, value = heads_from_positions(query, key, value, packing.group)
    attend = _sdpa if packing.kernel == "sdpa" else _varlen
    out = attend(query, key, value, packing, options.get("scaling"), window)
    if packing.group is not None:
        out = positions_from_heads(out, packing.group)
    return out[None], None


def _window(name: str, mask: Tensor | None, options: dict[str, Any]) -> int | None:
    """Return how many positions a token sees, itself included; None for no limit."""
    unsupported = {
        "its attention mask": mask is not None and mask.numel(),
        "attention sinks": options.get("s_aux") is not None,
        "a cap of its scores": options.get("softcap") is not None,
    }
    for what, is_used in unsupported.items():
        if is_used:
            raise ConfigError(f"model: {name} is not supported by packed attention, because of {what}")
    return options.get("sliding_window") if mask is None else mask.shape[-1]


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    assert packing.restore is not None
    gqa = key.shape[1] != query.shape[1]
    outs = []
    for bucket in packing.buckets:
        q, k, v = (
            tensor.index_select(0, bucket.rows).unflatten(0, (bucket.n, bucket.length)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        mask = None
        if window is not None and bucket.length > window:
            mask = _visible(bucket.length, window, query.device)
        if bucket.length <= SHORT and query.device.type == "cpu":
            out = _plain(q, k, v, mask, scale)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
            )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, packing.restore)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds = (packing.cu_seqlens, packing.cu_seqlens, packing.longest, packing.longest)
    gqa, before = key.shape[1] != query.shape[1], -1 if window is None else window - 1  # −1 is no limit
    out = varlen_attn(query, key, value, *bounds, scale=scale, window_size=(before, 0), enable_gqa=gqa)
    assert isinstance(out, Tensor)
    return out


def _visible(length: int, window: int, device: torch.device) -> Tensor:
    """Return bool [L, L]: the keys that a query sees, itself and those before it in its window."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _plain(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    """query [n, Hq, L, D], key [n, Hk, L, D], value [n, Hk, L, E] → [n, Hq, L, E]. Without ``visible``, causal."""
    n, heads, length, size = query.shape
    visible = _visible(length, length, query.device) if visible is None else visible
    hidden = torch.zeros(length, length, dtype=query.dtype, device=query.device).masked_fill_(~visible, -math.inf)
    groups, sharing = n * key.shape[1], heads // key.shape[1]  # the query heads that share a key make one product
    stacked = query.reshape(groups, sharing * length, size)
    scores = torch.baddbmm(
        hidden.repeat(sharing, 1), stacked, key.flatten(0, 1).mT, alpha=size**-0.5 if scale is None else scale
    )
    return (torch.softmax(scores, -1) @ value.flatten(0, 1)).view(n, heads, length, value.shape[-1])


def choose_kernel(wanted: Literal["auto", "sdpa"], device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel to run: ``auto`` is varlen on CUDA in half precision, and sdpa elsewhere."""
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return "varlen" if wanted == "auto" and half_on_cuda else "sdpa"


def window_mask(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> Tensor | None:
    """Return an empty [1, 1, 0, window] for layers with a sliding window, else None. This is transformers' interface.

    Some models (Qwen2-MoE, PhiMoE) name their window in the mask only. Raises ConfigError for other masks.
    """
    is_read_by_model = local_size is not None and config.model_type == "doge"
    if is_read_by_model or use_vmap or "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"model: the attention mask of {config.model_type} is not supported by packed attention")
    return None if local_size is None else torch.empty(1, 1, 0, local_size)


def register_packed_attention(function: Callable[..., Any] = packed_attention) -> None:
    """Register ``PACKED_ATTENTION`` with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, function)
    AttentionMaskInterface.register(PACKED_ATTENTION, window_mask)
