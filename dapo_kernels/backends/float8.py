"""The products of a head in float8 (e4m3: four binary digits, up to 448), every row of hidden states and of weight with
a scale of its own.

C tokens of a chunk, V vocabulary, H hidden, x̂ = values · scale what stands for a row x. On a GPU torch's scaled matrix
product, elsewhere the same numbers multiplied in float32::

    logits = ĥ·Ŵᵀ        ∂h = G·Ŵ        ∂W = Gᵀ·ĥ        (G = ∂loss/∂logits; ∂h, ∂W in the dtype of hidden)

These are the gradients with respect to ĥ and Ŵ, handed to h and W as they are (straight through the rounding).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dapo_kernels.records import Quantized, on_host

FLOAT8 = torch.float8_e4m3fn
_LARGEST = 448.0
# cuBLAS takes columns and inner dimension in multiples of 16 bytes.
PRODUCT_MULTIPLE = 16
# Bytes of a float32 tile of the weight. On a GPU every tile costs the gradient of hidden a pass over [C, H].
_TILE_BYTES, _DEVICE_TILE_BYTES = 4 * 2**20, 128 * 2**20


def _tiles(x: Tensor, start: int = 0) -> Iterator[slice]:
    size = max(1, (_TILE_BYTES if on_host(x) else _DEVICE_TILE_BYTES) // (4 * max(1, x.shape[1])))
    for first in range(start, x.shape[0], size):
        yield slice(first, first + size)


def quantize(x: Tensor) -> Quantized:
    """By row, the largest entry to the largest number, as vLLM's dynamic scales per token and output channel: nothing
    saturates. A row that is not finite becomes NaN.
    """
    largest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = (largest / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return Quantized((x.float() / scale).to(FLOAT8), scale)


def quantized_weight(weight: Tensor) -> Quantized:
    """``quantize``, a tile at a time: a float32 copy of the whole weight would be gigabytes. A compiler makes none."""
    if torch.compiler.is_compiling():
        return quantize(weight)
    scale = weight.new_empty(weight.shape[0], 1, dtype=torch.float32)
    out = Quantized(torch.empty_like(weight, dtype=FLOAT8, memory_format=torch.contiguous_format), scale)
    for part in _tiles(weight):
        out.values[part], out.scale[part] = quantize(weight[part])
    return out


def dequantized(x: Quantized, dtype: torch.dtype) -> Tensor:
    return (x.values.float() * x.scale).to(dtype)


def dequantized_tiles(x: Quantized, dtype: torch.dtype, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Of a weight, from row ``start`` on."""
    for part in _tiles(x.values, start):
        yield part, dequantized(x.at(part), dtype)


def float8_logits(hidden: Tensor, weight: Quantized, out: Tensor) -> None:
    """out = ĥ·Ŵᵀ, added up in float32 and rounded once."""
    x, n_scaled = quantize(hidden), 0
    if not on_host(out):
        n_scaled = out.shape[1] // PRODUCT_MULTIPLE * PRODUCT_MULTIPLE
        _scaled_product(x, weight.at(slice(n_scaled)), out[:, :n_scaled])
    if n_scaled < out.shape[1]:
        rounded = dequantized(x, torch.float32)
        for part, tile in dequantized_tiles(weight, torch.float32, n_scaled):
            out[:, part] = rounded @ tile.t()


def _scaled_product(x: Quantized, weight: Quantized, out: Tensor) -> None:
    # Compute capability 8.9 has a kernel that takes the rows of a result for contiguous.
    into = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    # Fast accumulation keeps some 14 bits of the sums on Hopper.
    operands = (x.values, weight.values.t(), x.scale, weight.scale.t())
    torch._scaled_mm(*operands, out_dtype=out.dtype, use_fast_accum=False, out=into)
    if into is not out:
        out.copy_(into)
