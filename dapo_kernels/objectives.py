"""The table of objectives: each row a few fields, each taken from a paper.

An objective decides only O(tokens) arithmetic: how a token's log-prob, advantage and ratio become a loss, and how
token losses become one number. The kernels over the vocabulary never see its name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

SURROGATES = ("clip", "reinforce")
KL_ESTIMATORS = ("k1", "k2", "k3")
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def _is_number(value: object, low: float, high: float, *, open_low: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return low <= value <= high and not (open_low and value == low)


def _number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value, low, high):
        bounds = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"at least {low:g}"
        raise ValueError(f"{name} must be a number {bounds}, got {value!r}")


@dataclass(frozen=True)
class Objective:
    """A policy-gradient objective over tokens.

    With ℓ the policy's log-prob of a token, ρ = exp(ℓ − ℓ_old) its ratio and A its advantage:

    Attributes:
        surrogate: ``"clip"``: −min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A) (PPO, eq. 7);
            ``"reinforce"``: −A·ℓ.
        clip_low: how far below 1 the ratio may fall before its gradient stops, in [0, 1].
        clip_high: how far above 1 it may rise; may be ``math.inf``.
        dual_clip: for A < 0 the loss never exceeds −dual_clip·A (Ye et al. 2020); above 1, or ``None``.
        kl_coef: weight of a KL penalty to ``ref_logprobs``; with d = ℓ_ref − ℓ:
        kl_estimator: ``"k1"`` −d, ``"k2"`` ½d², ``"k3"`` exp(d) − d − 1.
        kl_through_ratio: multiply k3 by ρ, with its gradient, which corrects it for off-policy tokens.
        entropy_coef: weight of the entropy bonus, exact over the vocabulary.
        aggregate: ``"token-mean"`` ΣL/tokens; ``"seq-mean-token-mean"`` the mean over sequences of their token means;
            ``"seq-mean-token-sum"`` the mean over sequences of their sums; ``"seq-mean-token-sum-norm"`` the same
            divided by ``length_norm``. Only live tokens, and sequences with at least one, count.
        length_norm: the constant of ``"seq-mean-token-sum-norm"`` (Dr.GRPO: the longest response allowed).
        paper: where the row comes from.
    """

    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_through_ratio: bool = False
    entropy_coef: float = 0.0
    aggregate: str = "token-mean"
    length_norm: float | None = None
    paper: str = ""

    def __post_init__(self) -> None:
        _one_of("surrogate", self.surrogate, SURROGATES)
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("aggregate", self.aggregate, AGGREGATES)
        _number("clip_low", self.clip_low, 0.0, 1.0)
        _number("clip_high", self.clip_high, 0.0, math.inf)
        if self.dual_clip is not None and not _is_number(self.dual_clip, 1.0, math.inf, open_low=True):
            raise ValueError(f"dual_clip must be greater than 1, or None; got {self.dual_clip!r}")
        _number("kl_coef", self.kl_coef, 0.0, math.inf)
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef must be finite, got {self.entropy_coef!r}")
        if self.kl_through_ratio and self.kl_estimator != "k3":
            raise ValueError(
                f"kl_through_ratio corrects the k3 estimator; it has no meaning with {self.kl_estimator!r}"
            )
        if self.length_norm is not None and not _is_number(self.length_norm, 0.0, math.inf, open_low=True):
            raise ValueError(f"length_norm must be positive, or None; got {self.length_norm!r}")

    @property
    def per_sequence(self) -> bool:
        """Whether the loss needs to know where sequences begin and end."""
        return self.aggregate != "token-mean"


PPO = Objective(paper="Schulman et al. 2017, arXiv 1707.06347")
GRPO = replace(
    PPO,
    kl_coef=0.04,
    kl_estimator="k3",
    aggregate="seq-mean-token-mean",
    paper="Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eq. 3",
)
DAPO = replace(PPO, clip_high=0.28, paper="Yu et al. 2025, arXiv 2503.14476, eq. 8")
DR_GRPO = replace(PPO, aggregate="seq-mean-token-sum-norm", paper="Liu et al. 2025, arXiv 2503.20783")
REINFORCE = replace(PPO, surrogate="reinforce", paper="Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740")

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {"ppo": PPO, "grpo": GRPO, "dapo": DAPO, "dr_grpo": DR_GRPO, "reinforce": REINFORCE}
)

FIELDS = tuple(field.name for field in dataclasses.fields(Objective) if field.name != "paper")


def resolve_objective(caller: str, objective: str | Objective, overrides: dict[str, Any]) -> Objective:
    """The objective a call asks for: a row of the table, with the call's own fields on top.

    Raises:
        ValueError: unknown name, or a field's value out of range.
        TypeError: an override that is not a field, or an objective that is neither a name nor an ``Objective``.
    """
    if isinstance(objective, str):
        if objective not in OBJECTIVES:
            raise ValueError(f"{caller}: unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
        objective = OBJECTIVES[objective]
    elif not isinstance(objective, Objective):
        raise TypeError(
            f"{caller}: objective must be a name ({', '.join(OBJECTIVES)}) or an Objective, "
            f"got {type(objective).__name__}"
        )
    unknown = [name for name in overrides if name not in FIELDS]
    if unknown:
        raise TypeError(
            f"{caller}: unknown argument {unknown[0]!r}{_near(unknown[0])}; fields: {', '.join(FIELDS)}"
        )
    return replace(objective, **overrides) if overrides else objective


def _near(name: str) -> str:
    close = difflib.get_close_matches(name, FIELDS, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
