"""What `algorithm: NAME` stands for: one row each, the settings that its paper trains with.

A row decides the objective (clip values, KL and aggregation are those of its row in dapo_kernels.OBJECTIVES), the
advantage, the filter and the length term, and where the paper fixes them the rewards and the updates of a step. Sizes,
lengths and learning rates are a run's own. What a recipe says itself is laid over the row; docs/algorithms.md says the
rows in words.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Algorithm:
    """``settings`` are by section, as in a recipe; ``paper`` names the equations and sections they are taken from."""

    paper: str
    settings: Mapping[str, Any]


def lay_over(under: Any, over: Any) -> Any:
    """``over`` where it says something, else ``under``: mappings, or sections of a configuration, key by key."""
    if isinstance(over, BaseModel):
        over = over.model_dump(exclude_unset=True, by_alias=True)
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: lay_over(under[key], value) if key in under else value for key, value in over.items()}}


def _row(
    paper: str, objective: str, advantage: str, /, *, dynamic_sampling: bool, soft_punishment: bool, **sections: Any
) -> Algorithm:
    """The parts that every algorithm has, and ``sections`` for what is its own."""
    settings = {
        "loss": {"objective": objective},
        "advantage": {"kind": advantage},
        "sampler": {"filter_groups": dynamic_sampling},
        "reward": {"overlong": {"soft_punishment": soft_punishment, "filter": False}},
    }
    return Algorithm(paper, lay_over(settings, sections))


# What a paper takes over of DAPO beside the loss.
_BOTH: dict[str, Any] = {"dynamic_sampling": True, "soft_punishment": True}
_FILTER: dict[str, Any] = {"dynamic_sampling": True, "soft_punishment": False}
_NEITHER: dict[str, Any] = {"dynamic_sampling": False, "soft_punishment": False}
# A response is one action: the gradient is that of its whole log-prob, under the policy that sampled it.
_ACTION: dict[str, Any] = {
    "loss": {"overrides": {"aggregate": "seq-mean-token-sum"}},
    "optimizer": {"mini_batch_size": None},
}
# The trust region is around the policy that sampled; the loss is a sum over tokens.
_DPPO: dict[str, Any] = {
    **_NEITHER,
    "loss": {"old_logprobs": "rollout", "overrides": {"aggregate": "seq-mean-token-sum-norm"}},
}


def _segments(paper: str, segments: dict[str, Any], **sections: Any) -> Algorithm:
    """Segment Policy Optimization: PPO's loss on the advantages of segments, which take the place of any other."""
    settings = {
        "loss": {"objective": "ppo", "overrides": {"kl_coef": 1e-4}},
        "advantage": {"segments": segments},
        "sampler": {"filter_groups": False},
        "reward": {"correct": 1.0, "incorrect": 0.0, "overlong": {"soft_punishment": False, "filter": False}},
    }
    return Algorithm(paper, lay_over(settings, sections))


ALGORITHMS: Mapping[str, Algorithm] = {
    "dapo": _row("Yu et al. 2025, arXiv 2503.14476, eq. 8–13", "dapo", "group_std", **_BOTH),
    "grpo": _row(
        "Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eq. 3–4, §4.1.2, §4.2",
        "grpo",
        "group_std",
        **_NEITHER,
        optimizer={"mini_batch_size": None},
    ),
    "dr_grpo": _row(
        "Liu et al. 2025, arXiv 2503.20783, §3.1–3.2",
        "dr_grpo",
        "group_mean",
        **_NEITHER,
        reward={"correct": 1.0, "incorrect": 0.0},
    ),
    "lite_ppo": _row("Liu et al. 2025 (Tricks or Traps?), arXiv 2508.08221, §5", "lite_ppo", "batch_std", **_NEITHER),
    "gspo": _row("Zheng et al. 2025, arXiv 2507.18071, eq. 5–7, §5.1", "gspo", "group_std", **_NEITHER),
    "gspo_token": _row("Zheng et al. 2025, arXiv 2507.18071, eq. 13–14, §4.3", "gspo_token", "group_std", **_NEITHER),
    "cispo": _row("Chen et al. 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4–5, §3.1", "cispo", "group_std", **_BOTH),
    "sapo": _row("Gao et al. 2025, arXiv 2511.20347, eq. 5–6", "sapo", "group_std", **_NEITHER),
    "ppo": _row(
        "Schulman et al. 2017, arXiv 1707.06347, eq. 7, 11; Ouyang et al. 2022, arXiv 2203.02155, eq. 2, app. C.4",
        "ppo",
        "gae",
        **_NEITHER,
        advantage={"gamma": 1.0, "lam": 0.95},
        critic={"clip": 0.2},
        reward={"kl": {"coef": 0.02, "estimator": "k1"}},
    ),
    "reinforce_pp": _row(
        "Hu et al. 2025 (REINFORCE++), arXiv 2501.03262",
        "ppo",
        "returns",
        **_NEITHER,
        advantage={"gamma": 1.0},
        reward={"kl": {"coef": 1e-3, "estimator": "k1"}},
    ),
    "reinforce_pp_baseline": _row(
        "Hu et al. 2025 (REINFORCE++ with baseline), arXiv 2501.03262",
        "ppo",
        "group_returns",
        **_NEITHER,
        advantage={"gamma": 1.0},
        loss={"overrides": {"kl_coef": 1e-3, "kl_estimator": "k2"}},
    ),
    "reinforce": _row(
        "Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740, eq. 6–8",
        "reinforce",
        "batch_mean",
        **_NEITHER,
        **_ACTION,
    ),
    "rloo": _row("Ahmadian et al. 2024, arXiv 2402.14740, §2", "reinforce", "leave_one_out", **_NEITHER, **_ACTION),
    "clip_cov": _row("Cui et al. 2025, arXiv 2505.22617, eq. 11, §4.3", "clip_cov", "group_std", **_FILTER),
    "kl_cov": _row("Cui et al. 2025, arXiv 2505.22617, eq. 13, §4.3", "kl_cov", "group_std", **_FILTER),
    "top_entropy": _row(
        "Wang et al. 2025 (Beyond the 80/20 Rule), arXiv 2506.01939, §5", "top_entropy", "group_std", **_BOTH
    ),
    "gmpo": _row("Zhao et al. 2025, arXiv 2507.20673, §3–4", "gmpo", "group_std", **_NEITHER),
    "luspo": _row(
        "Liu et al. 2026, arXiv 2602.05261, eq. 7, §5.1",
        "luspo",
        "group_std",
        dynamic_sampling=False,
        soft_punishment=True,
        reward={"correct": 1.0, "incorrect": 0.0},
    ),
    "vespo": _row("Shen et al. 2026, arXiv 2602.10693", "vespo", "group_std", **_NEITHER),
    "dppo_tv": _row("Qi et al. 2026, arXiv 2602.04879, eq. 12–13, §5.2, App. C, E", "dppo_tv", "group_mean", **_DPPO),
    "dppo_kl": _row(
        "Qi et al. 2026, arXiv 2602.04879, eq. 12 and 14, §5.2, App. C, E", "dppo_kl", "group_mean", **_DPPO
    ),
    "dpo": _row(
        "Rafailov et al. 2023, arXiv 2305.18290, eq. 7; Dong et al. 2024 (RLHF Workflow), arXiv 2405.07863, §3",
        "dapo",
        "group_std",
        **_NEITHER,
        preference={"loss_type": "sigmoid", "beta": 0.1, "pairs_per_group": 1, "reference": "start"},
        optimizer={"mini_batch_size": None},
    ),
    "spo_chain": _segments("Guo et al. 2025, arXiv 2505.23564, §4, App. H", {"kind": "chain"}),
    "spo_tree": _segments(
        "Guo et al. 2025, arXiv 2505.23564, §5, App. D, H",
        {"kind": "tree", "per_step": 32},
        sampler={"max_age": 7},
        optimizer={"mini_batch_size": 128},
    ),
}


def with_algorithm(raw: Any) -> Any:
    """A recipe's sections over those of the algorithm it names; ``raw`` itself where it names none of the table."""
    name = raw.get("algorithm") if isinstance(raw, Mapping) else None
    return lay_over(ALGORITHMS[name].settings, raw) if isinstance(name, str) and name in ALGORITHMS else raw


def check_name(name: str) -> None:
    """Raises ValueError for a name that is not in the table."""
    if name in ALGORITHMS:
        return
    near = difflib.get_close_matches(name.lower().replace("-", "_"), ALGORITHMS)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"expected one of {', '.join(ALGORITHMS)}, got {name!r}{hint}")
