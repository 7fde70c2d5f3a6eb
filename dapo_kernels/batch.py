"""The boundary: what a caller passes is checked here, once, and flattened to one row per token.

T tokens packed, or B×L padded; S sequences; N = T or B·L rows. Nothing after this module looks at shapes again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.aggregate import token_weights
from dapo_kernels.objectives import Objective, is_number
from dapo_kernels.tokens import Tokens, accumulate_dtype

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Layout:
    """How the caller's tokens lie: packed [T] (with or without sequence bounds) or padded [B, L]."""

    caller: str
    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype  # of per-token arithmetic
    cu_seqlens: Tensor | None

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape)

    @property
    def n_sequences(self) -> int | None:
        if len(self.shape) == 2:
            return self.shape[0]
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def sequence_ids(self) -> Tensor | None:
        """int64 [N]: the sequence of every token; ``None`` when the packed layout has no bounds."""
        positions = torch.arange(self.n_rows, device=self.device)
        if len(self.shape) == 2:
            return positions // max(self.shape[1], 1)
        if self.cu_seqlens is None:
            return None
        return torch.searchsorted(self.cu_seqlens.to(torch.int64), positions, right=True) - 1

    def describe(self) -> str:
        return f"[T]={list(self.shape)}" if len(self.shape) == 1 else f"[B, L]={list(self.shape)}"

    def fail(self, name: str, expected: str, got: object) -> ValueError:
        return ValueError(f"{self.caller}: {name} must be {expected}, got {got}")

    def per_token(self, name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A per-token tensor, flat [N]."""
        value = self._tensor(name, value)
        if tuple(value.shape) != self.shape:
            raise self.fail(name, self.describe(), list(value.shape))
        return value.reshape(-1).to(dtype or self.dtype).contiguous()

    def per_token_or_sequence(self, name: str, value: Any, sequence_ids: Tensor | None) -> Tensor:
        """A per-token or per-sequence tensor, spread over tokens: flat [N]."""
        value = self._tensor(name, value)
        if tuple(value.shape) == self.shape:
            return self.per_token(name, value)
        n = self.n_sequences
        if n is not None and tuple(value.shape) == (n,):
            assert sequence_ids is not None
            return value.to(self.dtype)[sequence_ids]
        expected = self.describe()
        if n is not None:
            expected += f" or {'[S]' if len(self.shape) == 1 else '[B]'}=[{n}]"
        elif value.dim() == 1:
            expected += ", or per sequence with cu_seqlens"
        raise self.fail(name, expected, list(value.shape))

    def _tensor(self, name: str, value: Any) -> Tensor:
        check_tensor(self.caller, name, value, f"a tensor {self.describe()}")
        if value.device != self.device:
            raise self.fail(name, f"on {self.device} like the rest", value.device)
        if value.is_complex():
            raise TypeError(f"{self.caller}: {name} must be real, got {value.dtype}")
        return value

    def number(self, value: Tensor) -> Tensor:
        """A 0-d tensor. One of the host stays there: arithmetic takes it as it is, a copy to a GPU would wait."""
        return value.detach() if value.device.type == "cpu" else value.detach().to(self.device)

    def temperature(self, value: float | Tensor) -> tuple[float, Tensor | None]:
        """A scalar temperature, or one per token (then the scalar is unused)."""
        if isinstance(value, Tensor) and value.dim() > 0:
            return 1.0, self.per_token("temperature", value).detach()
        if isinstance(value, Tensor):
            ones = torch.ones(self.n_rows, dtype=self.dtype, device=self.device)
            return 1.0, ones * self.number(value).to(self.dtype)
        if not is_number(value):
            raise TypeError(
                f"{self.caller}: temperature must be a number or a tensor {self.describe()}, got {type(value).__name__}"
            )
        if not (value > 0 and math.isfinite(value)):
            raise self.fail("temperature", "positive and finite", value)
        return float(value), None


def check_tensor(caller: str, name: str, value: Any, expected: str = "a tensor") -> None:
    """A tensor that this rank has all of."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be {expected}, got {type(value).__name__}")
    if hasattr(value, "device_mesh"):  # DTensor has it; importing that class takes as long as the rest of the package
        raise TypeError(
            f"{caller}: {name} must be {expected} that this rank has all of, got a DTensor: call the loss inside the "
            "forward of the module that fully_shard wrapped (docs/guide.md, FSDP2), or pass its full_tensor()"
        )


def layout_of(caller: str, name: str, rows: Any, cu_seqlens: Tensor | None = None) -> Layout:
    """The layout that ``rows``, [T, ·] or [B, L, ·] floating point, gives the call."""
    check_tensor(caller, name, rows)
    if rows.dim() not in (2, 3):
        raise ValueError(f"{caller}: {name} must be packed [T, ·] or padded [B, L, ·], got {list(rows.shape)}")
    if rows.dtype not in _FLOATS:
        raise TypeError(f"{caller}: {name} must be float32, bfloat16, float16 or float64, got {rows.dtype}")
    return _layout(caller, tuple(rows.shape[:-1]), rows.device, accumulate_dtype(rows.dtype), cu_seqlens)


def token_layout(caller: str, name: str, values: Any, cu_seqlens: Tensor | None) -> Layout:
    """The layout that a per-token tensor, [T] or [B, L], gives the call."""
    check_tensor(caller, name, values)
    if values.dim() not in (1, 2):
        raise ValueError(f"{caller}: {name} must be packed [T] or padded [B, L], got {list(values.shape)}")
    if values.dtype not in _FLOATS:
        raise TypeError(f"{caller}: {name} must be floating point, got {values.dtype}")
    return _layout(caller, tuple(values.shape), values.device, accumulate_dtype(values.dtype), cu_seqlens)


def _layout(
    caller: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, cu_seqlens: Tensor | None
) -> Layout:
    layout = Layout(caller, shape, device, dtype, cu_seqlens)
    if cu_seqlens is None:
        return layout
    if len(shape) == 2:
        raise ValueError(f"{caller}: cu_seqlens belongs to the packed layout [T]; the input is padded {list(shape)}")
    check_tensor(caller, "cu_seqlens", cu_seqlens, "an int32 tensor [S+1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{caller}: cu_seqlens must be an int32 tensor [S+1], got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise layout.fail("cu_seqlens", "[S+1]", list(cu_seqlens.shape))
    if cu_seqlens.device != device:
        raise layout.fail("cu_seqlens", f"on {device} like the rest", cu_seqlens.device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        _check_bounds(layout, cu_seqlens)
    return layout


def _check_bounds(layout: Layout, cu_seqlens: Tensor) -> None:
    """Values are looked at on the CPU only: on a GPU that would wait for the device."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != layout.n_rows or bool((cu_seqlens.diff() < 0).any()):
        raise layout.fail("cu_seqlens", f"non-decreasing from 0 to T={layout.n_rows}", _short(cu_seqlens.tolist()))


def _short(values: list[int]) -> str:
    if len(values) <= 8:
        return str(values)
    return f"[{', '.join(map(str, values[:4]))}, …, {', '.join(map(str, values[-3:]))}]"


def check_flag(layout: Layout, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{layout.caller}: {name} must be True or False, got {value!r}")


def check_rows_apart(layout: Layout, logits: Tensor) -> None:
    """A gradient written over the logits needs every logit to have memory of its own."""
    reach = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"{layout.caller}: inplace_backward=True needs logits whose rows do not share memory; got strides "
                f"{list(logits.stride())} for {list(logits.shape)}: pass logits.contiguous(), or leave it False"
            )
        reach += (size - 1) * stride


def live_tokens(layout: Layout, mask: Tensor | None) -> Tensor:
    """bool [N]: which tokens train."""
    if mask is None:
        return torch.ones(layout.n_rows, dtype=torch.bool, device=layout.device)
    flat = layout.per_token("mask", mask, mask.dtype if isinstance(mask, Tensor) else None)
    if flat.dtype == torch.bool:
        return flat
    if flat.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(((flat == 0) | (flat == 1)).all()):
        raise layout.fail("mask", "bool, or 0 and 1; weights go to importance_weights", "other values")
    return flat != 0


def target_tokens(layout: Layout, target_ids: Any) -> Tensor:
    """int64 [N]."""
    if isinstance(target_ids, Tensor) and (target_ids.is_floating_point() or target_ids.dtype == torch.bool):
        raise TypeError(f"{layout.caller}: target_ids must be integers, got {target_ids.dtype}")
    return layout.per_token("target_ids", target_ids, torch.int64)


@dataclass(frozen=True)
class LossCall:
    """One validated call of a loss: what is left to decide is done per token."""

    layout: Layout
    objective: Objective  # without the selections that ``tokens`` already carries
    tokens: Tokens
    sequence_ids: Tensor | None
    selection: Tensor | float | None  # bool [N], or the entropy threshold of top_entropy
    generator: torch.Generator | None

    @property
    def needs_entropy(self) -> bool:
        return self.objective.entropy_coef != 0 or self.objective.top_entropy is not None


def loss_call(
    layout: Layout,
    objective: Objective,
    *,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    ref_logprobs: Tensor | None,
    importance_weights: Tensor | None,
    denominator: float | Tensor | None,
    selection: Tensor | float | None,
    generator: torch.Generator | None,
) -> LossCall:
    """Check a loss call and flatten it; every token gets its weight in the scalar."""
    _check_combination(layout, objective, old_logprobs, ref_logprobs)
    live = live_tokens(layout, mask)
    sequence_ids = layout.sequence_ids()
    denominator = _denominator(layout, denominator)
    weights = token_weights(objective, live, sequence_ids, layout.n_sequences or 0, denominator, layout.dtype)

    def spread(name: str, value: Tensor | None) -> Tensor | None:
        return None if value is None else layout.per_token_or_sequence(name, value, sequence_ids).detach()

    def per_token(name: str, value: Tensor | None) -> Tensor | None:
        return None if value is None else layout.per_token(name, value).detach()

    advantages_ = spread("advantages", advantages)
    assert advantages_ is not None
    tokens = Tokens(
        live=live,
        weights=weights,
        advantages=advantages_,
        old_logprobs=per_token("old_logprobs", old_logprobs),
        ref_logprobs=per_token("ref_logprobs", ref_logprobs),
        importance_weights=spread("importance_weights", importance_weights),
    )
    if objective.max_old_prob is not None:
        assert tokens.old_logprobs is not None
        sure = tokens.old_logprobs > math.log(objective.max_old_prob)  # a NaN is not sure: it stays, and shows
        tokens = tokens._replace(weights=torch.where(sure, 0.0, weights))
    selection = _selection(layout, objective, selection)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{layout.caller}: generator must be a torch.Generator, got {type(generator).__name__}")
    objective, tokens = _settle(objective, tokens, selection)
    return LossCall(layout, objective, tokens, sequence_ids, selection, generator)


def _selection(layout: Layout, objective: Objective, value: Tensor | float | None) -> Tensor | float | None:
    """A precomputed selection: bool [N], or a threshold for ``top_entropy``."""
    if value is None:
        return None
    name = objective.batch_selection
    if name is None:
        raise ValueError(f"{layout.caller}: selection has no use: the objective selects no tokens of the batch")
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.dtype != torch.bool:
            raise TypeError(f"{layout.caller}: selection per token must be bool, got {value.dtype}")
        return layout.per_token("selection", value, torch.bool)
    if name != "top_entropy" or not (isinstance(value, Tensor) or is_number(value)):
        threshold = ", or an entropy threshold" if name == "top_entropy" else ""
        raise layout.fail("selection", f"bool {layout.describe()} with {name}{threshold}", repr(value))
    return value.to(layout.dtype) if isinstance(value, Tensor) else float(value)


def _settle(objective: Objective, tokens: Tokens, selection: Tensor | float | None) -> tuple[Objective, Tokens]:
    """A selection known beforehand needs no second pass: fold it into the tokens."""
    if not isinstance(selection, Tensor) or selection.dim() == 0:
        return objective, tokens
    if objective.top_entropy is not None:
        tokens = tokens._replace(weights=torch.where(selection, tokens.weights, 0.0))
        return replace(objective, top_entropy=None), tokens
    if objective.clip_cov is not None:
        return replace(objective, clip_cov=None), without_policy_term(tokens, selection)
    return objective, tokens


def without_policy_term(tokens: Tokens, selection: Tensor) -> Tokens:
    """The selected tokens keep their KL and entropy terms and lose their policy gradient."""
    base = torch.ones_like(tokens.weights) if tokens.importance_weights is None else tokens.importance_weights
    return tokens._replace(importance_weights=torch.where(selection, 0.0, base))


def _check_combination(
    layout: Layout, objective: Objective, old_logprobs: Tensor | None, ref_logprobs: Tensor | None
) -> None:
    if objective.per_sequence is not None and layout.n_sequences is None:
        raise ValueError(
            f"{layout.caller}: {objective.per_sequence} works per sequence: pass cu_seqlens (int32 [S+1]) with the "
            "packed layout"
        )
    if objective.aggregate == "seq-mean-token-sum-norm" and objective.length_norm is None:
        raise ValueError(
            f"{layout.caller}: aggregate='seq-mean-token-sum-norm' needs length_norm, a constant number of tokens "
            "(Dr.GRPO: the longest response allowed)"
        )
    if objective.kl_coef != 0 and ref_logprobs is None:
        raise ValueError(f"{layout.caller}: kl_coef={objective.kl_coef:g} needs ref_logprobs; or pass kl_coef=0.0")
    if objective.kl_coef == 0 and ref_logprobs is not None:
        raise ValueError(f"{layout.caller}: ref_logprobs has no use with kl_coef=0; pass kl_coef, or leave it out")
    if objective.max_old_prob is not None and old_logprobs is None:
        raise ValueError(f"{layout.caller}: max_old_prob={objective.max_old_prob:g} needs old_logprobs")


def _denominator(layout: Layout, value: float | Tensor | None) -> float | Tensor | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise layout.fail("denominator", "a number or a 0-d tensor", list(value.shape))
        return layout.number(value).to(layout.dtype)
    if not is_number(value):
        raise TypeError(f"{layout.caller}: denominator must be a number or a 0-d tensor, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise layout.fail("denominator", "positive and finite", value)
    return float(value)
