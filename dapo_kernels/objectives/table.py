"""The table of objectives. Each row sets a few fields, with values from a paper.

An objective only defines O(tokens) arithmetic: how a token's log-prob, advantage and ratio become a loss, and how token
losses are aggregated. The kernels over the vocabulary do not know its name.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypedDict, TypeGuard, get_args

from dapo_kernels.objectives.unknown import unknown_keyword, unknown_objective

Surrogate = Literal["clip", "cispo", "reinforce", "sapo", "dppo_tv", "dppo_kl", "up"]
Ratio = Literal["token", "sequence", "sequence_token", "sequence_clipped"]
KLEstimator = Literal["k1", "k2", "k3"]
KLTo = Literal["reference", "old"]
Aggregate = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"
]
SURROGATES, RATIOS, KL_ESTIMATORS, KL_TO, AGGREGATES = map(get_args, (Surrogate, Ratio, KLEstimator, KLTo, Aggregate))
BATCH_SELECTIONS = ("top_entropy", "clip_cov", "kl_cov")
_SEQUENCE_WEIGHTS = ("vespo", "off_policy_mask")
_DPPO = ("dppo_tv", "dppo_kl")
DUAL_CLIPPED = ("clip", "up", *_DPPO)
_LARGEST = 3.4e38
# The fields that apply to a user-defined loss function.
_READ_BESIDE_OWN = ("surrogate", "aggregate", "length_norm", "top_entropy", "max_old_prob", "paper")
PROMPT_MEAN = "prompt-mean-token-mean"


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is a Python or NumPy number, with which tensors compute: ``Fraction`` is not."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    return isinstance(value, numbers.Real) and hasattr(value, "dtype")


def _is_number(value: object, low: float, high: float, *, open_low: bool = False) -> bool:
    return is_number(value) and low <= value <= high and not (open_low and value == low)


def _number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value, low, high):
        bounds = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"at least {low:g}"
        raise ValueError(f"{name} must be a number {bounds}, got {value!r}")


def _share(name: str, value: object) -> None:
    if value is not None and not _is_number(value, 0.0, 1.0, open_low=True):
        raise ValueError(f"{name} must be in (0, 1], or None; got {value!r}")


def _numbers(name: str, values: object, parts: tuple[str, ...], positive: int) -> None:
    """Check a tuple with one number for each of ``parts``, of which the first ``positive`` must be above 0."""
    ok = isinstance(values, (tuple, list)) and len(values) == len(parts)
    ok = ok and all(_is_number(value, -_LARGEST, _LARGEST) for value in values)  # type: ignore[attr-defined]
    if not ok or any(value <= 0 for value in values[:positive]):  # type: ignore[index]
        raise ValueError(f"{name} must be ({', '.join(parts)}), numbers, the first {positive} positive; got {values!r}")


@dataclass(frozen=True)
class Objective:
    """A policy-gradient objective over tokens.

    ``surrogate`` may also be a user-defined function (docs/objectives.md): then only ``aggregate``, ``length_norm``,
    ``top_entropy`` and ``max_old_prob`` are read.

    With ℓ the policy's log-prob of a token, ρ = exp(ℓ − ℓ_old) its ratio and A its advantage:

    Attributes:
        surrogate: ``"clip"``: −min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A) (PPO, eq. 7);
            ``"cispo"``: −sg[clip(ρ, 1−clip_low, 1+clip_high)]·A·ℓ; ``"reinforce"``: −A·ℓ;
            ``"sapo"``: −A·σ(κ(ρ−1))·4/κ; ``"dppo_tv"``, ``"dppo_kl"``: −sg[min(ρ, dual_clip)]·A·ℓ, or zero if the
            token's probability has changed by more than clip_low or clip_high in the direction of A (DPPO);
            ``"up"``: −A·ℓ for A > 0, else −min(ρA, max(ρ, 1−clip_low)·A) (UP).
        ratio: ``"token"``: ρ = exp(ℓ − ℓ_old); ``"sequence"``: the exponential of the mean of ℓ − ℓ_old over the
            sequence (GSPO); ``"sequence_token"``: that value with each token's own gradient (GSPO-token);
            ``"sequence_clipped"``: as ``"sequence"``, with every token's ratio clipped before the mean (GMPO).
        clip_low: how far below 1 the ratio may fall before its gradient stops, in [0, 1]. With ``"dppo_*"`` it limits
            the change of the token's probability, as total variation or KL divergence.
        clip_high: how far above 1 the ratio may rise; may be ``math.inf``. With ``"dppo_*"`` like clip_low.
        dual_clip: for A < 0 the clip loss is at most −dual_clip·A (Ye et al. 2020); above 1, or ``None``. With
            ``"dppo_*"`` it limits the weight of a ratio, but does not stop its gradient.
        sapo_tau: κ for A > 0 and for A ≤ 0.
        vespo: (k, λ for A ≥ 0, k, λ for A < 0): the policy term is multiplied by W^k·exp(λ(1 − W)), a constant, where
            log W is the sum of ℓ − ℓ_old over the sequence.
        off_policy_mask: where a sequence's mean of ℓ_old − ℓ exceeds this, tokens with A < 0 lose their policy term.
        kl_coef: weight of a KL penalty to ``ref_logprobs``.
        kl_estimator: with d = ℓ_ref − ℓ: ``"k1"`` −d, ``"k2"`` ½d², ``"k3"`` exp(d) − d − 1.
        kl_to: ``"reference"``, or ``"old"``: a penalty to ``old_logprobs`` instead of ``ref_logprobs``.
        kl_through_ratio: multiply k3 by ρ, with its gradient, which corrects it for off-policy tokens.
        entropy_coef: weight of the entropy bonus, exact over the vocabulary.
        aggregate: ``"token-mean"`` ΣL/tokens; ``"seq-mean-token-mean"`` the mean over sequences of their token means;
            ``"seq-mean-token-sum"`` the mean over sequences of their sums; ``"seq-mean-token-sum-norm"`` the same
            divided by ``length_norm``; ``"prompt-mean-token-mean"`` the mean over prompts of the token means of their
            groups of responses (DAPO, eq. 8 as printed). Only live tokens (those that train) count. A sequence or
            prompt without a live token does not count.
        length_norm: the constant of ``"seq-mean-token-sum-norm"`` (Dr.GRPO: the maximum response length).
        top_entropy: only this share of the live tokens trains, those with the highest entropy. The denominator does not
            change.
        clip_cov: (share, low, high): this share of the live tokens loses its policy gradient. It is drawn at random
            from the tokens whose covariance of advantage and log-prob is in (low, high).
        kl_cov: (share, coef): this share of the live tokens, those with the highest covariance, gets the penalty
            coef·|ℓ − ℓ_old|, times the token's importance weight.
        max_old_prob: tokens above this probability under the old policy do not train. The denominator does not change.
        paper: the source of the row.

    Example:
        >>> from dataclasses import replace
        >>> from dapo_kernels import OBJECTIVES
        >>> dapo = OBJECTIVES["dapo"]
        >>> dapo.clip_low, dapo.clip_high, dapo.aggregate
        (0.2, 0.28, 'token-mean')
        >>> replace(dapo, kl_coef=0.01).kl_coef
        0.01
    """

    surrogate: Surrogate | Callable[..., Any] = "clip"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    vespo: tuple[float, float, float, float] | None = None
    off_policy_mask: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_to: KLTo = "reference"
    kl_through_ratio: bool = False
    entropy_coef: float = 0.0
    aggregate: Aggregate = "token-mean"
    length_norm: float | None = None
    top_entropy: float | None = None
    clip_cov: tuple[float, float, float] | None = None
    kl_cov: tuple[float, float] | None = None
    max_old_prob: float | None = None
    paper: str = ""

    def __post_init__(self) -> None:
        if callable(self.surrogate):
            self._refuse_unread()
        else:
            _one_of("surrogate", self.surrogate, SURROGATES)
        _one_of("ratio", self.ratio, RATIOS)
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("kl_to", self.kl_to, KL_TO)
        _one_of("aggregate", self.aggregate, AGGREGATES)
        _number("clip_low", self.clip_low, 0.0, 1.0)
        _number("clip_high", self.clip_high, 0.0, math.inf)
        _number("kl_coef", self.kl_coef, 0.0, _LARGEST)
        if not _is_number(self.entropy_coef, -_LARGEST, _LARGEST):
            raise ValueError(f"entropy_coef must be a finite number, got {self.entropy_coef!r}")
        if self.dual_clip is not None and not _is_number(self.dual_clip, 1.0, math.inf, open_low=True):
            raise ValueError(f"dual_clip must be greater than 1, or None; got {self.dual_clip!r}")
        if self.length_norm is not None and not _is_number(self.length_norm, 0.0, _LARGEST, open_low=True):
            raise ValueError(f"length_norm must be positive, or None; got {self.length_norm!r}")
        _numbers("sapo_tau", self.sapo_tau, ("κ for A > 0", "κ for A ≤ 0"), positive=2)
        if self.vespo is not None:
            _numbers("vespo", self.vespo, ("k for A ≥ 0", "λ for A ≥ 0", "k for A < 0", "λ for A < 0"), positive=4)
        if self.off_policy_mask is not None:
            _number("off_policy_mask", self.off_policy_mask, 0.0, _LARGEST)
        _share("top_entropy", self.top_entropy)
        _share("max_old_prob", self.max_old_prob)
        if self.clip_cov is not None:
            _numbers("clip_cov", self.clip_cov, ("share", "low", "high"), positive=1)
            _share("the share of clip_cov", self.clip_cov[0])
            if not self.clip_cov[1] < self.clip_cov[2]:
                raise ValueError(f"clip_cov must have low < high, got {self.clip_cov!r}")
        if self.kl_cov is not None:
            _numbers("kl_cov", self.kl_cov, ("share", "coef"), positive=1)
            _share("the share of kl_cov", self.kl_cov[0])
        self._refuse_meaningless()

    def _refuse_unread(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in _READ_BESIDE_OWN and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is not supported with an objective of your own: compute it inside")

    def _refuse_meaningless(self) -> None:
        if not isinstance(self.kl_through_ratio, bool):
            raise ValueError(f"kl_through_ratio must be True or False, got {self.kl_through_ratio!r}")
        if self.kl_through_ratio and self.kl_estimator != "k3":
            raise ValueError(f"kl_through_ratio=True requires kl_estimator='k3', got {self.kl_estimator!r}")
        if self.kl_through_ratio and self.ratio != "token":
            raise ValueError(f"kl_through_ratio=True requires ratio='token', got {self.ratio!r}")
        if self.dual_clip is not None and self.surrogate not in DUAL_CLIPPED:
            raise ValueError(f"dual_clip requires surrogate 'clip', 'up' or 'dppo_*', got {self.surrogate!r}")
        if self.ratio != "token" and self.surrogate in _DPPO:
            raise ValueError(f"surrogate={self.surrogate!r} requires ratio='token', got {self.ratio!r}")
        if self.ratio == "sequence_clipped" and self.surrogate != "clip":
            raise ValueError(f"ratio='sequence_clipped' requires surrogate='clip', got {self.surrogate!r}")
        if self.ratio == "sequence_clipped" and self.dual_clip is not None:
            raise ValueError("dual_clip is not supported with ratio='sequence_clipped': leave it out")
        if self.kl_to == "old" and self.kl_estimator == "k1":
            raise ValueError("kl_to='old' requires kl_estimator='k2' or 'k3', got 'k1'")
        if self.surrogate == "reinforce" and (self.ratio != "token" or self.clip_cov or self.kl_cov):
            raise ValueError("surrogate='reinforce' is not supported with ratio, clip_cov or kl_cov: leave them out")
        chosen = [name for name in BATCH_SELECTIONS if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} each select tokens of the whole batch: choose one")

    @property
    def per_sequence(self) -> str | None:
        """The field, if any, for which the loss needs the boundaries of sequences."""
        fields = ("aggregate", "ratio", *_SEQUENCE_WEIGHTS)
        return next((name for name in fields if getattr(self, name) != getattr(type(self), name)), None)

    @property
    def sequence_weight(self) -> bool:
        """Whether the weight of a token's policy term depends on its sequence."""
        return any(getattr(self, name) is not None for name in _SEQUENCE_WEIGHTS)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty needs ``ref_logprobs``."""
        return self.kl_coef != 0 and self.kl_to == "reference"

    @property
    def batch_selection(self) -> str | None:
        """The field, if any, that selects tokens over the whole batch."""
        return next((name for name in BATCH_SELECTIONS if getattr(self, name) is not None), None)

    @property
    def one_pass(self) -> bool:
        """Whether a token's gradient depends only on its own row: log-prob and gradient are computed in one visit."""
        return self.ratio == "token" and not self.sequence_weight and self.batch_selection is None

    @property
    def own(self) -> Callable[..., Any] | None:
        """The user-defined loss function, see ``own.py``; or None."""
        return None if isinstance(self.surrogate, str) else self.surrogate


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
GSPO = replace(
    PPO,
    ratio="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
    aggregate="seq-mean-token-mean",
    paper="Zheng et al. 2025, arXiv 2507.18071, eq. 5",
)
GSPO_TOKEN = replace(GSPO, ratio="sequence_token", paper="Zheng et al. 2025, arXiv 2507.18071, eq. 13")
CISPO = replace(
    PPO,
    surrogate="cispo",
    clip_low=1.0,
    clip_high=4.0,
    paper="Chen et al. 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4",
)
LITE_PPO = replace(PPO, paper="Liu et al. 2025 (Tricks or Traps?), arXiv 2508.08221")
REINFORCE = replace(PPO, surrogate="reinforce", paper="Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740")
CLIP_COV = replace(
    PPO,
    clip_low=1.0,
    clip_high=1.0,  # of the authors' script: no equation of the paper clips the ratio
    clip_cov=(2e-4, 1.0, 5.0),
    paper="Cui et al. 2025, arXiv 2505.22617, eq. 11",
)
KL_COV = replace(
    PPO,
    clip_low=1.0,
    clip_high=math.inf,
    kl_cov=(2e-4, 1.0),
    paper="Cui et al. 2025, arXiv 2505.22617, eq. 13",
)
TOP_ENTROPY = replace(DAPO, top_entropy=0.2, paper="Wang et al. 2025 (Beyond the 80/20 Rule), arXiv 2506.01939")
SPO = replace(PPO, max_old_prob=0.9, paper="Guo et al. 2025 (Segment Policy Optimization), arXiv 2505.23564")
SAPO = replace(
    PPO,
    surrogate="sapo",
    aggregate="seq-mean-token-mean",
    paper="Gao et al. 2025, arXiv 2511.20347, eq. 5–6",
)
TWO_SIDED = replace(
    GRPO,
    dual_clip=4.0,
    kl_coef=0.001,
    paper="Prime Intellect 2025 (INTELLECT-2), arXiv 2505.07291",
)
GMPO = replace(
    PPO,
    ratio="sequence_clipped",
    clip_low=-math.expm1(-0.4),
    clip_high=math.expm1(0.4),
    aggregate="seq-mean-token-mean",
    paper="Zhao et al. 2025, arXiv 2507.20673",
)
LUSPO = replace(
    GSPO,
    clip_low=2e-3,
    clip_high=2.5e-3,
    aggregate="seq-mean-token-sum",
    paper="Liu et al. 2026, arXiv 2602.05261",
)
VESPO = replace(REINFORCE, vespo=(2.0, 3.0, 3.0, 2.0), paper="Shen et al. 2026, arXiv 2602.10693")
DPPO_TV = replace(PPO, surrogate="dppo_tv", paper="Qi et al. 2026, arXiv 2602.04879, eq. 12–13")
DPPO_KL = replace(
    PPO, surrogate="dppo_kl", clip_low=0.05, clip_high=0.05, paper="Qi et al. 2026, arXiv 2602.04879, eq. 12 and 14"
)
UP = replace(PPO, surrogate="up", paper="Fan et al. 2026, arXiv 2607.06987")
OPSM = replace(
    GRPO,
    off_policy_mask=0.5,
    kl_coef=0.0,
    paper="DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv 2512.02556, eq. 8–9",
)
DRO = replace(
    REINFORCE,
    kl_coef=0.05,
    kl_estimator="k2",
    kl_to="old",
    paper="Richemond et al. 2024, arXiv 2405.19107; Kimi Team 2025, arXiv 2501.12599",
)

_ROWS: dict[str, Objective] = {
    "ppo": PPO,
    "grpo": GRPO,
    "dapo": DAPO,
    "dr_grpo": DR_GRPO,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "cispo": CISPO,
    "lite_ppo": LITE_PPO,
    "reinforce": REINFORCE,
    "clip_cov": CLIP_COV,
    "kl_cov": KL_COV,
    "top_entropy": TOP_ENTROPY,
    "spo": SPO,
    "sapo": SAPO,
    "two_sided": TWO_SIDED,
    "gmpo": GMPO,
    "luspo": LUSPO,
    "vespo": VESPO,
    "dppo_tv": DPPO_TV,
    "dppo_kl": DPPO_KL,
    "up": UP,
    "opsm": OPSM,
    "dro": DRO,
}
OBJECTIVES: Mapping[str, Objective] = MappingProxyType(_ROWS)

FIELDS = tuple(field.name for field in dataclasses.fields(Objective) if field.name != "paper")


class ObjectiveFields(TypedDict, total=False):
    """Fields of ``Objective`` as keywords that apply to one call."""

    surrogate: Surrogate | Callable[..., Any]
    ratio: Ratio
    clip_low: float
    clip_high: float
    dual_clip: float | None
    sapo_tau: tuple[float, float]
    vespo: tuple[float, float, float, float] | None
    off_policy_mask: float | None
    kl_coef: float
    kl_estimator: KLEstimator
    kl_to: KLTo
    kl_through_ratio: bool
    entropy_coef: float
    aggregate: Aggregate
    length_norm: float | None
    top_entropy: float | None
    clip_cov: tuple[float, float, float] | None
    kl_cov: tuple[float, float] | None
    max_old_prob: float | None


# The parameters of each loss, which ``shows_options`` fills in: what a message about an unknown keyword may suggest.
PARAMETERS: dict[str, tuple[str, ...]] = {}
# Fields that only some surrogates read. Setting one for another surrogate is an error.
_CLIPPING = ("cispo", *DUAL_CLIPPED)
READ_BY = {"clip_low": _CLIPPING, "clip_high": ("clip", "cispo", *_DPPO), "sapo_tau": ("sapo",)}


def resolve_objective(
    caller: str,
    objective: str | Objective | Callable[..., Any],
    overrides: Mapping[str, Any],
) -> Objective:
    """Return the objective of a call: a row of the table, or a function, with the fields that the call overrides.

    Raises:
        ValueError: unknown name, or a field's value out of range.
        TypeError: an override that is not a field, or an objective that is neither a name, an ``Objective`` nor a
            function.
    """
    if isinstance(objective, str):
        # Not OBJECTIVES: torch.compile does not support a mapping proxy after the call has popped its options.
        if objective not in _ROWS:
            raise unknown_objective(caller, objective, _ROWS)
        objective = _ROWS[objective]
    elif not isinstance(objective, Objective):
        if not callable(objective) or isinstance(objective, type):
            raise TypeError(
                f"{caller}: objective must be a name ({', '.join(_ROWS)}), an Objective or a function, "
                f"got {type(objective).__name__}"
            )
        objective = Objective(surrogate=objective)
    if overrides:
        objective = _with_overrides(caller, objective, overrides)
    if objective.length_norm is not None and objective.aggregate != "seq-mean-token-sum-norm":
        raise ValueError(f"{caller}: length_norm is not supported with aggregate={objective.aggregate!r}: leave it out")
    return objective


def _with_overrides(caller: str, objective: Objective, overrides: Mapping[str, Any]) -> Objective:
    unknown = [name for name in overrides if name not in FIELDS]
    if unknown:
        raise unknown_keyword(caller, unknown[0], dict.fromkeys((*PARAMETERS.get(caller, ()), *FIELDS)))
    if callable(overrides.get("surrogate")):
        raise ValueError(f"{caller}: surrogate must be a name as a keyword: pass the function as objective=")
    try:
        chosen = replace(objective, **overrides)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{caller}: {error}") from None
    for name, readers in READ_BY.items():
        if name in overrides and chosen.surrogate not in readers:
            raise ValueError(f"{caller}: {name} requires surrogate {' or '.join(readers)}, got {chosen.surrogate!r}")
    for name in ("kl_to", "kl_through_ratio"):  # a schedule may reach kl_coef=0 beside them
        if chosen.kl_coef == 0 and "kl_coef" not in overrides and overrides.get(name) in ("old", True):
            raise ValueError(f"{caller}: {name}={overrides[name]!r} requires kl_coef: pass it, or leave {name} out")
    return chosen
