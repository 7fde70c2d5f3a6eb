"""The metrics of a loss call: sums over live tokens, which add up across micro-batches and ranks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_kernels.objectives.surrogate import CLIPPED_DUAL, CLIPPED_HIGH, CLIPPED_LOW
from dapo_kernels.records import LARGEST_LOGPROB

COUNTS = ("tokens", "nonfinite", "positive_logprobs", "pairs")
# Metrics of a preference loss, as sums over pairs.
PER_PAIR = ("accuracy", "margin", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected")
_CLIPPED = {"clip_low": CLIPPED_LOW, "clip_high": CLIPPED_HIGH, "clip_dual": CLIPPED_DUAL}


class PerToken(NamedTuple):
    """The inputs of the metrics, each [N] and detached; zero on masked tokens except in ``old_logprobs`` and
    ``ref_logprobs``.
    """

    live: Tensor
    logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    log_ratio: Tensor | None  # the input of the surrogate, if it is not the token's own log-ratio
    clip_hit: Tensor | None  # None: unknown
    ref_kl: Tensor | None
    entropy: Tensor | None


class Metrics(Mapping[str, Tensor]):
    """Sums over live tokens (and maxima) as 0-d tensors, without a host sync.

    They are computed when the first is read. Those of inference tensors, which have no version to show a change in
    place, are computed at once.
    """

    def __init__(self, tokens: PerToken | Mapping[str, Tensor]) -> None:
        """Take the inputs of a call, or computed sums: libraries rebuild mappings from their items."""
        if isinstance(tokens, Mapping):
            self._sums: dict[str, Tensor] = dict(tokens)
            self._tokens: PerToken | None = None
        else:
            self._sums, self._tokens, self._versions = {}, tokens, _versions(tokens)
            if self._versions is None:
                self._computed()

    def _computed(self) -> dict[str, Tensor]:
        if self._tokens is not None:
            if _versions(self._tokens) != self._versions:
                raise RuntimeError(
                    "metrics: a tensor that they are computed from (mask, old_logprobs, out.logprobs, out.entropy) was "
                    "changed in place since the loss was called; read them before that (summarize, dict(out.metrics))"
                )
            self._sums, self._tokens = token_sums(self._tokens), None
        return self._sums

    def __getitem__(self, name: str) -> Tensor:
        return self._computed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._computed())

    def __len__(self) -> int:
        return len(self._computed())

    def __repr__(self) -> str:
        return f"Metrics({self._computed()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (self._computed(),)  # torch.load refuses a call of dict


def _versions(tokens: PerToken) -> list[int] | None:
    """Return the version of each input; None if one is an inference tensor, which has no version."""
    given = [x for x in tokens if x is not None]
    return None if any(map(Tensor.is_inference, given)) else [x._version for x in given]


def token_sums(tokens: PerToken) -> dict[str, Tensor]:
    """Return the sums. Unknown ones have no key: an entropy of 0 would look like a collapsed policy."""
    live, logprobs, old_logprobs, ref_logprobs, log_ratio, clip_hit, ref_kl, entropy = tokens
    delta = torch.zeros_like(logprobs) if old_logprobs is None else logprobs - old_logprobs
    delta = torch.where(live, delta, 0.0)
    ratio = torch.where(live, (delta if log_ratio is None else log_ratio).exp(), 0.0)
    count = live.sum()
    zero = torch.zeros_like(count, dtype=logprobs.dtype)
    sums = {"tokens": count}
    if clip_hit is not None:
        sums |= {name: (clip_hit == value).sum() for name, value in _CLIPPED.items()}
        sums["clip_high_prob"] = torch.where(clip_hit == CLIPPED_HIGH, logprobs.exp(), 0.0).sum()
    sums |= {
        "ratio": ratio.sum(),
        "ratio_max": ratio.amax() if ratio.numel() else zero,
        "approx_kl": -delta.sum(),
        "ref_kl": zero if ref_kl is None else ref_kl.sum(),
        "nonfinite": (live & ~torch.isfinite(logprobs)).sum(),
        "positive_logprobs": count_positive(live, logprobs, old_logprobs, ref_logprobs),
    }
    return sums if entropy is None else sums | {"entropy": entropy.sum()}


def count_positive(live: Tensor, *logprobs: Tensor | None) -> Tensor:
    """Return the number of live tokens with a log-prob above 0 in any of ``logprobs``, [N] each: int64, 0-d."""
    above = [x > LARGEST_LOGPROB for x in logprobs if x is not None]
    return (live & functools.reduce(torch.logical_or, above)).sum()


def summarize(metrics: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the metrics of one call, or of several (micro-batches, ranks), as plain numbers.

    Sums become means per live token, or per pair of a preference loss. Without a live token every mean is 0. Copies the
    values to the host. With ℓ, ℓ_old and ℓ_ref the log-probs of a token under the trained, the old and the reference
    policy, A its advantage and ρ the ratio of the objective (its token's, exp(ℓ − ℓ_old), or its sequence's)::

        tokens             number of live tokens
        approx_kl          mean of ℓ_old − ℓ in nats, an estimate of KL(old‖new) that may be negative; 0 on-policy
        ratio, ratio_max   mean and maximum of ρ; 1 on-policy
        ref_kl             mean in nats of the KL estimate (``kl_estimator``) that ``kl_coef`` weighs; 0 if kl_coef=0
        entropy            mean entropy in nats; only of calls that computed it (``entropy=True``, or the objective)
        clip_low           share of tokens without a policy gradient because ρ < 1 − clip_low and A < 0
        clip_high          share of tokens without a policy gradient because ρ > 1 + clip_high and A > 0
        clip_dual          share of tokens with A < 0 whose loss ``dual_clip`` bounds
        clip_high_prob     mean of exp(ℓ) over the tokens of clip_high; absent if there are none
        nonfinite          number of tokens whose ℓ is NaN or infinite. Such inputs are not counted: ℓ_old shows in
                           approx_kl, ℓ_ref in ref_kl, A in the loss
        positive_logprobs  number of tokens with ℓ, ℓ_old or ℓ_ref above 0 (on the CPU an error if it is an input)

    With ``cispo`` a bound counts for either sign of A and stops only the growth of the weight. With ``up`` clip_high is
    0. With ``dppo_*`` clip_low and clip_high count by the change of the probability, and clip_dual by ρ > dual_clip.
    With a function as objective the ``clip_*`` metrics are absent. A token counts also if its importance weight is 0.

    A preference loss has ``pairs``, their number, and as means per pair ``accuracy`` (of a positive margin), ``margin``
    (reward_chosen − reward_rejected), ``reward_chosen`` and ``reward_rejected`` (β·Σ(ℓ − ℓ_ref), in nats),
    ``logprob_chosen`` and ``logprob_rejected``.

    Args:
        metrics: ``metrics`` of one output of a loss, or an iterable of several.

    Returns:
        numbers by name.

    Example:
        >>> import torch
        >>> from dapo_kernels import policy_loss, summarize
        >>> micro_batches = torch.tensor([[-0.5], [-1.0]]), torch.tensor([[-1.5], [-2.0]])
        >>> metrics = [policy_loss(x, x + 0.1, torch.ones(2)).metrics for x in micro_batches]
        >>> means = summarize(metrics)
        >>> means["tokens"], round(means["approx_kl"], 4)
        (4.0, 0.1)
    """
    return _summary("summarize", _tables("summarize", metrics))


def reduce_metrics(
    metrics: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return ``summarize`` of the metrics of all ranks of a process group, bit-identical on each rank.

    Collective: every rank of the group calls it with the metrics of its own call or micro-batches, also with none
    (``[]``). With NCCL, a rank's current CUDA device must be its own. Without an initialized process group the result
    is that of ``summarize``.

    Args:
        metrics: ``metrics`` of one output of a loss, or an iterable of several.
        group: the process group; by default that of all ranks.

    Returns:
        numbers by name, as ``summarize`` of one process returns them.

    Raises:
        TypeError: an output in place of its ``metrics``.
        ValueError: no rank passed metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import policy_loss, reduce_metrics
        >>> x = torch.tensor([[-0.5], [-1.0]])
        >>> reduce_metrics([policy_loss(x, x, torch.ones(2)).metrics for _ in range(3)])["tokens"]
        6.0
    """
    local = _tables("reduce_metrics", metrics)
    if not (dist.is_available() and dist.is_initialized()):
        return _summary("reduce_metrics", local)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    return _summary("reduce_metrics", [part for rank in gathered for part in rank])


def _tables(caller: str, metrics: Any) -> list[dict[str, float]]:
    """Return the sums of every call, on the host."""
    several = isinstance(metrics, Iterable) and not (isinstance(metrics, Mapping) or hasattr(metrics, "metrics"))
    parts: list[Any] = list(metrics) if several else [metrics]
    for part in parts:
        if isinstance(part, Mapping):
            wrong = [f"a mapping to {type(x).__name__}" for x in part.values() if not isinstance(x, Tensor)]
            gathered = [x for x in part.values() if isinstance(x, Tensor) and x.dim() > 0]
            wrong += [f"tensors {list(x.shape)}: for those of all ranks use reduce_metrics" for x in gathered]
        else:
            wrong = [type(part).__name__]
        if wrong:
            raise TypeError(
                f"{caller}: metrics must be the metrics of a loss (out.metrics), or several of them in a list, got "
                f"{wrong[0]}"
            )
    stacked = [(part, torch.stack([x.detach().double() for x in part.values()])) for part in parts if part]
    return [dict(zip(part, values.tolist(), strict=True)) for part, values in stacked]  # the first copy waits for all


def _summary(caller: str, table: list[dict[str, float]]) -> dict[str, float]:
    if not table:
        raise ValueError(f"{caller}: no metrics were given")
    names = dict.fromkeys(name for part in table for name in part)
    if not any(part.get("clip_high") for part in table):
        names.pop("clip_high_prob", None)  # no token was clipped
    return {name: _combined(name, [part for part in table if name in part]) for name in names}


def _combined(name: str, table: list[dict[str, float]]) -> float:
    values = torch.tensor([part[name] for part in table], dtype=torch.float64, device="cpu")
    if name.endswith("_max"):
        return float(values.amax())  # NaN if any value is
    total = float(values.sum())
    counted = "pairs" if name in PER_PAIR else "clip_high" if name == "clip_high_prob" else "tokens"
    return total if name in COUNTS else total / max(sum(part[counted] for part in table), 1.0)
