"""Attention over packed sequences: no token attends to another sequence, and no [T, T] mask is made.

It is registered with transformers as ``PACKED_ATTENTION``: every attention layer of a model then calls
``packed_attention`` with the ``Packing`` that was passed to the model's forward.

Legend: T packed positions, S sequences, n sequences of a bucket, L the longest of them, D head size.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from dapo_runner.config import ConfigError
from dapo_runner.parallel.ulysses import heads_from_positions, positions_from_heads
from dapo_runner.policy.prefixes import Distinct

PACKED_ATTENTION = "dapo_packed"
Kernel = Literal["sdpa", "flash", "varlen"]
VARLEN_ARGUMENTS = inspect.signature(varlen_attn).parameters  # they depend on the version of torch

# Up to this length plain matrix products are faster than torch's CPU kernel: for both passes at 85 positions in
# bfloat16, 12 ms against 89. The gradient's error rises from 5.7 % to 6.4 % (SmolLM2 on text, against float32).
SHORT = 128

# Maximum share of padding in a bucket. For short sequences a separate call costs more than padding.
MAX_PADDING = 0.25

# Options of attention functions that are applied, or do not change scores. Without others (sinks) they would be wrong.
OPTIONS = {"scaling", "sliding_window", "softcap", "dropout", "position_ids", "cache_position", "use_cache"}
OPTIONS |= {"logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Sequences of similar length as rows of one SDPA call. Padding is at the end of a row: causality hides it."""

    n: int
    length: int
    rows: Tensor  # int64 [n·L]: the computed position of every slot; padding repeats the last position of its row


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The sequences of a packed batch. All T positions are computed, or only those of ``prefixes.Distinct``."""

    kernel: Kernel
    cu_seqlens: Tensor  # int32 [S+1], the boundaries of the sequences
    longest: int
    buckets: tuple[Bucket, ...] = ()  # for the SDPA kernel
    restore: Tensor | None = None  # for the SDPA kernel: int64, the slot of every computed position
    group: dist.ProcessGroup | None = None  # ranks that share the positions


class _Scoring(NamedTuple):
    """The scale of query · key, the window of a token (itself included), and the softcap of scores; None is off."""

    scale: float | None
    window: int | None
    softcap: float | None


def plan_packing(
    lengths: Sequence[int],
    device: torch.device,
    kernel: Kernel,
    distinct: Distinct | None = None,
    group: dist.ProcessGroup | None = None,
) -> Packing:
    """Plan the attention of all layers in one forward pass.

    Args:
        lengths: positions of each sequence, in order.
        distinct: the positions to compute, if not all; only for the SDPA kernel.
        group: the ranks that share the positions.
    """
    starts = list(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device)
    longest = max(lengths, default=0)
    if kernel != "sdpa":
        return Packing(kernel, cu_seqlens, longest, group=group)
    buckets, n_slots = [], 0
    restore = torch.empty(starts[-1], dtype=torch.int64)
    for members in _group_by_length(lengths):
        width = lengths[members[0]]
        columns = torch.arange(width)
        rows = []
        for start, length in ((starts[member], lengths[member]) for member in members):
            rows.append(start + columns.clamp(max=length - 1))  # padding repeats the last position
            restore[start : start + length] = n_slots + columns[:length]
            n_slots += width
        packed = torch.cat(rows)
        packed = packed if distinct is None else distinct.inverse[packed]
        buckets.append(Bucket(len(members), width, packed.to(device)))
    if distinct is not None:
        restore = restore[distinct.source]
    return Packing(kernel, cu_seqlens, longest, tuple(buckets), restore.to(device), group)


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return buckets of indices, longest first, with at most a share MAX_PADDING of padding in each."""
    buckets, filled = list[list[int]](), 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slots = lengths[buckets[-1][0]] * (len(buckets[-1]) + 1) if buckets else math.inf
        if filled + lengths[index] < (1 - MAX_PADDING) * slots:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += lengths[index]
    return buckets


@torch.compiler.disable
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
    """Attend causally within each sequence: query [1, Hq, T, D], key and value [1, Hk, T, D] → [1, T, Hq, D], and None
    for the weights. This has the interface of transformers' attention functions.

    The width of ``attention_mask``, from ``window_mask``, is the window. Dropout is not applied: two passes over one
    policy must agree. Raises ConfigError if the model uses a feature that the kernel does not support.
    """
    scoring = _scoring(type(module).__name__, attention_mask, packing.kernel, options)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
    heads = heads_from_positions(query, key, value, packing.group)
    attend = {"sdpa": _sdpa, "flash": _flash, "varlen": _varlen}[packing.kernel]
    return positions_from_heads(attend(*heads, packing, scoring), packing.group)[None], None


def _scoring(name: str, mask: Tensor | None, kernel: Kernel, options: dict[str, Any]) -> _Scoring:
    window = options.get("sliding_window") if mask is None else mask.shape[-1]
    given = [key for key, value in options.items() if value is not None and (key, value) != ("is_causal", True)]
    given += ["attention_mask"] if mask is not None and mask.numel() else []
    if unknown := sorted({*given} - OPTIONS):
        raise ConfigError(f"model.path: packed attention is not supported with {' and '.join(unknown)} of {name}")
    softcap = options.get("softcap")
    if softcap is not None and kernel != "flash":
        raise ConfigError(
            f"model.attention: {name} caps its scores and requires flash, got {kernel}. Install flash-attn and set "
            "model.attention=flash."
        )
    if window is not None and kernel == "varlen" and "window_size" not in VARLEN_ARGUMENTS:
        raise ConfigError(f"model.attention: varlen requires torch 2.11 for the window of {name}. Set it to sdpa.")
    return _Scoring(options.get("scaling"), window, softcap)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scoring: _Scoring) -> Tensor:
    assert packing.restore is not None
    gqa = key.shape[1] != query.shape[1]
    outs = []
    for bucket in packing.buckets:
        q, k, v = (
            tensor.index_select(0, bucket.rows).unflatten(0, (bucket.n, bucket.length)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        mask = None
        if scoring.window is not None and bucket.length > scoring.window:
            mask = _visible(bucket.length, scoring.window, query.device)
        if bucket.length <= SHORT and query.device.type == "cpu":
            out = _plain(q, k, v, mask, scoring.scale)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=gqa
            )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, packing.restore)


def _visible(length: int, window: int, device: torch.device) -> Tensor:
    """Return bool [L, L]: the keys that each query may attend to, causal and within the window."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _plain(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    """Attend with matrix products: query [n, Hq, L, D], key [n, Hk, L, D], value [n, Hk, L, E] → [n, Hq, L, E]."""
    n, heads, length, size = query.shape
    visible = _visible(length, length, query.device) if visible is None else visible
    hidden = torch.zeros(length, length, dtype=query.dtype, device=query.device).masked_fill_(~visible, -math.inf)
    groups, sharing = n * key.shape[1], heads // key.shape[1]  # query heads that share a key are one product
    stacked = query.reshape(groups, sharing * length, size)
    alpha = size**-0.5 if scale is None else scale
    scores = torch.baddbmm(hidden.repeat(sharing, 1), stacked, key.flatten(0, 1).mT, alpha=alpha)
    return (torch.softmax(scores, -1) @ value.flatten(0, 1)).view(n, heads, length, value.shape[-1])


def _window_size(scoring: _Scoring) -> tuple[int, int]:
    """Return the number of visible positions before and after a token; −1 is no limit."""
    return (-1 if scoring.window is None else scoring.window - 1, 0)


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scoring: _Scoring) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    bounds = (packing.cu_seqlens, packing.cu_seqlens, packing.longest, packing.longest)
    options = {"window_size": _window_size(scoring), "softcap": scoring.softcap or 0.0, "causal": True}
    return cast(Tensor, flash_attn_varlen_func(query, key, value, *bounds, softmax_scale=scoring.scale, **options))


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scoring: _Scoring) -> Tensor:
    bounds = (packing.cu_seqlens, packing.cu_seqlens, packing.longest, packing.longest)
    options: dict[str, Any] = {"scale": scoring.scale, "window_size": _window_size(scoring)}
    sharing = query.shape[1] // key.shape[1]
    if "enable_gqa" in VARLEN_ARGUMENTS:
        options["enable_gqa"] = sharing > 1
    elif sharing > 1:  # torch before 2.12 requires as many heads of keys as of queries
        key, value = key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1)
    if "is_causal" in VARLEN_ARGUMENTS:  # torch 2.10, whose scale is fixed
        options = {"is_causal": True}
        query = query if scoring.scale is None else query * (scoring.scale * query.shape[-1] ** 0.5)
    return cast(Tensor, varlen_attn(query, key, value, *bounds, **options))


def choose_kernel(
    wanted: Kernel | Literal["auto"], device: torch.device, dtype: torch.dtype, has_windows: bool = False
) -> Kernel:
    """Return the kernel to run.

    ``auto`` on CUDA in half precision is flash if installed, else varlen if it supports the windows of a model that
    ``has_windows``; otherwise it is sdpa. Raises ConfigError if the requested kernel cannot run.
    """
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if wanted == "auto":
        has_varlen = not has_windows or "window_size" in VARLEN_ARGUMENTS
        fast: Kernel = "flash" if has_flash else "varlen" if has_varlen else "sdpa"
        return fast if half_on_cuda else "sdpa"
    if wanted != "sdpa" and not half_on_cuda:
        raise ConfigError(
            f"model.attention: {wanted!r} requires CUDA and bfloat16 or float16, got {device.type} and "
            f"{str(dtype).removeprefix('torch.')}. Set it to sdpa or auto."
        )
    if wanted == "flash" and not has_flash:
        raise ConfigError("model.attention: 'flash' requires the package flash-attn. Install it, or use varlen")
    return wanted


def window_mask(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> Tensor | None:
    """Return an empty [1, 1, 0, window] for layers with a sliding window, else None, in place of transformers' masks.

    Some models (Qwen2-MoE, PhiMoE) have their window only in the mask and do not pass it to the attention function.
    Raises ConfigError for masks other than causal ones with a window.
    """
    is_read_by_model = local_size is not None and config.model_type == "doge"
    if is_read_by_model or use_vmap or "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"model.path: packed attention is not supported with the masks of {config.model_type}")
    return None if local_size is None else torch.empty(1, 1, 0, local_size)


def register_packed_attention() -> str:
    """Register ``PACKED_ATTENTION`` with transformers and return this name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, window_mask)
    return PACKED_ATTENTION
