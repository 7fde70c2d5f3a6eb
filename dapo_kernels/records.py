"""What passes between the public functions, the engine and the backends: flat, validated, one entry per token.

N tokens (rows), V vocabulary, H hidden. A record is a flat ``NamedTuple`` of tensors and plain values, so that an
operator of ``engine/operators.py`` can spell its fields as its schema. A new option of a call is a field here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypedDict, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Asked(NamedTuple):
    """What is asked of every row of logits: its target's log-prob, at its temperature, and its entropy."""

    target_ids: Tensor  # int64 [N]
    live: Tensor  # bool [N]: the others may hold anything and come out as zeros
    temperature: float
    temperatures: Tensor | None  # [N]; then ``temperature`` is unused
    want_entropy: bool
    partial: bool = False  # the rows are part of longer ones, checked there: a target of −1 is in another part
    # Of rows that were sampled from some tokens of the vocabulary only, the others of the row taking no part:
    listed: Tensor | None = None  # bool [N]: those rows
    kept_ids: Tensor | None = None  # int64 [K]: the tokens kept, of all of them
    kept_rows: Tensor | None = None  # int64 [K]: the row of each, ascending on a CPU; −1: of no row here
    softcap: float | None = None  # c: the rows are those of c·tanh(logits/c), the gradient is of the logits before it

    @property
    def tau(self) -> float | Tensor:
        return self.temperature if self.temperatures is None else self.temperatures

    def at(self, rows: Tensor | slice) -> Asked:
        temperatures = None if self.temperatures is None else self.temperatures[rows]
        part = self._replace(target_ids=self.target_ids[rows], live=self.live[rows], temperatures=temperatures)
        if self.listed is None or self.kept_ids is None or self.kept_rows is None:
            return part
        part = part._replace(listed=self.listed[rows])
        if on_host(self.live):  # elsewhere leaving out those of other rows would wait for the device
            ids, of = _lists_at(self.kept_ids, self.kept_starts, rows)
            return part._replace(kept_ids=ids, kept_rows=of)
        to = torch.full_like(self.target_ids, -1)
        to[rows] = torch.arange(part.live.shape[0], device=to.device)
        return part._replace(kept_rows=to.index_select(0, self.kept_rows))

    @property
    def kept_starts(self) -> Tensor:
        """int64 [N+1], on a CPU: where the kept tokens of each row begin, and their end."""
        assert self.kept_rows is not None
        return torch.searchsorted(self.kept_rows, torch.arange(self.live.shape[0] + 1, device=self.live.device))

    def kept_places(self) -> tuple[Tensor, Tensor]:
        """int64 [K], the row of each kept token, and bool [K], whether it is of a row here. One of no row here gets
        some row, in turn: it adds nothing there, and on a GPU additions to one address wait for each other.
        """
        assert self.kept_rows is not None
        of, n = self.kept_rows, max(1, self.live.shape[0])
        if on_host(of):
            return of, of >= 0
        return torch.where(of >= 0, of, torch.arange(of.shape[0], device=of.device) % n), of >= 0

    def without_others(self) -> Asked:
        """What is asked of the rows that have a list, the others dead."""
        assert self.listed is not None
        return self._replace(live=self.live & self.listed, listed=None, kept_ids=None, kept_rows=None)

    def without_lists(self) -> Asked:
        """What is asked of the rows that have no list, the others dead."""
        if self.listed is None:
            return self
        return self._replace(live=self.live & ~self.listed, listed=None, kept_ids=None, kept_rows=None)


def _lists_at(ids: Tensor, starts: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
    """The kept tokens of ``rows``, ascending, and the place among these of the row of each."""
    at = torch.arange(starts.shape[0] - 1, device=starts.device)[rows]
    counts = starts.diff()[at]
    of = torch.repeat_interleave(counts)
    if len(at) == 0 or int(at[-1]) - int(at[0]) + 1 == len(at):  # they stand together
        first, last = (int(starts[at[0]]), int(starts[at[-1] + 1])) if len(at) else (0, 0)
        return ids[first:last], of
    shift = starts[at] - (counts.cumsum(0) - counts)
    return ids.index_select(0, torch.arange(of.shape[0], device=of.device) + shift.index_select(0, of)), of


class LoraFactors(NamedTuple):
    """An adapter of the output head: its weight is weight + scale · b · a, which is never made."""

    a: Tensor  # [r, H]
    b: Tensor  # [V, r]
    scale: float = 1.0

    def to(self, dtype: torch.dtype) -> LoraFactors:
        return LoraFactors(self.a.to(dtype), self.b.to(dtype), self.scale)


class Default(NamedTuple):
    """Of a keyword of a call: what it is where the call leaves it out, if not None."""

    value: object


class HeadOptions(TypedDict, total=False):
    """``linear_dapo_loss`` says what each means. One that is a field of ``Head`` gets there as it is given."""

    bias: Tensor | None
    lora: LoraFactors | None
    softcap: float | None
    float32_logits: Annotated[bool, Default(False)]
    chunk_bytes: int | None
    host_sync: bool | None
    main_grad: Tensor | None
    valid_vocab: int | None


class Note(NamedTuple):
    """Of a field of ``Head`` or ``Plan``: what ``head.py`` checks, and what ranks that share a head must have alike."""

    dims: str = ""  # of a tensor; its rows are a rank's own where they are N tokens or V of the vocabulary
    above: float | None = None  # of a number, or None
    whole: bool = False  # of an integer
    own: bool = False  # a rank need not have what the others have


class Head(NamedTuple):
    """The last layer: logits = softcap(hidden · (weight + scale · b · a)ᵀ + bias), softcap(x) = c·tanh(x/c)."""

    hidden: Annotated[Tensor, Note("N H")]
    weight: Annotated[Tensor, Note("V H")]
    bias: Annotated[Tensor | None, Note("V")] = None
    softcap: Annotated[float | None, Note(above=0)] = None
    float32_logits: bool = False  # keep 16-bit operands' logits in float32 in place of rounding them to that dtype
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
        """Without the rows behind the first ``n``, which pad the vocabulary."""
        if n == self.weight.shape[0]:
            return self
        return self._replace(**{name: x[:n] for name in BY_VOCAB if (x := getattr(self, name)) is not None})


class Needs(NamedTuple):
    """Which gradients somebody asked for."""

    hidden: bool
    weight: bool
    bias: bool
    lora_a: bool = False
    lora_b: bool = False

    @classmethod
    def of(cls, flags: Sequence[bool]) -> Needs:
        """``flags``: one for every field of ``Head``; further ones are left alone."""
        return cls(*[flags[i] for i in _OF_HEAD])


class Plan(NamedTuple):
    """How a call from hidden states is to run."""

    chunk_bytes: Annotated[int | None, Note(above=0, whole=True)]
    host_sync: bool | None  # whether a GPU may be waited for; see ``engine/chunks.py``
    main_grad: Annotated[Tensor | None, Note(own=True)]  # float32 [V, H] of the caller's: takes the weight's gradient
    backend: str
    valid: int | None = None  # this and the next two as in ``Server``
    group: Annotated[str | None, Note(own=True)] = None  # this and the next two follow once the ranks agree
    columns: Annotated[Tensor | None, Note(own=True)] = None
    partial_hidden: Annotated[bool, Note(own=True)] = False  # hidden's gradient stays this rank's part of the sum


_HINTS = get_type_hints(Head, include_extras=True) | get_type_hints(Plan, include_extras=True)
NOTES: dict[str, Note] = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")}
SHAPES = {name: note.dims.split() for name, note in NOTES.items() if note.dims}
OWN = [name for name, note in NOTES.items() if note.own]
_OF_HEAD = [Head._fields.index(name) for name in Needs._fields]
BY_VOCAB = [name for name, dims in SHAPES.items() if dims[0] == "V"]


class Server(NamedTuple):
    """Who serves rows of logits: a backend, and the ranks of a group where each has some columns of every row."""

    backend: str
    valid: int | None = None  # columns that can be sampled, the first; those behind them pad the rows
    group: str | None = None  # its name in torch.distributed
    columns: Tensor | None = None  # int64 [ranks], on the host: how many each has, without padding


class Terms(NamedTuple):
    """What a call says beside its rows, which all ranks have to say alike."""

    settings: str = ""
    per_token: tuple[Tensor | None, ...] = ()  # [N] each, or one number for all


class Tokens(NamedTuple):
    """What the loss of every token is made of: ``live`` bool, the rest float32 (float64 when the logits are)."""

    live: Tensor
    weights: Tensor  # of each token in the scalar loss, 0 on dead tokens
    advantages: Tensor
    old_logprobs: Tensor | None  # None: on-policy, ratio 1 with its gradient
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None

    def at(self, rows: Tensor | slice) -> Tokens:
        return Tokens._make(None if x is None else x[rows] for x in self)


class RowStats(NamedTuple):
    """Of every row. ``norm`` [N, 2] is what the gradient wants to know again of its softmax."""

    logprobs: Tensor
    norm: Tensor
    entropy: Tensor | None

    @classmethod
    def empty(cls, asked: Asked, dtype: torch.dtype = torch.float32) -> RowStats:
        """Room for a kernel to fill."""
        logprobs = torch.empty(asked.target_ids.shape, dtype=dtype, device=asked.target_ids.device)
        entropy = torch.empty_like(logprobs) if asked.want_entropy else None
        return cls(logprobs, logprobs.new_empty(*logprobs.shape, 2), entropy)

    def at(self, rows: Tensor | slice) -> RowStats:
        entropy = None if self.entropy is None else self.entropy[rows]
        return RowStats(self.logprobs[rows], self.norm[rows], entropy)


class Slopes(NamedTuple):
    """∂loss/∂ℓ and ∂loss/∂H per token: every objective ends as these two."""

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
    """Policy and KL loss over all tokens, without entropy, and its derivatives."""

    loss: Tensor  # 0-d
    d_logprobs: Tensor
    d_log_ratio: Tensor
    clip_hit: Tensor  # int8: 0 none, 1 low, 2 high, 3 dual
    ref_kl: Tensor | None  # when kl_coef is not 0

    @classmethod
    def empty(cls, logprobs: Tensor, want_kl: bool) -> TokenLoss:
        """Room for a kernel to fill, but for the loss."""
        return cls(
            loss=logprobs,
            d_logprobs=torch.empty_like(logprobs),
            d_log_ratio=torch.empty_like(logprobs),
            clip_hit=torch.empty_like(logprobs, dtype=torch.int8),
            ref_kl=torch.empty_like(logprobs) if want_kl else None,
        )


class RowsSlopes(NamedTuple):
    """The loss of rows and their slopes: statistics, token losses and derivatives, before any gradient row is made."""

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
    """The whole loss of the rows whose gradient stands in their logits' place."""

    loss: Tensor  # 0-d
    logprobs: Tensor
    entropy: Tensor | None
    clip_hit: Tensor | None  # None: a loss of the caller's own, which says nothing of clipping
    ref_kl: Tensor | None
    idle: Tensor  # bool: the gradient row is zero

    @classmethod
    def empty(cls, asked: Asked, want_kl: bool) -> RowsLoss:
        """Room for a kernel to fill, but for the loss."""
        logprobs = torch.empty(asked.target_ids.shape, dtype=torch.float32, device=asked.target_ids.device)
        return cls(
            loss=logprobs,
            logprobs=logprobs,
            entropy=torch.empty_like(logprobs) if asked.want_entropy else None,
            clip_hit=torch.empty_like(logprobs, dtype=torch.int8),
            ref_kl=torch.empty_like(logprobs) if want_kl else None,
            idle=torch.empty_like(logprobs, dtype=torch.bool),
        )


# Rounding may put a log-prob above 0, by far less than this. A larger one is no log-prob: a probability, most likely.
LARGEST_LOGPROB = 0.01


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax arithmetic and of per-token results."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def on_host(x: Tensor) -> bool:
    """Whether looking at the values of ``x`` is free."""
    return x.device.type == "cpu"


def readable(x: Tensor) -> bool:
    """Whether the values of ``x`` may be looked at: no GPU is waited for, no tracer stopped; a fake tensor has none."""
    return on_host(x) and not torch.compiler.is_compiling() and type(x) is not FakeTensor
