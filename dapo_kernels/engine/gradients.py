"""The head of a chunk of tokens: its logits, and the gradients of hidden states and head from ∂loss/∂logits.

Gradients are summed over chunks, those of the head in float32. The row kernels apply the softcap.
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

# Bytes of a tile of the weight or of its gradient, so that it stays in the L2/L3 cache between GEMM and addition. With
# fewer than _TILE_ROWS rows a GEMM would not run at its full rate.
_TILE_BYTES = 4 * 2**20
_TILE_ROWS = 1024
# 16-bit operands with float32 result (from torch 2.10 also addend) exist only for CUDA, not in every ROCm build, and
# for its stand-in without values. Otherwise a chunk's product is rounded to 16 bits before it is added in float32.
FLOAT32_PRODUCT = "dtype_out" in torch.ops.aten.addmm.overloads() and torch.version.hip is None


def tile_rows(bytes_per_row: int) -> int:
    return max(_TILE_ROWS, _TILE_BYTES // max(1, bytes_per_row))


def float32_product(x: Tensor) -> bool:
    """Return whether GEMMs with operands like ``x`` can return float32."""
    return FLOAT32_PRODUCT and x.device.type in ("cuda", "meta") and x.element_size() < 4


def product_(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Compute out = a · b, or out += a · b, in one GEMM with a result in the dtype of ``out``."""
    if out.dtype == a.dtype:
        # With beta 0 the old contents are not read.
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _wide_product_(out: Tensor, dlogits: Tensor, x: Tensor, add: bool) -> None:
    """Compute out = dlogitsᵀ · x, or add it to out, in at least float32. Without a GEMM of 16-bit operands to float32,
    one in bfloat16 is rounded; one in float16 could overflow before the loss is scaled.
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
    """Return scale · (hidden · aᵀ), [C, r], the factor of b."""
    return lora.scale * (hidden @ lora.a.t())


def logits_of(head: Head, rows: Tensor | slice, out: Tensor) -> Tensor:
    """Return the hidden states of ``rows``, [C, H]. Write their logits before the softcap, [C, V], into ``out``. Rows
    of a padded head behind the first V are ignored.
    """
    hidden, head = head.hidden[rows], head.first(out.shape[1])
    if head.lora is None:
        _logits(hidden, head.weight, head.bias, out)
    else:  # the small product first, so that the large GEMM adds to it
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
    """Yield [H, part] in float32 for parts of the vocabulary: a copy of the whole weight would take gigabytes."""
    size = tile_rows(4 * weight.shape[1])
    for start in range(0, weight.shape[0], size):
        part = slice(start, start + size)
        yield part, weight[part].float().t()


class PlainSum:
    """A float32 sum of 16-bit tensors, or a sum of other tensors in their own dtype."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self.sum = torch.zeros_like(result, dtype=accumulate_dtype(result.dtype))

    def add(self, rows: slice, part: Tensor) -> None:
        self.sum[rows] += part

    def rounded(self) -> Tensor:
        return self.result.copy_(self.sum)


def sum_bytes(weight: Tensor, vocab: int, needs: Needs) -> int:
    """Return the bytes of the running sum of dW that several chunks need on a GPU. ``vocab``: its rows."""
    return 4 * vocab * weight.shape[1] if needs.weight and weight.element_size() < 4 else 0


class HeadGradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None = None
    lora_a: Tensor | None = None  # these two in float32
    lora_b: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor | None, weight: Tensor | None, sums: dict, dtype: torch.dtype) -> HeadGradients:
        """Return the record, with the bias's gradient in ``dtype``, like ``weight``."""
        return cls(hidden, weight, **{n: x.to(dtype) if n == "bias" else x for n, x in sums.items()})


def small_sums(head: Head, needs: Needs) -> dict[str, Tensor]:
    """Return zeros for the required gradients of the head, except the weight's."""
    named = {name: getattr(head, name) for name, needed in zip(needs._fields[2:], needs[2:], strict=True) if needed}
    return {n: torch.zeros_like(x, dtype=accumulate_dtype(x.dtype)) for n, x in named.items() if x is not None}


class LinearLoss(NamedTuple):
    """``RowsLoss`` without ``idle``, and the required gradients for grad_output = 1."""

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
    """Σ weights · divergence, the divergence of every token, and the required gradients for grad_output = 1."""

    loss: Tensor  # 0-d
    divergence: Tensor  # [N]
    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None
    d_lora_a: Tensor | None
    d_lora_b: Tensor | None


class GradientSum:
    """The gradients of hidden and head, summed over chunks, those of the head in float32.

    With ``float32_sums`` dW and db are returned in float32: to add to a float32 tensor of the caller, or because
    float16 could not represent them before the loss is scaled. Rows of a padded head behind ``vocab`` get zeros.
    """

    def __init__(
        self, head: Head, vocab: int, needs: Needs, n_chunks: int, backend: Backend, float32_sums: bool
    ) -> None:
        hidden, weight = head[:2]
        self.vocab, self.n_chunks, self.n_added = vocab, n_chunks, 0
        unpadded = head.first(vocab)
        self.operand, self.lora = unpadded.weight, unpadded.lora
        self.result_dtype = accumulate_dtype(hidden.dtype) if float32_sums else hidden.dtype
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs.hidden else None
        self.sums = small_sums(head, needs)
        self.padded: Tensor | None = None  # its first rows are ``weight`` or ``weight_float32``
        self.weight: Tensor | None = None
        self.weight_sum: WeightSum | None = None
        self.weight_float32: Tensor | None = None
        if needs.weight:
            self._prepare_weight(weight, backend)

    def _prepare_weight(self, weight: Tensor, backend: Backend) -> None:
        # A single chunk needs no running sum, and 32-bit GEMMs can add to the result.
        summed = self.n_chunks > 1 and weight.element_size() < 4
        if self.result_dtype != weight.dtype or (summed and float32_product(weight)):
            # The result is created from the sum at the end, because both together would be the peak of memory.
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
        """Add the gradients from ``dlogits`` [A, V] and the hidden states [A, H] at ``rows`` of the input."""
        if dlogits.shape[0] == 0:
            return
        self.n_added += 1
        dlogits = dlogits.to(hidden.dtype)
        d_low = None if self.lora is None else self._through_factors(self.lora, dlogits, hidden)
        if self.hidden is not None:
            d_hidden = torch.mm(dlogits, self.operand, out=self.hidden[rows] if isinstance(rows, slice) else None)
            if self.lora is not None and d_low is not None:
                d_hidden.addmm_(d_low, self.lora.a)
            if not isinstance(rows, slice):
                self.hidden.index_copy_(0, rows, d_hidden)
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
        """Add to the gradients of the factors. Return ∂loss/∂(hidden · aᵀ) [A, r] if anything needs it."""
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


OF_LOGITS, OF_HIDDEN = 4.0, 2.0  # log2 of the largest weight of a float16 gradient


def gradient_unit(
    dtype: torch.dtype, largest: float, weights: Tensor, *factors: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Return token weights scaled for a gradient that is computed together with its loss, and the scale.

    A loss scaler's factor (``grad_output``) is known only later, and in float16 entries below 6e-8 would be lost by
    then. The scale is a power of two: the largest weight · |``factors``| becomes 2^``largest``. With ``OF_LOGITS``
    and the advantages as a factor, the ratio has 2¹¹ left above, and entries down to 2⁻²⁸ of the largest stay;
    ``OF_HIDDEN`` leaves 4 for the product with the output head. A product of factors counts as at least 1, because KL,
    entropy or a user-defined loss do not shrink with the advantage. Dividing the loss by the scale divides what reaches
    the backward pass. Other dtypes need no scale.
    """
    if dtype != torch.float16 or weights.numel() == 0:
        return weights, 1.0
    size = torch.ones_like(weights)
    for factor in factors:
        size = size if factor is None else size * factor.abs()
    heaviest = torch.where(weights == 0, 0.0, weights * size.clamp(min=1.0)).amax()
    unit = torch.exp2(largest - torch.floor(torch.log2(heaviest)).clamp(-60.0, 60.0)).nan_to_num(1.0)
    return weights * unit, unit


def wants_float32_sums(head: Head, plan: Plan) -> bool:
    """Return whether gradients of weight and bias computed with the loss stay in float32 until ``grad_output``."""
    return plan.main_grad is not None or head.hidden.dtype == torch.float16


def fake_gradients(head: Head, needs: Needs, float32_sums: bool) -> HeadGradients:
    dtype = accumulate_dtype(head.hidden.dtype) if float32_sums else head.hidden.dtype
    hidden = head.hidden.new_empty(head.hidden.shape) if needs.hidden else None
    weight = head.weight.new_empty(head.weight.shape, dtype=dtype) if needs.weight else None
    return HeadGradients.of(hidden, weight, small_sums(head, needs), dtype)


def autograd_gradients(
    gradients: HeadGradients, dtype: torch.dtype, main_grad: Tensor | None, group: str | None, partial_hidden: bool
) -> dict[str, Tensor | None]:
    """Return the gradients for autograd; add the weight's to ``main_grad`` if given. Sum those shared by all ranks."""
    gradients_by_name: dict[str, Tensor | None] = {}
    for name, x in [(name, x) for name, x in zip(gradients._fields, gradients, strict=True) if x is not None]:
        if group is not None and name not in BY_VOCAB and not (name == "hidden" and partial_hidden):
            x = sum_over_ranks(x, group)
        if name == "weight" and main_grad is not None:
            main_grad += x
        else:
            gradients_by_name[f"head_{name}"] = x.to(dtype)
    return gradients_by_name


class Unsaved(NamedTuple):
    """Tensors outside autograd's saved ones: it would refuse a ``main_grad`` that another micro-batch has changed."""

    tensors: list[Tensor | None]
