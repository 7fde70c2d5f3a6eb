"""The records that pass between public functions, engine and backends: flat and validated, with one entry per token.

N tokens (rows), V vocabulary, H hidden. A record is a flat ``NamedTuple`` of tensors and plain values, so that its
fields can be the schema of an operator in ``engine/operators.py``. A new option of a call is a field here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor


class RowRequest(NamedTuple):
    """The request for every row of logits: its target's log-prob at its temperature, and its entropy."""

    target_ids: Tensor  # int64 [N]
    live: Tensor  # bool [N]: other rows may hold anything, and their results are zero
    temperature: float
    temperatures: Tensor | None  # [N]; then ``temperature`` is unused
    want_entropy: bool
    partial: bool = False  # rows are parts of longer ones, and targets are checked there; −1: it is in another part
    # For rows sampled from a truncated distribution, the other tokens of the row are ignored:
    listed: Tensor | None = None  # bool [N]: which rows
    kept_ids: Tensor | None = None  # int64 [K]: the kept tokens of all rows, list after list
    kept_rows: Tensor | None = None  # int64 [K]: the row of each, ascending on a CPU; −1: it is not among these rows
    kept_offsets: Tensor | None = None  # int64 [L+1]: list l is kept_ids[kept_offsets[l] : kept_offsets[l + 1]]
    kept_lists: Tensor | None = None  # int64 [N], on a GPU: the list of each row; None: row n has list n
    softcap: float | None = None  # c: apply c·tanh(logits/c) first; the gradient is that of the logits before it

    @property
    def tau(self) -> float | Tensor:
        return self.temperature if self.temperatures is None else self.temperatures

    def at(self, rows: Tensor | slice) -> RowRequest:
        temperatures = None if self.temperatures is None else self.temperatures[rows]
        part = self._replace(target_ids=self.target_ids[rows], live=self.live[rows], temperatures=temperatures)
        if self.listed is None or self.kept_ids is None or self.kept_rows is None or self.kept_offsets is None:
            return part
        part = part._replace(listed=self.listed[rows])
        if on_host(self.live):  # on a GPU, leaving out those of other rows would wait for the device
            ids, of, offsets = _lists_at(self.kept_ids, self.kept_offsets, rows)
            return part._replace(kept_ids=ids, kept_rows=of, kept_offsets=offsets)
        assert self.kept_lists is None  # lists have the numbers of the rows of the whole call
        numbers = torch.arange(self.live.shape[0], device=self.live.device)
        to = torch.full_like(self.target_ids, -1)
        to[rows] = numbers[: part.live.shape[0]]
        return part._replace(kept_rows=to.index_select(0, self.kept_rows), kept_lists=numbers[rows])

    def kept_places(self) -> tuple[Tensor, Tensor]:
        """Return int64 [K], the row of each kept token, and bool [K], whether it is among these rows. If not, its row
        is 0.
        """
        assert self.kept_rows is not None
        return self.kept_rows.clamp(min=0), self.kept_rows >= 0

    def over_lists(self, reduce: str, of_tokens: Tensor) -> Tensor:
        """Return the "max" or "sum" over the list of each row, [N], of [K]; −∞ or 0 of an empty list. Floating point.

        On a GPU a block of threads reads a list, always in the same order and without atomics. The tokens of other
        rows are read too: theirs are other lists.
        """
        found = torch.segment_reduce(of_tokens, reduce, offsets=self.kept_offsets, unsafe=True)  # unsafe: does not wait
        return found if self.kept_lists is None else found.index_select(0, self.kept_lists)

    def without_others(self) -> RowRequest:
        """Return the request for the rows with a list. All other rows are dead."""
        assert self.listed is not None
        return self._for_whole_rows(self.live & self.listed)

    def without_lists(self) -> RowRequest:
        """Return the request for the rows without a list. All other rows are dead."""
        return self if self.listed is None else self._for_whole_rows(self.live & ~self.listed)

    def _for_whole_rows(self, live: Tensor) -> RowRequest:
        part = self._replace(live=live, listed=None, kept_ids=None, kept_rows=None)
        return part._replace(kept_offsets=None, kept_lists=None)


def _lists_at(ids: Tensor, offsets: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kept tokens of ``rows``, which are ascending, for each token the index of its row in ``rows``, and the
    offsets of the lists.
    """
    at = torch.arange(offsets.shape[0] - 1, device=offsets.device)[rows]
    counts = offsets.diff()[at]
    of, mine = torch.repeat_interleave(counts), torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    if len(at) == 0 or int(at[-1]) - int(at[0]) + 1 == len(at):  # consecutive rows
        first, last = (int(offsets[at[0]]), int(offsets[at[-1] + 1])) if len(at) else (0, 0)
        return ids[first:last], of, mine
    shift = offsets[at] - mine[:-1]
    return ids.index_select(0, torch.arange(of.shape[0], device=of.device) + shift.index_select(0, of)), of, mine


class LoraFactors(NamedTuple):
    """An adapter of the output head: its weight is weight + scale · b · a, which is never materialized.

    Example:
        >>> import torch
        >>> from dapo_kernels import LoraFactors, linear_token_logprobs
        >>> hidden, weight, ids = torch.ones(2, 8), torch.zeros(4, 8), torch.tensor([3, 0])
        >>> lora = LoraFactors(a=torch.ones(1, 8), b=torch.zeros(4, 1), scale=2.0)
        >>> linear_token_logprobs(hidden, weight, ids, lora=lora).logprobs.exp().tolist()
        [0.25, 0.25]
    """

    a: Tensor  # [r, H]
    b: Tensor  # [V, r]
    scale: float = 1.0

    def to(self, dtype: torch.dtype) -> LoraFactors:
        return LoraFactors(self.a.to(dtype), self.b.to(dtype), self.scale)


class Default(NamedTuple):
    """The default of a keyword, if it is not None."""

    value: object


class HeadOptions(TypedDict, total=False):
    """``linear_dapo_loss`` documents these. A field of ``Head`` with the same name gets the value unchanged."""

    bias: Tensor | None
    lora: LoraFactors | None
    softcap: float | None
    float32_logits: Annotated[bool, Default(False)]
    chunk_bytes: int | None
    host_sync: bool | None
    main_grad: Tensor | None
    valid_vocab: int | None


class Note(NamedTuple):
    """Rules for a field of ``Head`` or ``Plan``: what ``head.py`` checks, and what must be the same on all ranks."""

    dims: str = ""  # of a tensor; rows of N tokens or of V differ between ranks
    above: float | None = None  # lower bound of a number; None is valid too
    whole: bool = False  # for an integer
    own: bool = False  # may differ between ranks


class Head(NamedTuple):
    """The last layer: logits = softcap(hidden · (weight + scale · b · a)ᵀ + bias), softcap(x) = c·tanh(x/c)."""

    hidden: Annotated[Tensor, Note("N H")]
    weight: Annotated[Tensor, Note("V H")]
    bias: Annotated[Tensor | None, Note("V")] = None
    softcap: Annotated[float | None, Note(above=0)] = None
    float32_logits: bool = False  # keep the logits of 16-bit operands in float32 instead of rounding them
    lora_a: Annotated[Tensor | None, Note("r H")] = None
    lora_b: Annotated[Tensor | None, Note("V r")] = None
    lora_scale: float = 1.0

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32 if self.float32_logits else self.hidden.dtype

    @property
    def lora(self) -> LoraFactors | None:
        if self.lora_a is None or self.lora_b is None:
            return None
        return LoraFactors(self.lora_a, self.lora_b, self.lora_scale)

    def first(self, n: int) -> Head:
        """Return the head without the rows behind the first ``n``, which pad the vocabulary."""
        if n == self.weight.shape[0]:
            return self
        return self._replace(**{name: x[:n] for name in BY_VOCAB if (x := getattr(self, name)) is not None})


class Needs(NamedTuple):
    """Which gradients are required."""

    hidden: bool
    weight: bool
    bias: bool
    lora_a: bool = False
    lora_b: bool = False

    @classmethod
    def of(cls, flags: Sequence[bool]) -> Needs:
        """Select from ``flags``: one per field of ``Head``; further flags are ignored."""
        return cls(*[flags[i] for i in _OF_HEAD])

    @classmethod
    def of_head(cls, head: Head) -> Needs:
        """Return which parts of ``head`` require a gradient, if autograd records."""
        return cls.of([torch.is_grad_enabled() and _requires_grad(x) for x in head])


def _requires_grad(x: Any) -> bool:
    while isinstance(x, Tensor) and not torch.compiler.is_compiling() and _functorch.is_batchedtensor(x):
        x = _functorch.get_unwrapped(x)  # under vmap a batched tensor itself requires none
    return isinstance(x, Tensor) and x.requires_grad


class Plan(NamedTuple):
    """How to run a call from hidden states."""

    chunk_bytes: Annotated[int | None, Note(above=0, whole=True)]
    host_sync: bool | None  # whether the call may wait for a GPU; see ``engine/chunks.py``
    main_grad: Annotated[Tensor | None, Note(own=True)]  # the caller's float32 [V, H] to add the weight's gradient to
    backend: str
    valid: int | None = None  # this and the next two as in ``Server``
    group: Annotated[str | None, Note(own=True)] = None  # set, like the next two, once the ranks have agreed
    columns: Annotated[Tensor | None, Note(own=True)] = None
    partial_hidden: Annotated[bool, Note(own=True)] = False  # hidden's gradient stays this rank's part of the sum


_HINTS = get_type_hints(Head, include_extras=True) | get_type_hints(Plan, include_extras=True)
NOTES: dict[str, Note] = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")}
SHAPES = {name: note.dims.split() for name, note in NOTES.items() if note.dims}
OWN = [name for name, note in NOTES.items() if note.own]
_OF_HEAD = [Head._fields.index(name) for name in Needs._fields]
BY_VOCAB = [name for name, dims in SHAPES.items() if dims[0] == "V"]


class Server(NamedTuple):
    """Who computes rows of logits: a backend, and the ranks of a group if each has some columns of every row."""

    backend: str
    valid: int | None = None  # number of columns that can be sampled, from the first; the rest is padding
    group: str | None = None  # its name in torch.distributed
    columns: Tensor | None = None  # int64 [ranks], on the host: columns of each rank, without padding


class Terms(NamedTuple):
    """The options of a call, beside its rows, that must be the same on all ranks."""

    settings: str = ""
    per_token: tuple[Tensor | None, ...] = ()  # [N] each, or one number for all


class Tokens(NamedTuple):
    """The inputs of the loss of every token: ``live`` bool, the rest float32 (float64 if the logits are)."""

    live: Tensor
    weights: Tensor  # of each token in the scalar loss, 0 on masked tokens
    advantages: Tensor
    old_logprobs: Tensor | None  # None: on-policy, ratio 1 with its gradient
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None

    def at(self, rows: Tensor | slice) -> Tokens:
        return Tokens._make(None if x is None else x[rows] for x in self)


class RowStats(NamedTuple):
    """Statistics of every row. ``norm`` [N, 2] is what the gradient needs of its softmax."""

    logprobs: Tensor
    norm: Tensor
    entropy: Tensor | None

    @classmethod
    def empty(cls, request: RowRequest, dtype: torch.dtype = torch.float32) -> RowStats:
        """Allocate the tensors for a kernel to fill."""
        logprobs = torch.empty(request.target_ids.shape, dtype=dtype, device=request.target_ids.device)
        entropy = torch.empty_like(logprobs) if request.want_entropy else None
        return cls(logprobs, logprobs.new_empty(*logprobs.shape, 2), entropy)

    def at(self, rows: Tensor | slice) -> RowStats:
        entropy = None if self.entropy is None else self.entropy[rows]
        return RowStats(self.logprobs[rows], self.norm[rows], entropy)


class Slopes(NamedTuple):
    """∂loss/∂ℓ and ∂loss/∂H per token. Every objective is reduced to these two."""

    logprobs: Tensor
    entropy: Tensor | None

    @property
    def idle(self) -> Tensor:
        """bool [N]: the gradient row is zero."""
        idle = self.logprobs == 0
        return idle if self.entropy is None else idle & (self.entropy == 0)

    def at(self, rows: Tensor | slice) -> Slopes:
        return Slopes(self.logprobs[rows], None if self.entropy is None else self.entropy[rows])


class TokenLoss(NamedTuple):
    """Policy and KL loss over all tokens, without entropy bonus, and its derivatives."""

    loss: Tensor  # 0-d
    d_logprobs: Tensor
    d_log_ratio: Tensor
    clip_hit: Tensor  # int8: 0 none, 1 low, 2 high, 3 dual
    ref_kl: Tensor | None  # if kl_coef is not 0

    @classmethod
    def empty(cls, logprobs: Tensor, want_kl: bool) -> TokenLoss:
        """Allocate the tensors for a kernel to fill, except the loss."""
        return cls(
            loss=logprobs,
            d_logprobs=torch.empty_like(logprobs),
            d_log_ratio=torch.empty_like(logprobs),
            clip_hit=torch.empty_like(logprobs, dtype=torch.int8),
            ref_kl=torch.empty_like(logprobs) if want_kl else None,
        )


class RowsSlopes(NamedTuple):
    """Loss, statistics and derivatives of rows, before any gradient row is computed."""

    loss: Tensor  # 0-d
    logprobs: Tensor
    norm: Tensor
    entropy: Tensor | None
    clip_hit: Tensor
    ref_kl: Tensor | None
    d_logprobs: Tensor
    d_entropy: Tensor | None

    @classmethod
    def of(cls, stats: RowStats, policy: TokenLoss, weights: Tensor, entropy_coef: float) -> RowsSlopes:
        loss, d_entropy = policy.loss, None
        if entropy_coef != 0:
            assert stats.entropy is not None
            d_entropy = -entropy_coef * weights.to(stats.logprobs.dtype)
            loss = loss + (d_entropy * stats.entropy).sum(dtype=torch.float64).to(loss.dtype)
        d_logprobs = policy.d_logprobs + policy.d_log_ratio
        return cls(loss, *stats, policy.clip_hit, policy.ref_kl, d_logprobs, d_entropy)

    @property
    def stats(self) -> RowStats:
        return RowStats(self.logprobs, self.norm, self.entropy)

    @property
    def slopes(self) -> Slopes:
        return Slopes(self.d_logprobs, self.d_entropy)


class RowsLoss(NamedTuple):
    """The loss of rows whose gradient has replaced their logits."""

    loss: Tensor  # 0-d
    logprobs: Tensor
    entropy: Tensor | None
    clip_hit: Tensor | None  # None: a user-defined loss, whose clipping is unknown
    ref_kl: Tensor | None
    idle: Tensor  # bool: the gradient row is zero

    @classmethod
    def empty(cls, request: RowRequest, want_kl: bool) -> RowsLoss:
        """Allocate the tensors for a kernel to fill, except the loss."""
        logprobs = torch.empty(request.target_ids.shape, dtype=torch.float32, device=request.target_ids.device)
        return cls(
            loss=logprobs,
            logprobs=logprobs,
            entropy=torch.empty_like(logprobs) if request.want_entropy else None,
            clip_hit=torch.empty_like(logprobs, dtype=torch.int8),
            ref_kl=torch.empty_like(logprobs) if want_kl else None,
            idle=torch.empty_like(logprobs, dtype=torch.bool),
        )


# Rounding may make a log-prob slightly positive, by much less than this. A larger value is probably a probability.
LARGEST_LOGPROB = 0.01


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax arithmetic and of per-token results."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Devices whose values a call may read. Tests remove the CPU to take the path of a GPU there.
HOST_DEVICES = {"cpu"}


def on_host(x: Tensor) -> bool:
    """Return whether reading the values of ``x`` is free."""
    return x.device.type in HOST_DEVICES


def readable(x: Tensor) -> bool:
    """Return whether the values of ``x`` may be read: no wait for a GPU, no tracing, no fake tensor."""
    return on_host(x) and not torch.compiler.is_compiling() and type(x) is not FakeTensor
