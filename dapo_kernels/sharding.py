"""Check a head, or logits, whose columns are distributed over the ranks of a group.

It is given as this rank's tensor and ``group=``, or as a DTensor. R ranks, N tokens, V vocabulary.
"""

from __future__ import annotations

from types import TracebackType
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_kernels.engine.shards import checksum, gathered_sequence, list_checksums, shard_columns, tell_of_refusal
from dapo_kernels.layout import Layout, check_tensor, check_valid_vocab
from dapo_kernels.records import BY_VOCAB, OWN, SHAPES, Default, Head, LoraFactors, Plan, RowRequest, Server, Terms


class GroupOption(TypedDict, total=False):
    """``linear_dapo_loss`` documents these."""

    group: dist.ProcessGroup | None


class ShardOptions(GroupOption, total=False):
    sequence_parallel: Annotated[bool, Default(False)]


class Sharded(NamedTuple):
    """The ranks that share a vocabulary."""

    group: str
    ranks: int
    vocab: int  # V, for a DTensor; 0: the ranks must exchange their numbers of columns
    whole: bool = False  # each rank has all columns: they only have to make the same call
    sequence_parallel: bool = False


class Call(Protocol):
    """A call with a loss."""

    @property
    def terms(self) -> Terms: ...


class RaiseEverywhere:
    """A context in which a rank that raises an error tells the other ranks, which wait for it, so that they raise too.

    If it is not known yet how ranks share ``rows`` (``shard`` is None), these are the ranks of a DTensor's mesh, or of
    ``group``.
    """

    def __init__(self, shard: Sharded | None, rows: Any, group: Any = None) -> None:
        if shard is None and _is_dtensor(rows):
            group = rows.device_mesh.get_group() if rows.device_mesh.ndim == 1 else None
        if shard is None and isinstance(group, dist.ProcessGroup):
            shard = _of_group("", group)
        self.shard, self.device = shard, getattr(rows, "device", torch.device("cpu"))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.shard is not None and isinstance(error, Exception):
            tell_of_refusal(self.device, self.shard.group)


def logits_of_call(caller: str, logits: Any, group: Any) -> tuple[Any, Sharded | None]:
    """Return this rank's columns [T, V/R] or [B, L, V/R], and the ranks that share the rest."""
    with RaiseEverywhere(None, logits, group):
        columns, shard = _columns_of(caller, "logits", logits, -1, group)
    # Kernels read memory, where a tensor such as x.conj().imag has the other sign.
    return columns.resolve_neg() if isinstance(columns, Tensor) else columns, shard


def head_of_ranks(caller: str, hidden: Any, weight: Any, options: Any) -> tuple[Any, Any, Sharded | None]:
    """Return hidden states of all tokens, this rank's rows of the weight, and the ranks that share the rest. Removes
    its options from ``options``, and replaces DTensors there by this rank's rows.
    """
    group, by_sequence = options.pop("group", None), options.pop("sequence_parallel", False)
    with RaiseEverywhere(None, weight, group):
        if not isinstance(by_sequence, bool):
            raise TypeError(f"{caller}: sequence_parallel must be True or False, got {by_sequence!r}")
        if group is None and not _is_dtensor(weight):
            if by_sequence:
                raise ValueError(f"{caller}: sequence_parallel=True requires a group that shares the head, got None")
            return hidden, weight, None
        weight, shard = _columns_of(caller, "weight", weight, 0, group)
        for name in BY_VOCAB:
            if _is_dtensor(options.get(name)):
                options[name] = _like_weight(caller, name, options[name], group, shard)
        if isinstance(lora := options.get("lora"), LoraFactors):
            options["lora"] = _own_factors(caller, lora, group, shard)
        if _is_dtensor(hidden):
            hidden, by_sequence = _hidden(caller, hidden, shard)
        if shard is None or not by_sequence:
            return hidden, weight, shard
        if shard.whole:
            raise ValueError(f"{caller}: hidden sharded by sequence requires weight to be Shard(0) on the same ranks")
        check_tensor(caller, "hidden", hidden, "a tensor [T/ranks, H] or [B, L/ranks, H]")
    return hidden, weight, shard._replace(sequence_parallel=True)


def parts_of(shard: Sharded | None) -> int:
    """Return the number of parts into which the ranks split the sequence."""
    return shard.ranks if shard is not None and shard.sequence_parallel else 1


def shared_plan(
    layout: Layout, shard: Sharded | None, head: Head, plan: Plan, request: RowRequest, call: Call | None = None
) -> tuple[Head, Plan]:
    """Return the head with hidden states of all tokens, and the plan, after the ranks have agreed on the call."""
    with RaiseEverywhere(shard, head.weight):
        _check_valid(layout, shard, plan.valid, head.weight.shape[0])
    if shard is None:
        return head, plan
    settings = f"{_describe(head)}, {_describe(plan)}, sequence_parallel {shard.sequence_parallel}"
    columns = _columns(layout, shard, request, head.weight.shape[0], plan.valid, settings, call)
    if shard.whole:
        return head, plan
    if shard.sequence_parallel:
        part = head.hidden.view(*layout.shape[:-1], layout.shape[-1] // shard.ranks, head.hidden.shape[-1])
        head = head._replace(hidden=gathered_sequence(part, part.dim() - 2, shard.group).flatten(0, -2))
    return head, plan._replace(group=shard.group, columns=columns, partial_hidden=shard.sequence_parallel)


def _describe(record: Head | Plan) -> str:
    """Return the fields that must be the same on all ranks: values; of tensors the dtype, whether they need a gradient,
    and the sizes except those that differ between ranks."""
    fields = []
    for name in [name for name in record._fields if name not in OWN]:
        value = getattr(record, name)
        if isinstance(value, Tensor):
            alike = [f"{n}" for dim, n in zip(SHAPES[name], value.shape, strict=True) if dim not in ("N", "V")]
            wants_grad = torch.is_grad_enabled() and value.requires_grad
            value = f"{value.dtype} {' x '.join(alike)} requires_grad={wants_grad}"
        fields.append(f"{name} {value}")
    return ", ".join(fields)


def shared_server(
    layout: Layout,
    shard: Sharded | None,
    logits: Tensor,
    backend: str,
    request: RowRequest,
    valid: int | None,
    call: Call | None = None,
) -> Server:
    with RaiseEverywhere(shard, logits):
        _check_valid(layout, shard, valid, logits.shape[-1])
    if shard is None:
        return Server(backend, valid)
    columns = _columns(layout, shard, request, logits.shape[-1], valid, f"{backend}, {logits.dtype}", call)
    return Server(backend, valid) if shard.whole else Server(backend, valid, shard.group, columns)


def _check_valid(layout: Layout, shard: Sharded | None, valid: int | None, here: int) -> None:
    check_valid_vocab(layout, valid, here if shard is None else shard.vocab or None)


def _columns(
    layout: Layout,
    shard: Sharded,
    request: RowRequest,
    own: int,
    valid: int | None,
    settings: str,
    call: Call | None = None,
) -> Tensor:
    terms = Terms() if call is None else call.terms
    settings = f"{settings}, temperature {request.temperature}, entropy {request.want_entropy}, valid_vocab {valid}"
    settings = f"{settings}, {terms.settings}"
    sum_of_inputs = checksum(
        request.live, (request.target_ids, request.temperatures, list_checksums(request), *terms.per_token)
    )
    facts = (own, layout.n_rows, shard.vocab, shard.whole, valid or 0, settings, layout.caller, shard.group)
    return shard_columns(sum_of_inputs, *facts)


def _of_group(caller: str, group: Any, vocab: int = 0, whole: bool = False) -> Sharded | None:
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{caller}: group must be a torch.distributed.ProcessGroup that this rank is in, got {type(group).__name__}"
        )
    return Sharded(group.group_name, group.size(), vocab, whole) if group.size() > 1 else None


def _is_dtensor(value: Any) -> bool:
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return False
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")  # importing the class takes a second


def _columns_of(caller: str, name: str, value: Any, dim: int, group: Any) -> tuple[Any, Sharded | None]:
    """Return this rank's columns: ``value`` itself, or its part of a DTensor whose ``dim`` is the vocabulary."""
    if not _is_dtensor(value):
        return value, _of_group(caller, group)
    dim %= value.dim()
    mesh, placements = value.device_mesh, value.placements
    whole = all(placement.is_replicate() for placement in placements)
    if mesh.ndim != 1 or not (whole or placements[0].is_shard(dim)):
        raise ValueError(
            f"{caller}: {name}, a DTensor, must be Shard({dim}) or Replicate() on a mesh of one dimension, got "
            f"{list(placements)} on one of {mesh.ndim}; what fully_shard (FSDP2) adds is gone inside the forward of "
            "the module it wrapped"
        )
    ranks = mesh.get_group()
    if group is not None and group.group_name != ranks.group_name:
        raise ValueError(f"{caller}: group must be that of the DTensor's mesh, or None; got another")
    return value.to_local(), _of_group(caller, ranks, value.shape[dim], whole)


def _like_weight(caller: str, name: str, value: Any, group: Any, shard: Sharded | None) -> Any:
    """Return this rank's rows of a DTensor that must be sharded like the weight."""
    local, value_shard = _columns_of(caller, name, value, 0, group)
    if value_shard != shard:
        raise ValueError(f"{caller}: {name} must be sharded like weight, over the same ranks")
    return local


def _own_factors(caller: str, lora: LoraFactors, group: Any, shard: Sharded | None) -> LoraFactors:
    a, b = lora.a, lora.b
    if _is_dtensor(b):
        b = _like_weight(caller, "lora.b", b, group, shard)
    if _is_dtensor(a):
        a, of_a = _columns_of(caller, "lora.a", a, 0, group)
        if of_a is not None and not of_a.whole:
            raise ValueError(f"{caller}: lora.a, a DTensor, must be Replicate(): every rank multiplies by all of it")
    return LoraFactors(a, b, lora.scale)


def _hidden(caller: str, hidden: Any, shard: Sharded | None) -> tuple[Tensor, bool]:
    """Return this rank's hidden states, and whether they are only its part of the sequence."""
    mesh, placement, dim = hidden.device_mesh, hidden.placements[0], hidden.dim() - 2
    same = mesh.ndim == 1 and (mesh.size() == 1 if shard is None else mesh.get_group().group_name == shard.group)
    if not same or not (placement.is_replicate() or placement.is_shard(dim)):
        raise ValueError(
            f"{caller}: hidden, a DTensor, must be Replicate() or Shard({dim}) on the mesh of the head, got "
            f"{list(hidden.placements)} on {mesh}"
        )
    return hidden.to_local(), placement.is_shard(dim)
