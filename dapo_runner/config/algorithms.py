"""What `algorithm: NAME` stands for: one row each, the settings that its paper trains with.

A row decides the objective (clip values, KL and aggregation are those of its row in dapo_kernels.OBJECTIVES), the
advantage, the filter and the length term, and where the paper fixes them the rewards and the updates of a step. Sizes,
lengths and learning rates are a run's own. What a recipe sets itself is laid over the row; docs/algorithms.md has the
rows in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_runner.config.section import lay_over, lay_settings


class Algorithm(NamedTuple):
    """``settings`` are by section, as in a recipe; ``paper`` names the equations and sections they are taken from."""

    paper: str
    settings: Mapping[str, Any]


FILTER = {"sampler.filter_groups": True}
PUNISH = {"reward.overlong.soft_punishment": True}
ONE_UPDATE = {"optimizer.mini_batch_size": None}
RIGHT_ONLY = {"reward.correct": 1.0, "reward.incorrect": 0.0}
PPO = {"loss.objective": "ppo"}
GAE = {"advantage": {"gamma": 1.0, "lam": 0.95}, "critic.clip": 0.2}
# A response is one action: the gradient is that of its whole log-prob, under the policy that sampled it.
ACTION = {"loss.objective": "reinforce", "loss.overrides.aggregate": "seq-mean-token-sum", **ONE_UPDATE}
# The trust region is around the policy that sampled; the loss is a sum over tokens.
DPPO = {"loss.old_logprobs": "rollout", "loss.overrides.aggregate": "seq-mean-token-sum-norm"}
PAIRS = {"preference": {"loss_type": "sigmoid", "beta": 0.1, "pairs_per_group": 1, "reference": "start"}}
SPO = {**PPO, **RIGHT_ONLY, "loss.overrides.kl_coef": 1e-4}
CHAIN = {"advantage.segments.kind": "chain"}
TREE = {"advantage.segments": {"kind": "tree", "per_step": 32}, "sampler.max_age": 7, "optimizer.mini_batch_size": 128}
# By name: the paper, the advantage, and what departs from an objective of that name without filter and length term.
_ROWS: dict[str, tuple[Any, ...]] = {
    "dapo": ("Yu et al. 2025, arXiv 2503.14476, eq. 8–13", "group_std", FILTER, PUNISH),
    "grpo": ("Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eq. 3–4, §4.1.2, §4.2", "group_std", ONE_UPDATE),
    "dr_grpo": ("Liu et al. 2025, arXiv 2503.20783, §3.1–3.2", "group_mean", RIGHT_ONLY),
    "lite_ppo": ("Liu et al. 2025 (Tricks or Traps?), arXiv 2508.08221, §5", "batch_std"),
    "gspo": ("Zheng et al. 2025, arXiv 2507.18071, eq. 5–7, §5.1", "group_std"),
    "gspo_token": ("Zheng et al. 2025, arXiv 2507.18071, eq. 13–14, §4.3", "group_std"),
    "cispo": ("Chen et al. 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4–5, §3.1", "group_std", FILTER, PUNISH),
    "sapo": ("Gao et al. 2025, arXiv 2511.20347, eq. 5–6", "group_std"),
    "ppo": (
        "Schulman et al. 2017, arXiv 1707.06347, eq. 7, 11; Ouyang et al. 2022, arXiv 2203.02155, eq. 2, app. C.4",
        *("gae", PPO, GAE, {"reward.kl": {"coef": 0.02, "estimator": "k1"}}),
    ),
    "reinforce_pp": (
        "Hu et al. 2025 (REINFORCE++), arXiv 2501.03262",
        *("returns", PPO, {"advantage.gamma": 1.0, "reward.kl": {"coef": 1e-3, "estimator": "k1"}}),
    ),
    "reinforce_pp_baseline": (
        "Hu et al. 2025 (REINFORCE++ with baseline), arXiv 2501.03262",
        *("group_returns", PPO, {"advantage.gamma": 1.0, "loss.overrides": {"kl_coef": 1e-3, "kl_estimator": "k2"}}),
    ),
    "reinforce": ("Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740, eq. 6–8", "batch_mean", ACTION),
    "rloo": ("Ahmadian et al. 2024, arXiv 2402.14740, §2", "leave_one_out", ACTION),
    "clip_cov": ("Cui et al. 2025, arXiv 2505.22617, eq. 11, §4.3", "group_std", FILTER),
    "kl_cov": ("Cui et al. 2025, arXiv 2505.22617, eq. 13, §4.3", "group_std", FILTER),
    "top_entropy": ("Wang et al. 2025 (Beyond the 80/20 Rule), arXiv 2506.01939, §5", "group_std", FILTER, PUNISH),
    "gmpo": ("Zhao et al. 2025, arXiv 2507.20673, §3–4", "group_std"),
    "luspo": ("Liu et al. 2026, arXiv 2602.05261, eq. 7, §5.1", "group_std", PUNISH, RIGHT_ONLY),
    "vespo": ("Shen et al. 2026, arXiv 2602.10693", "group_std"),
    "dppo_tv": ("Qi et al. 2026, arXiv 2602.04879, eq. 12–13, §5.2, App. C, E", "group_mean", DPPO),
    "dppo_kl": ("Qi et al. 2026, arXiv 2602.04879, eq. 12 and 14, §5.2, App. C, E", "group_mean", DPPO),
    "dpo": (
        "Rafailov et al. 2023, arXiv 2305.18290, eq. 7; Dong et al. 2024 (RLHF Workflow), arXiv 2405.07863, §3",
        *("group_std", {"loss.objective": "dapo"}, PAIRS, ONE_UPDATE),
    ),
    "spo_chain": ("Guo et al. 2025, arXiv 2505.23564, §4, App. H", "group_std", SPO, CHAIN),
    "spo_tree": ("Guo et al. 2025, arXiv 2505.23564, §5, App. D, H", "group_std", SPO, TREE),
}


def _make(name: str, paper: str, advantage: str, *own: Mapping[str, Any]) -> Algorithm:
    settings = lay_settings({}, {"loss.objective": name, "advantage.kind": advantage, "sampler.filter_groups": False})
    settings["reward"] = {"overlong": {"soft_punishment": False, "filter": False}}
    for sections in own:
        settings = lay_settings(settings, sections)
    return Algorithm(paper, settings)


ALGORITHMS: Mapping[str, Algorithm] = {name: _make(name, *row) for name, row in _ROWS.items()}


def with_algorithm(raw: Any) -> Any:
    """Lay a recipe's sections over those of the algorithm it names; one that is not in the table is left alone."""
    row = ALGORITHMS.get(str(raw.get("algorithm"))) if isinstance(raw, Mapping) else None
    return lay_over(row.settings, raw) if row else raw
