"""The head of a chunk of tokens: its logits, and from ∂loss/∂logits the gradients of hidden states and head, added up
over chunks, those of the head in float32. The softcap is the row kernels'.

N tokens, V vocabulary, H hidden, C rows of a chunk, A of them that have a gradient, r rank of the LoRA factors. With
logits = h·Wᵀ + s·(h·Aᵀ)·Bᵀ and G = ∂loss/∂logits::

    ∂h = G·W + s·(G·B)·A        ∂A = s·(G·B)ᵀ·h        ∂B = Gᵀ·s·(h·Aᵀ)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.backends import Backend, WeightSum
from dapo_kernels.engine.shards import sum_over_ranks
from dapo_kernels.memory import large_tensor
from dapo_kernels.records import BY_VOCAB, Head, LoraFactors, Needs, Plan, accumulate_dtype, on_host

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


def _wide_product_(out: Tensor, dlogits: Tensor, x: Tensor, add: bool) -> None:
    """out = dlogitsᵀ · x, or out += it, in at least float32. Where no GEMM of 16-bit operands leaves that, one in
    bfloat16 is rounded; one in float16 might overflow before the loss is scaled.
    """
    if out.dtype == x.dtype or float32_product(x):
        product_(out, dlogits.t(), x, add)
        return
    wide = x.float() if x.dtype == torch.float16 else x
    size = tile_rows(4 * x.shape[1])
    for start in range(0, dlogits.shape[1], size):
        product = dlogits[:, start : start + size].to(wide.dtype).t() @ wide
        part = out[start : start + size]
        part.add_(product) if add else part.copy_(product)


def low_rank(lora: LoraFactors, hidden: Tensor) -> Tensor:
    """[C, r]: what b is multiplied by."""
    return lora.scale * (hidden @ lora.a.t())


def logits_of(head: Head, rows: Tensor | slice, out: Tensor) -> Tensor:
    """The hidden states of ``rows``, [C, H]; their logits before the softcap, [C, V], in ``out``. A padded head has
    rows behind the V.
    """
    hidden, head = head.hidden[rows], head.first(out.shape[1])
    if head.lora is None:
        _logits(hidden, head.weight, head.bias, out)
    else:  # the small product first: the large one adds to it in passing
        _logits(low_rank(head.lora, hidden), head.lora.b, head.bias, out)
        _add_logits(hidden, head.weight, out)
    return hidden


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if out.dtype != x.dtype:
        _float32_logits(x, weight, out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_logits(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if out.dtype == x.dtype or float32_product(x):
        product_(out, x, weight.t(), add=True)
        return
    x = x.float()
    for part, columns in _float32_parts(weight):
        out[:, part].addmm_(x, columns)


def _float32_logits(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if float32_product(x):
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        return
    x = x.float()
    for part, columns in _float32_parts(weight):
        torch.mm(x, columns, out=out[:, part])


def _float32_parts(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """[H, part] of a part of the vocabulary at a time: a float32 copy of the whole weight would be gigabytes."""
    size = tile_rows(4 * weight.shape[1])
    for start in range(0, weight.shape[0], size):
        part = slice(start, start + size)
        yield part, weight[part].float().t()


class PlainSum:
    """A float32 sum of 16-bit tensors, or a sum of tensors in their own dtype."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self.sum = torch.zeros_like(result, dtype=accumulate_dtype(result.dtype))

    def add(self, rows: slice, part: Tensor) -> None:
        self.sum[rows] += part

    def rounded(self) -> Tensor:
        return self.result.copy_(self.sum)


def sum_bytes(weight: Tensor, vocab: int, needs: Needs) -> int:
    """Of the running sum of dW that several chunks need on a GPU; ``vocab`` its rows."""
    return 4 * vocab * weight.shape[1] if needs.weight and weight.element_size() < 4 else 0


class HeadGradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None = None
    lora_a: Tensor | None = None  # this and the next in float32
    lora_b: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor | None, weight: Tensor | None, sums: dict, dtype: torch.dtype) -> HeadGradients:
        """With the bias's in ``dtype``, as ``weight`` is."""
        return cls(hidden, weight, **{n: x.to(dtype) if n == "bias" else x for n, x in sums.items()})


def small_sums(head: Head, needs: Needs) -> dict[str, Tensor]:
    """Zeros for the gradients of the head that are needed, but the weight's."""
    named = {name: getattr(head, name) for name, needed in zip(needs._fields[2:], needs[2:], strict=True) if needed}
    return {n: torch.zeros_like(x, dtype=accumulate_dtype(x.dtype)) for n, x in named.items() if x is not None}


class LinearLoss(NamedTuple):
    """``RowsLoss`` without ``idle``, and the gradients for grad_output = 1, those needed."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    clip_hit: Tensor | None
    ref_kl: Tensor | None
    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None
    d_lora_a: Tensor | None
    d_lora_b: Tensor | None


class LinearDivergence(NamedTuple):
    """Σ weights · divergence, the divergence of every token, and the gradients for grad_output = 1, those needed."""

    loss: Tensor  # 0-d
    divergence: Tensor  # [N]
    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None
    d_lora_a: Tensor | None
    d_lora_b: Tensor | None


class GradientSum:
    """The gradients of hidden and head, added up over chunks; those of the head in float32. With ``float32_sums`` dW
    and db are handed over so: to a float32 tensor of the caller's, or because a float16 could not hold them before the
    loss is scaled. Rows of a padded head behind its ``vocab`` have zeros.
    """

    def __init__(
        self, head: Head, vocab: int, needs: Needs, n_chunks: int, backend: Backend, float32_sums: bool
    ) -> None:
        hidden, weight = head[:2]
        self.vocab, self.n_chunks, self.n_added = vocab, n_chunks, 0
        own = head.first(vocab)
        self.operand, self.lora = own.weight, own.lora
        self.result_dtype = accumulate_dtype(hidden.dtype) if float32_sums else hidden.dtype
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs.hidden else None
        self.sums = small_sums(head, needs)
        self.padded: Tensor | None = None  # its first rows are one of the next two
        self.weight: Tensor | None = None
        self.weight_sum: WeightSum | None = None
        self.weight_float32: Tensor | None = None
        if needs.weight:
            self._prepare_weight(weight, backend)

    def _prepare_weight(self, weight: Tensor, backend: Backend) -> None:
        # A single chunk needs no running sum, and 32-bit GEMMs add to the result themselves.
        summed = self.n_chunks > 1 and weight.element_size() < 4
        if self.result_dtype != weight.dtype or (summed and float32_product(weight)):
            # The result is made from it at the end: the two would be the peak of memory.
            kept = large_tensor(weight.shape, torch.float32, weight.device, "weight in float32")
            self.padded = kept[0] if kept else weight.new_empty(weight.shape, dtype=torch.float32)
            self.weight_float32 = self.padded[: self.vocab]
            return
        kept = large_tensor(weight.shape, weight.dtype, weight.device, "weight")
        self.padded, zeroed = kept or (torch.empty_like(weight, memory_format=torch.contiguous_format), False)
        self.weight = self.padded if self.vocab == weight.shape[0] else self.padded[: self.vocab]
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
        dlogits = dlogits.to(hidden.dtype)
        d_low = None if self.lora is None else self._through_factors(self.lora, dlogits, hidden)
        if self.hidden is not None:
            own = torch.mm(dlogits, self.operand, out=self.hidden[rows] if isinstance(rows, slice) else None)
            if self.lora is not None and d_low is not None:
                own.addmm_(d_low, self.lora.a)
            if not isinstance(rows, slice):
                self.hidden.index_copy_(0, rows, own)
        if (bias := self.sums.get("bias")) is not None:
            bias[: self.vocab].add_(dlogits.sum(0, dtype=bias.dtype))
        if self.weight_float32 is not None:
            _wide_product_(self.weight_float32, dlogits, hidden, add=self.n_added > 1)
        elif self.weight_sum is not None:
            size = self.tile.shape[0]
            for start in range(0, dlogits.shape[1], size):
                part = slice(start, start + size)
                columns = dlogits[:, part]
                self.weight_sum.add(part, torch.mm(columns.t(), hidden, out=self.tile[: columns.shape[1]]))
        elif self.weight is not None:
            product_(self.weight, dlogits.t(), hidden, add=self._adds_to_weight())

    def _through_factors(self, lora: LoraFactors, dlogits: Tensor, hidden: Tensor) -> Tensor | None:
        """Adds to the sums of the factors; ∂loss/∂(hidden · aᵀ) [A, r], where anything needs it."""
        sum_a, sum_b = self.sums.get("lora_a"), self.sums.get("lora_b")
        if sum_b is not None:
            _wide_product_(sum_b[: self.vocab], dlogits, low_rank(lora, hidden), add=True)
        if self.hidden is None and sum_a is None:
            return None
        d_low = lora.scale * (dlogits @ lora.b)
        if sum_a is not None:
            sum_a.addmm_(d_low.to(sum_a.dtype).t(), hidden.to(sum_a.dtype))
        return d_low

    def _adds_to_weight(self) -> bool:
        assert self.weight is not None
        return self.n_chunks > 1 if on_host(self.weight) else self.n_added > 1

    def results(self) -> HeadGradients:
        return HeadGradients.of(self.hidden, self._weight(), self.sums, self.result_dtype)

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


# --- on their way to autograd -------------------------------------------------------------------------------


def gradient_unit(dtype: torch.dtype, weights: Tensor) -> tuple[Tensor, Tensor | float]:
    """Weights of tokens at the scale at which a gradient formed together with its loss is held, and that scale.

    In float16 the entries of a token mean's gradient, p/N, would vanish below 6e-8, before a loss scaler's factor (the
    ``grad_output``) is known. A power of two that brings the heaviest token's weight up to 2⁻⁶ leaves room at both
    ends; dividing the loss by it again divides what reaches the backward pass. Other dtypes need none.
    """
    if dtype != torch.float16 or weights.numel() == 0:
        return weights, 1.0
    heaviest = weights.amax()
    unit = torch.exp2(-6.0 - torch.floor(torch.log2(heaviest))).clamp(min=1.0)
    unit = torch.where(heaviest > 0, unit, 1.0)
    return weights * unit, unit


def wants_float32_sums(head: Head, plan: Plan) -> bool:
    """Whether gradients of weight and bias that are formed with the loss wait for ``grad_output`` in float32."""
    return plan.main_grad is not None or head.hidden.dtype == torch.float16


def fake_gradients(head: Head, needs: Needs, float32_sums: bool) -> HeadGradients:
    dtype = accumulate_dtype(head.hidden.dtype) if float32_sums else head.hidden.dtype
    hidden = head.hidden.new_empty(head.hidden.shape) if needs.hidden else None
    weight = head.weight.new_empty(head.weight.shape, dtype=dtype) if needs.weight else None
    return HeadGradients.of(hidden, weight, small_sums(head, needs), dtype)


def handed_over(
    gradients: HeadGradients, dtype: torch.dtype, main_grad: Tensor | None, group: str | None, partial_hidden: bool
) -> dict[str, Tensor | None]:
    """To autograd; the weight's to ``main_grad``, where there is one. What all ranks of a group share is added up."""
    handed: dict[str, Tensor | None] = {}
    for name, x in [(name, x) for name, x in zip(gradients._fields, gradients, strict=True) if x is not None]:
        if group is not None and name not in BY_VOCAB and not (name == "hidden" and partial_hidden):
            x = sum_over_ranks(x, group)
        if name == "weight" and main_grad is not None:
            main_grad += x
        else:
            handed[f"head_{name}"] = x.to(dtype)
    return handed


class Unsaved(NamedTuple):
    """Autograd would refuse a saved ``main_grad`` that another micro-batch has added to meanwhile."""

    tensors: list[Tensor | None]
