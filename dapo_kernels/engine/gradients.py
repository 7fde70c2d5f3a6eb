"""∂loss/∂(hidden, weight, bias) of the path from hidden states, added up over chunks of tokens; dW and db in float32.

N tokens, V vocabulary, H hidden, A rows of a chunk that have a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.backends import Backend, WeightSum
from dapo_kernels.memory import large_tensor
from dapo_kernels.records import Head, Needs, accumulate_dtype, on_host

# Bytes of a tile of the weight or of its gradient: it stays in the L2/L3 cache between GEMM and addition. Below
# _TILE_ROWS rows a GEMM would not run at its rate.
_TILE_BYTES = 4 * 2**20
_TILE_ROWS = 1024
# 16-bit operands, float32 result (and, from torch 2.10, float32 addend): CUDA only, not in every ROCm build. Elsewhere
# a chunk's product is rounded to 16 bits before it is added in float32.
FLOAT32_PRODUCT = "dtype_out" in torch.ops.aten.addmm.overloads() and torch.version.hip is None


def tile_rows(bytes_per_row: int) -> int:
    return max(_TILE_ROWS, _TILE_BYTES // bytes_per_row)


def float32_product(x: Tensor) -> bool:
    """Whether GEMMs of operands like ``x`` can leave their result in float32."""
    return FLOAT32_PRODUCT and x.device.type == "cuda" and x.element_size() < 4


def product_(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out = a · b, or out += a · b: one GEMM, in float32 where ``out`` is."""
    if out.dtype == a.dtype:
        # beta 0 writes the result without reading what was there.
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


class PlainSum:
    """A float32 sum of 16-bit tensors, or a sum of tensors in their own dtype."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self.sum = torch.zeros_like(result, dtype=accumulate_dtype(result.dtype))

    def add(self, rows: slice, part: Tensor) -> None:
        self.sum[rows] += part

    def rounded(self) -> Tensor:
        return self.result.copy_(self.sum)


def first_rows(x: Tensor, n: int) -> Tensor:
    return x if n == x.shape[0] else x[:n]


def sum_bytes(weight: Tensor, vocab: int, needs: Needs) -> int:
    """Of the running sum of dW that several chunks need on a GPU; ``vocab`` its rows."""
    return 4 * vocab * weight.shape[1] if needs.weight and weight.element_size() < 4 else 0


class HeadGradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class GradientSum:
    """∂loss/∂(hidden, weight, bias), added up over chunks; dW and db in float32. With ``float32_sums`` they are handed
    over so: to a float32 tensor of the caller's, or because a float16 could not hold them before the loss is scaled.
    Rows of a padded head behind its ``vocab`` have zeros.
    """

    def __init__(
        self, head: Head, vocab: int, needs: Needs, n_chunks: int, backend: Backend, float32_sums: bool
    ) -> None:
        hidden, weight, bias = head[:3]
        self.vocab = vocab
        self.operand = first_rows(weight, vocab)
        self.result_dtype = accumulate_dtype(weight.dtype) if float32_sums else weight.dtype
        self.n_chunks = n_chunks
        self.n_added = 0
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs.hidden else None
        self.bias: Tensor | None = None
        self.padded: Tensor | None = None  # its first rows are one of the next two
        self.weight: Tensor | None = None
        self.weight_sum: WeightSum | None = None
        self.weight_float32: Tensor | None = None
        if needs.bias:
            assert bias is not None
            self.bias = torch.zeros_like(bias, dtype=accumulate_dtype(bias.dtype))
        if needs.weight:
            self._prepare_weight(weight, backend)

    def _prepare_weight(self, weight: Tensor, backend: Backend) -> None:
        # A single chunk needs no running sum, and 32-bit GEMMs add to the result themselves.
        summed = self.n_chunks > 1 and weight.element_size() < 4
        if self.result_dtype != weight.dtype or (summed and float32_product(weight)):
            # The result is made from it at the end: the two would be the peak of memory.
            kept = large_tensor(weight.shape, torch.float32, weight.device, "weight in float32")
            self.padded = kept[0] if kept else weight.new_empty(weight.shape, dtype=torch.float32)
            self.weight_float32 = first_rows(self.padded, self.vocab)
            return
        kept = large_tensor(weight.shape, weight.dtype, weight.device, "weight")
        self.padded, zeroed = kept or (torch.empty_like(weight, memory_format=torch.contiguous_format), False)
        self.weight = first_rows(self.padded, self.vocab)
        if self.n_chunks != 1 and on_host(weight) and not zeroed:
            self.weight.zero_()
        if summed:
            self.weight_sum = (backend.weight_sum(self.weight) if on_host(weight) else None) or PlainSum(self.weight)
            self.tile = weight.new_empty(tile_rows(2 * weight.shape[1]), weight.shape[1])

    def add(self, dlogits: Tensor, hidden: Tensor, rows: Tensor | slice) -> None:
        """``dlogits`` [A, V] of the hidden states [A, H] that stand at ``rows`` of the input."""
        if dlogits.shape[0] == 0:
            return
        self.n_added += 1
        dlogits = dlogits.to(self.operand.dtype)
        if self.hidden is not None:
            if isinstance(rows, slice):
                torch.mm(dlogits, self.operand, out=self.hidden[rows])
            else:
                self.hidden.index_copy_(0, rows, dlogits @ self.operand)
        if self.bias is not None:
            first_rows(self.bias, self.vocab).add_(dlogits.sum(0, dtype=self.bias.dtype))
        if self.weight_float32 is not None and not float32_product(hidden):
            self._add_float32(self.weight_float32, dlogits, hidden)
        elif self.weight_float32 is not None:
            product_(self.weight_float32, dlogits.t(), hidden, add=self.n_added > 1)
        elif self.weight_sum is not None:
            size = self.tile.shape[0]
            for start in range(0, dlogits.shape[1], size):
                part = slice(start, start + size)
                columns = dlogits[:, part]
                self.weight_sum.add(part, torch.mm(columns.t(), hidden, out=self.tile[: columns.shape[1]]))
        elif self.weight is not None:
            product_(self.weight, dlogits.t(), hidden, add=self._adds_to_weight())

    def _add_float32(self, total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
        """Where no GEMM of 16-bit operands leaves float32. A product in float16 may overflow before the loss is scaled;
        one in bfloat16 is rounded.
        """
        wide = hidden.float() if hidden.dtype == torch.float16 else hidden
        size = tile_rows(4 * hidden.shape[1])
        for start in range(0, dlogits.shape[1], size):
            product = dlogits[:, start : start + size].to(wide.dtype).t() @ wide
            part = total[start : start + size]
            part.add_(product) if self.n_added > 1 else part.copy_(product)

    def _adds_to_weight(self) -> bool:
        assert self.weight is not None
        return self.n_chunks > 1 if on_host(self.weight) else self.n_added > 1

    def results(self) -> HeadGradients:
        bias = None if self.bias is None else self.bias.to(self.result_dtype)
        return HeadGradients(self.hidden, self._weight(), bias)

    def _weight(self) -> Tensor | None:
        if self.padded is None:
            return None
        if self.n_added == 0:
            self.padded.zero_()
        elif self.vocab < self.padded.shape[0]:
            self.padded[self.vocab :].zero_()
        if self.weight_sum is not None:
            self.weight_sum.rounded()
        return self.padded.to(self.result_dtype)
