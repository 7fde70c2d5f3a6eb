"""Run a causal language model on a few tokens and compare it with what the loss assumes of its architecture.

The loss multiplies the last hidden states by the output head and never calls the model for its logits, and only the
model keeps sequences apart, and from their padding. A configuration does not tell either, so both are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dapo_kernels.integrations.heads import LogitRule, head_of

_FIRST, _SECOND = 5, 9  # tokens of the two sequences
_REACH = 100.0  # the head's output is scaled to this, so that a softcap shows with small weights too
HiddenStates = Callable[[Tensor, list[int]], Tensor]  # ids int64 [T] on the CPU, lengths of their sequences -> [T, H]
RowsOfHiddenStates = Callable[[Tensor, Tensor], Tensor]  # ids and mask, int64 [B, L] on the CPU -> [B, L, H]


@torch.no_grad()
def is_causal(hidden_of: HiddenStates, vocab_size: int) -> bool:
    """Return whether tokens do not attend to later ones, so that right padding needs no attention mask."""
    first, _, second, other = _sequences(vocab_size)
    one, two = (hidden_of(torch.cat([first, after]), [_FIRST + _SECOND]) for after in (second, other))
    return _distance(one[:_FIRST], two[:_FIRST]) <= _tolerance(one) * _distance(one[_FIRST:], two[_FIRST:])


@torch.no_grad()
def is_packable(hidden_of: HiddenStates, vocab_size: int) -> bool:
    """Return whether packed sequences do not see each other, and give the same as each one alone.

    A change counts relative to the effect of the first sequence on the second if both are one sequence. Rounding, which
    in expert layers depends on the other tokens, is far below that.
    """
    first, other, second, _ = _sequences(vocab_size)
    both, beside = torch.cat([first, second]), torch.cat([other, second])
    seen, unseen = (
        [hidden_of(ids, lengths)[_FIRST:] for ids in (both, beside)]
        for lengths in ([_FIRST + _SECOND], [_FIRST, _SECOND])
    )
    tolerance = _tolerance(seen[0]) * _distance(*seen)
    alone = hidden_of(second, [_SECOND])  # another shape, so rounded differently throughout
    return _distance(*unseen) <= tolerance and _distance(unseen[0], alone) <= 4 * tolerance


@torch.no_grad()
def ignores_left_padding(rows_of: RowsOfHiddenStates, vocab_size: int) -> bool:
    """Return whether masked tokens before a sequence, whatever they are, change neither it nor its positions."""
    first, _, second, _ = _sequences(vocab_size)
    ids = torch.stack([torch.cat(order) for order in ((first, second), (first, second), (second, first))])
    mask = torch.ones_like(ids)
    mask[1, :_FIRST] = mask[2, _SECOND:] = 0
    hidden = rows_of(ids, mask)
    seen, unseen, alone = hidden[0, _FIRST:], hidden[1, _FIRST:], hidden[2, :_SECOND]
    return _distance(unseen, alone) <= 4 * _tolerance(hidden) * _distance(seen, alone)


def _sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in (_FIRST, _FIRST, _SECOND, _SECOND)]


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest change of a token (L2 norm); infinity for NaN."""
    moved = (one.float() - other.float()).norm(dim=-1).max()
    return float(moved.nan_to_num(torch.inf))


def _tolerance(values: Tensor, least: float = 1e-4) -> float:
    """Return the relative rounding error allowed for ``values``; under autocast also for its dtype."""
    kind, dtypes = values.device.type, [values.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    return max(least, *(8 * torch.finfo(dtype).eps for dtype in dtypes))


@torch.no_grad()
def check_logits(model: Any, hidden: Tensor, logits_of: Callable[[], Tensor], group: Any = None) -> None:
    """Check that a model's logits are those of its output head and ``LogitRule``.

    Args:
        model: a ``PreTrainedModel`` with a language-model head, or a PEFT model around one.
        hidden: [..., H], the hidden states of some tokens.
        logits_of: runs the model on the same tokens; returns logits [..., V] or this rank's columns of them.
        group: the ranks over which the rows of the head are split. For a ``DTensor`` head its mesh is used.

    Raises:
        ValueError: they differ.
    """
    differ = (
        f"the logits of {type(model).__name__} are not its output head applied to its last hidden states: it "
        "transforms, caps or scales them in a way that is not supported"
    )
    layer, head, rule = model.get_output_embeddings(), head_of(model, hidden), LogitRule.of(model.config, 1.0)
    if head.weight.shape[1] != hidden.shape[-1]:
        raise ValueError(differ)
    ours = torch.nn.functional.linear(hidden, head.weight, head.bias)
    if head.lora is not None:
        ours = ours + head.lora.scale * (hidden @ head.lora.a.mT @ head.lora.b.mT)
    if isinstance(layer.weight, DTensor):  # ``head`` is whole; the model's logits may be split
        group = layer.weight.device_mesh.get_group(layer.weight.device_mesh.ndim - 1)
    else:
        ours = _join_columns(ours, group)
    largest = float(ours.abs().max())
    # A head of zeros (a new one) has no output to scale: an offset shows a softcap as well.
    gain, offset = (_REACH / largest, 0.0) if largest != 0 else (1.0, _REACH)
    scaled = []

    def scale(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        scaled.append(output)
        return output * gain + offset

    handle = layer.register_forward_hook(scale)
    try:
        theirs = logits_of()
    finally:
        handle.remove()
    if isinstance(theirs, DTensor):
        theirs = theirs.full_tensor()
    elif theirs.shape != ours.shape:
        theirs = _join_columns(theirs, group)
    ours = ours.float() * gain + offset if scaled else ours.float()
    ours = (ours if rule.softcap is None else rule.softcap * torch.tanh(ours / rule.softcap)) / rule.temperature
    tolerance = max(_tolerance(rounded, 1e-5) for rounded in (hidden, layer.weight)) * ours.abs().max()
    if theirs.shape != ours.shape or not bool((theirs.float() - ours).abs().max() <= tolerance):
        raise ValueError(differ)


def _join_columns(part: Tensor, group: Any) -> Tensor:
    """Return the columns of all ranks of a group; their number may differ by rank."""
    if group is None:
        return part
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part.cpu(), group)
    return torch.cat(parts, -1).to(part.device)


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Run a model in eval mode and uncompiled; restore its modes afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
