"""The layout of the tokens of a call, and the checks of all per-token arguments.

T tokens packed, or B×L padded; S sequences; N = T or B·L rows. Code behind this boundary does not check shapes again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_kernels.backends import cpu_backend
from dapo_kernels.objectives.table import is_number
from dapo_kernels.records import LARGEST_LOGPROB, RowRequest, accumulate_dtype, on_host, readable

ROUNDED = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *ROUNDED, torch.float64)


class SamplingMask(NamedTuple):
    """The tokens that top-p, top-k or min-p left for sampling each of N tokens, as a packed ragged list.

    Token n was sampled from ``ids[offsets[n] : offsets[n + 1]]``, each id once, in any order; an empty list is the
    whole vocabulary. N = T packed, or B·L padded, row by row. On a GPU, offsets are checked by an asynchronous assert.
    In a compiled graph they are not checked. Neither checks that an id occurs once.

    Example:
        >>> import torch
        >>> from dapo_kernels import SamplingMask, token_logprobs
        >>> sampled_from = SamplingMask.from_lists([[1, 2], []])  # of the second token: the whole vocabulary
        >>> logits, ids = torch.zeros(2, 4), torch.tensor([2, 3])
        >>> token_logprobs(logits, ids, sampling_mask=sampled_from).logprobs.exp().tolist()
        [0.5, 0.25]
    """

    ids: Tensor  # int32 or int64 [K]
    offsets: Tensor  # int32 or int64 [N+1], from 0 to K

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], device: torch.device | str | None = None) -> SamplingMask:
        """Return the mask for one list of ids per token."""
        offsets = torch.tensor([0, *(len(kept) for kept in lists)]).cumsum(0)
        ids = torch.tensor([token for kept in lists for token in kept], dtype=torch.int32)
        return cls(ids.to(device), offsets.to(device))

    @classmethod
    def from_kept(cls, kept: Tensor) -> SamplingMask:
        """Return the mask for bool [T, V] or [B, L, V], True where a token could be sampled, such as ``logits > -inf``
        after truncation. A row that is all True, or all False, gets no list. Synchronizes with the GPU.
        """
        if kept.dtype != torch.bool or kept.dim() not in (2, 3):
            raise TypeError(f"SamplingMask: kept must be bool [T, V] or [B, L, V], got {kept.dtype} {list(kept.shape)}")
        rows = kept.flatten(0, -2)
        counts = rows.sum(-1)
        listed = counts < rows.shape[-1]
        ids = (rows & listed[:, None]).nonzero()[:, 1].to(torch.int32)
        return cls(ids, torch.nn.functional.pad((counts * listed).cumsum(0), (1, 0)))


@dataclass(frozen=True)
class Layout:
    """The layout of the caller's tokens: packed [T] (with or without sequence boundaries) or padded [B, L]."""

    caller: str
    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype  # for per-token arithmetic
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
        """Return int64 [N], the sequence of each token; ``None`` for a packed layout without boundaries."""
        if len(self.shape) == 1 and self.cu_seqlens is None:
            return None
        positions = torch.arange(self.n_rows, device=self.device)
        if len(self.shape) == 2:
            return positions // max(self.shape[1], 1)
        assert self.cu_seqlens is not None
        return torch.searchsorted(self.cu_seqlens.to(torch.int64), positions, right=True) - 1

    def describe(self) -> str:
        return f"[T]={list(self.shape)}" if len(self.shape) == 1 else f"[B, L]={list(self.shape)}"

    def describe_sequences(self) -> str:
        return f"{'[S]' if len(self.shape) == 1 else '[B]'}=[{self.n_sequences}]"

    def fail(self, name: str, expected: str, got: object) -> ValueError:
        return ValueError(f"{self.caller}: {name} must be {expected}, got {got}")

    def per_token(self, name: str, value: Any, dtype: torch.dtype | None = None, keep_grad: bool = False) -> Tensor:
        """Return a checked per-token tensor, flat [N]; detached unless ``keep_grad``."""
        value = self._tensor(name, value)
        if value.shape != self.shape:
            raise self.fail(name, self.describe(), list(value.shape))
        if value.requires_grad and not keep_grad:
            value = value.detach()
        if value.dim() != 1:
            value = value.reshape(-1)
        dtype = dtype or self.dtype
        return (value if value.dtype == dtype else value.to(dtype)).resolve_neg().contiguous()

    def per_token_or_sequence(self, name: str, value: Any) -> Tensor:
        """Return a checked per-token or per-sequence tensor, expanded to tokens: flat [N], detached."""
        value = self._tensor(name, value)
        if value.shape == self.shape:
            return self.per_token(name, value)
        n = self.n_sequences
        if n is not None and tuple(value.shape) == (n,):
            ids = self.sequence_ids()
            assert ids is not None
            return value.detach().to(self.dtype)[ids]
        expected = self.describe()
        if n is not None:
            expected += f" or {self.describe_sequences()}"
        elif value.dim() == 1:
            expected += ", or per sequence with cu_seqlens"
        raise self.fail(name, expected, list(value.shape))

    def per_sequence(self, name: str, value: Any) -> Tensor:
        """Return a checked per-sequence tensor [S] or [B], detached."""
        value = self._tensor(name, value, self.describe_sequences())
        if tuple(value.shape) != (self.n_sequences,):
            raise self.fail(name, self.describe_sequences(), list(value.shape))
        return value.detach()

    def _tensor(self, name: str, value: Any, shape: str | None = None) -> Tensor:
        self._check_real(name, value, f"a tensor {shape or self.describe()}")
        if value.device != self.device:
            raise self.fail(name, f"on {self.device} like the rest", value.device)
        return value

    def _check_real(self, name: str, value: Any, expected: str) -> None:
        check_tensor(self.caller, name, value, expected)
        if value.is_complex():
            raise TypeError(f"{self.caller}: {name} must be real, got {value.dtype}")

    def number(self, name: str, value: Tensor) -> Tensor:
        """Return a checked 0-d tensor, detached. A CPU tensor stays on the CPU: a copy to a GPU would wait."""
        self._check_real(name, value, "a number or a 0-d tensor")
        if value.is_meta and self.device.type != "meta":
            raise self.fail(name, f"on {self.device} like the rest", value.device)
        return value.detach().to(value.device if value.device.type == "cpu" else self.device, self.dtype)

    def _temperature(self, value: float | Tensor) -> tuple[float, Tensor | None]:
        """Return a scalar temperature, or one per token (then the scalar is unused)."""
        if isinstance(value, Tensor) and value.dim() > 0:
            return 1.0, self.per_token("temperature", value)
        if isinstance(value, Tensor):
            ones = torch.ones(self.n_rows, dtype=self.dtype, device=self.device)
            return 1.0, ones * self.number("temperature", value)
        if not is_number(value):
            raise TypeError(
                f"{self.caller}: temperature must be a number or a tensor {self.describe()}, got {type(value).__name__}"
            )
        if not torch.finfo(self.dtype).tiny <= value <= torch.finfo(self.dtype).max:
            limits = torch.finfo(self.dtype)
            raise self.fail("temperature", f"in [{limits.tiny:.3g}, {limits.max:.3g}]", value)
        return float(value), None

    def request(
        self,
        target_ids: Any,
        temperature: float | Tensor,
        live: Tensor,
        want_entropy: bool,
        sampling_mask: SamplingMask | None = None,
    ) -> RowRequest:
        """Return the checked request for every row."""
        if isinstance(target_ids, Tensor) and (target_ids.is_floating_point() or target_ids.dtype == torch.bool):
            raise TypeError(f"{self.caller}: target_ids must be integers, got {target_ids.dtype}")
        targets = self.per_token("target_ids", target_ids, torch.int64)
        request = RowRequest(targets, live, *self._temperature(temperature), want_entropy)
        return request if sampling_mask is None else self._with_lists(request, sampling_mask)

    def _with_lists(self, request: RowRequest, lists: Any) -> RowRequest:
        if not isinstance(lists, SamplingMask):
            raise TypeError(f"{self.caller}: sampling_mask must be a SamplingMask, got {type(lists).__name__}")
        for name, x, shape in (("ids", lists.ids, "[K]"), ("offsets", lists.offsets, f"[N+1]=[{self.n_rows + 1}]")):
            check_tensor(self.caller, f"sampling_mask.{name}", x, f"an integer tensor {shape}")
            if x.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{self.caller}: sampling_mask.{name} must be int32 or int64, got {x.dtype}")
            if x.dim() != 1 or (name == "offsets" and x.shape[0] != self.n_rows + 1):
                raise self.fail(f"sampling_mask.{name}", shape, list(x.shape))
            if x.device != self.device:
                raise self.fail(f"sampling_mask.{name}", f"on {self.device} like the rest", x.device)
        ids, offsets = lists.ids.to(torch.int64).contiguous(), lists.offsets.to(torch.int64).contiguous()
        counts = offsets.diff()
        if readable(offsets) and (int(offsets[0]) != 0 or int(offsets[-1]) != len(ids) or bool((counts < 0).any())):
            raise self.fail(
                "sampling_mask.offsets", f"non-decreasing from 0 to K={len(ids)}", _short(lists.offsets.tolist())
            )
        if readable(ids) and all(x.data_ptr() for x in (ids, offsets, request.live)):  # not of wrappers, nor empty
            _check_once(self, ids, offsets, request.live)
        if on_host(ids):  # takes a quarter of the time of searchsorted
            rows = torch.repeat_interleave(counts, output_size=ids.shape[0])
            offsets = offsets - offsets[:1]  # a compiled graph does not check that the first is 0
        else:
            rows = torch.searchsorted(offsets, torch.arange(ids.shape[0], device=self.device), right=True) - 1
        return request._replace(listed=counts > 0, kept_ids=ids, kept_rows=rows, kept_offsets=offsets)

    def check_logprobs(self, name: str, values: Tensor, live: Tensor) -> None:
        """Raise ValueError for a live value above 0, such as a probability. Skipped on a GPU; metrics count them there.

        Args:
            values: log-probs, or sums of them; same shape as ``live``, detached.
            live: bool, which of them to check.
        """
        if not readable(values) or values.numel() == 0:
            return
        if values.amax().item() <= LARGEST_LOGPROB:  # usually true: two operations instead of five
            return
        positive = (values > LARGEST_LOGPROB) & live  # False for NaN
        if bool(positive.any()):
            largest = float(values[positive].amax())
            raise self.fail(name, "log-probs, which are at most 0 (pass probabilities as .log())", f"{largest:g}")

    def live(self, mask: Tensor | None) -> Tensor:
        """Return bool [N]: which tokens train."""
        if mask is None:
            return torch.ones(self.n_rows, dtype=torch.bool, device=self.device)
        flat = self.per_token("mask", mask, mask.dtype if isinstance(mask, Tensor) else None)
        if flat.dtype == torch.bool:
            return flat
        if not torch.compiler.is_compiling():
            is_binary = ((flat == 0) | (flat == 1)).all()
            if not readable(is_binary):
                torch._assert_async(is_binary, f"{self.caller}: mask must be bool, or 0 and 1")
            elif not bool(is_binary):
                raise self.fail("mask", "bool, or 0 and 1; weights go to importance_weights", "other values")
        return flat != 0


def check_tensor(caller: str, name: str, value: Any, expected: str = "a tensor") -> None:
    """Raise TypeError unless ``value`` is a tensor that is whole on this rank."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be {expected}, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        kind, remedy = (
            ("nested", "values() are packed rows, offsets().int() their cu_seqlens")
            if value.is_nested
            else (str(value.layout).removeprefix("torch."), "pass its to_dense()")
        )
        raise TypeError(f"{caller}: {name} must be {expected} that is dense, got a {kind} one: {remedy}")
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return
    if hasattr(value, "device_mesh"):  # a DTensor; importing the class takes as long as the rest of the package
        raise TypeError(
            f"{caller}: {name} must be {expected} that this rank has all of, got a DTensor: call the loss inside the "
            "forward of the module that fully_shard wrapped (docs/guide.md, FSDP2), or pass its full_tensor()"
        )


def check_not_rounded(caller: str, **values: Any) -> None:
    """Raise TypeError for a tensor in 16 bits."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dtype in ROUNDED:
            raise TypeError(
                f"{caller}: {name} must be float32, got {value.dtype}, which has two or three digits. Wrappers round "
                "the inputs of forward: pass MixedPrecisionPolicy(cast_forward_inputs=False) to FSDP2; with Fabric or "
                "Lightning set precision='32-true' and put torch.autocast around the call"
            )


def layout_of(
    caller: str, name: str, rows: Any, cu_seqlens: Tensor | None = None, parts: int = 1, target_ids: Any = None
) -> Layout:
    """Return the layout for ``rows``, [T, ·] or [B, L, ·] floating point, which may be one of ``parts`` equal parts of
    the sequence. Raises ValueError if ``target_ids`` show that the rows are not shifted.
    """
    check_tensor(caller, name, rows)
    if rows.dim() not in (2, 3):
        raise ValueError(f"{caller}: {name} must be packed [T, ·] or padded [B, L, ·], got {list(rows.shape)}")
    if rows.dtype not in _FLOATS:
        raise TypeError(f"{caller}: {name} must be float32, bfloat16, float16 or float64, got {rows.dtype}")
    shape = (*rows.shape[:-2], rows.shape[-2] * parts)
    differs = isinstance(target_ids, Tensor) and target_ids.shape != shape
    if differs:
        _check_shifted(caller, name, shape, target_ids, cu_seqlens)
    layout = _layout(caller, shape, rows.device, accumulate_dtype(rows.dtype), cu_seqlens)
    if differs:
        raise layout.fail("target_ids", layout.describe(), list(target_ids.shape))
    return layout


def _check_shifted(caller: str, name: str, shape: tuple[int, ...], target_ids: Tensor, cu_seqlens: Any) -> None:
    """Raise ValueError for the most common mistake: rows of all positions with targets from the second position on."""
    got = tuple(target_ids.shape)
    sequences = cu_seqlens.numel() - 1 if len(shape) == 1 and isinstance(cu_seqlens, Tensor) else 1
    if len(got) == len(shape) and got[:-1] == shape[:-1] and 0 < shape[-1] - got[-1] <= max(sequences, 1):
        raise ValueError(
            f"{caller}: {name} must be shifted: {name}[t] predicts target_ids[t], got {list(shape)} positions "
            f"and target_ids {list(got)}. Leave out the last position of every sequence: {name}[:, :-1] with "
            "target_ids = input_ids[:, 1:]"
        )


def token_layout(caller: str, name: str, values: Any, cu_seqlens: Tensor | None) -> Layout:
    """Return the layout for a per-token tensor, [T] or [B, L]."""
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
        raise ValueError(
            f"{caller}: cu_seqlens requires the packed layout [T], got the padded layout {list(shape)}: pass "
            "x.flatten(0, 1) of every [B, L, …] tensor, or leave cu_seqlens out if each row is one sequence"
        )
    check_tensor(caller, "cu_seqlens", cu_seqlens, "an int32 tensor [S+1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{caller}: cu_seqlens must be an int32 tensor [S+1], got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise layout.fail("cu_seqlens", "[S+1]", list(cu_seqlens.shape))
    if cu_seqlens.device != device:
        raise layout.fail("cu_seqlens", f"on {device} like the rest", cu_seqlens.device)
    if readable(cu_seqlens):
        _check_bounds(layout, cu_seqlens)
    return layout


def _check_bounds(layout: Layout, cu_seqlens: Tensor) -> None:
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != layout.n_rows or bool((cu_seqlens.diff() < 0).any()):
        wanted = f"non-decreasing from 0 to T={layout.n_rows}, without the last position of every sequence"
        raise layout.fail("cu_seqlens", wanted, _short(cu_seqlens.tolist()))


def _short(values: list[int]) -> str:
    if len(values) <= 8:
        return str(values)
    return f"[{', '.join(map(str, values[:4]))}, …, {', '.join(map(str, values[-3:]))}]"


def _check_once(layout: Layout, ids: Tensor, offsets: Tensor, live: Tensor) -> None:
    """Raise ValueError if an id is twice in the list of a live token: sums over the list would count it twice."""
    at = cpu_backend().find_repeated(ids, offsets, live)
    if at is not None:
        row = int(torch.searchsorted(offsets, at, right=True)) - 1
        raise layout.fail("sampling_mask", "a list of distinct ids per token", f"{int(ids[at])} twice for token {row}")


def check_flag(layout: Layout, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{layout.caller}: {name} must be True or False, got {value!r}")
    return value


def check_valid_vocab(layout: Layout, value: Any, columns: int | None = None) -> None:
    """Check ``valid_vocab``. ``columns``: the size of the vocabulary, if this rank knows it."""
    if value is None:
        return
    if type(value) is not int or value < 1:
        raise layout.fail("valid_vocab", "a positive integer, or None", repr(value))
    if columns is not None and value > columns:
        raise layout.fail("valid_vocab", f"at most V={columns}", value)


def check_rows_apart(layout: Layout, logits: Tensor) -> None:
    """Raise ValueError if two logits share memory: a gradient written in place needs separate memory for each."""
    reach = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"{layout.caller}: inplace_backward=True requires logits whose rows do not share memory, got strides "
                f"{list(logits.stride())} for {list(logits.shape)}: pass logits.contiguous(), or leave it False"
            )
        reach += (size - 1) * stride
