"""The settings of `algorithm: NAME`: one row per algorithm, with the values that its paper trains with.

A row sets the objective (clip values, KL and aggregation come from dapo_kernels.OBJECTIVES), the advantage, group
filtering and the length penalty, the rewards if the paper fixes them, and the mini-batch size of on-policy ones.
It does not set sizes, lengths and learning rates. A recipe overrides its row. docs/algorithms.md describes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_runner.config.run import is_cuda
from dapo_runner.config.section import flatten, lay_over, lay_settings


class Algorithm(NamedTuple):
    """``settings`` are by section, as in a recipe; ``paper`` cites the equations and sections of their values."""

    paper: str
    settings: Mapping[str, Any]


FILTER = {"sampler.filter_groups": "correctness"}
PUNISH = {"reward.overlong.soft_punishment": True}
AS_DAPO = {**FILTER, **PUNISH}
ONE_UPDATE = {"optimizer.mini_batch_size": None}
RIGHT_ONLY = {"reward.correct": 1.0, "reward.incorrect": 0.0}
PROMPT_MEAN = {"loss.objective": "dapo", "loss.overrides.aggregate": "prompt-mean-token-mean"}
PPO = {"loss.objective": "ppo"}
GAE = {"advantage": {"gamma": 1.0, "lam": 0.95}, "critic.clip": 0.2}
# A response is one action: the gradient is that of its total log-prob, under the policy that sampled it.
ACTION = {"loss.objective": "reinforce", "loss.overrides.aggregate": "seq-mean-token-sum", **ONE_UPDATE}
# The trust region is around the policy that sampled the responses. The loss is a sum over tokens.
DPPO = {"loss.old_logprobs": "engine", "loss.overrides.aggregate": "seq-mean-token-sum-norm"}
PAIRS = {"preference": {"loss_type": "sigmoid", "beta": 0.1, "reference": "start"}}
SPO = {**PPO, **RIGHT_ONLY, "loss.overrides.kl_coef": 1e-4}
CHAIN = {"advantage.segments.kind": "chain"}
TREE = {"advantage.segments": {"kind": "tree", "per_step": 32}, "sampler.max_age": 7, "optimizer.mini_batch_size": 128}
# By name: the paper, the advantage, then settings beyond {loss.objective: NAME} without filtering or length penalty.
_ROWS: dict[str, tuple[Any, ...]] = {
    "dapo": ("Yu et al. 2025, arXiv 2503.14476, eq. 8–13", "group_std", AS_DAPO),
    "dapo_prompt_mean": ("Yu et al. 2025, arXiv 2503.14476, eq. 8 as printed, 9–13", "group_std", AS_DAPO, PROMPT_MEAN),
    "grpo": ("Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eq. 3–4, §4.1.2, §4.2", "group_std", ONE_UPDATE),
    "dr_grpo": ("Liu et al. 2025, arXiv 2503.20783, §3.1–3.2", "group_mean", RIGHT_ONLY),
    "lite_ppo": ("Liu et al. 2025 (Tricks or Traps?), arXiv 2508.08221, §5", "batch_std"),
    "gspo": ("Zheng et al. 2025, arXiv 2507.18071, eq. 5–7, §5.1", "group_std"),
    "gspo_token": ("Zheng et al. 2025, arXiv 2507.18071, eq. 13–14, §4.3", "group_std"),
    "cispo": ("Chen et al. 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4–5, §3.1", "group_std", AS_DAPO),
    "sapo": ("Gao et al. 2025, arXiv 2511.20347, eq. 5–6", "group_std"),
    "ppo": (
        "Schulman et al. 2017, arXiv 1707.06347, eq. 7, 11; Ouyang et al. 2022, arXiv 2203.02155, eq. 2, app. C.4",
        *("gae", PPO, GAE, {"reward.kl": {"coef": 0.02, "estimator": "k1"}}),
    ),
    "reinforce_pp": (
        "Hu et al. 2025 (REINFORCE++), arXiv 2501.03262, eq. 4–5, §3.1",
        *("returns", PPO, {"advantage.gamma": 1.0, "reward.kl": {"coef": 1e-3, "estimator": "k1"}}),
    ),
    "reinforce_pp_baseline": (
        "Hu et al. 2025 (REINFORCE++ with baseline), arXiv 2501.03262, eq. 6–8, §3.2",
        *("group_returns", PPO, {"advantage.gamma": 1.0, "loss.overrides": {"kl_coef": 1e-3, "kl_estimator": "k2"}}),
    ),
    "reinforce": ("Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740, eq. 6–8", "batch_mean", ACTION),
    "rloo": ("Ahmadian et al. 2024, arXiv 2402.14740, §2", "leave_one_out", ACTION),
    "clip_cov": ("Cui et al. 2025, arXiv 2505.22617, eq. 11, §4.3", "group_std", FILTER),
    "kl_cov": ("Cui et al. 2025, arXiv 2505.22617, eq. 13, §4.3", "group_std", FILTER),
    "top_entropy": ("Wang et al. 2025 (Beyond the 80/20 Rule), arXiv 2506.01939, §5", "group_std", AS_DAPO),
    "gmpo": ("Zhao et al. 2025, arXiv 2507.20673, §3–4", "group_std"),
    "luspo": ("Liu et al. 2026, arXiv 2602.05261, eq. 7, §5.1", "group_std", PUNISH, RIGHT_ONLY),
    "vespo": ("Shen et al. 2026, arXiv 2602.10693", "group_std"),
    "dppo_tv": ("Qi et al. 2026, arXiv 2602.04879, eq. 12–13, §5.2, App. C, E", "group_mean", DPPO),
    "dppo_kl": ("Qi et al. 2026, arXiv 2602.04879, eq. 12 and 14, §5.2, App. C, E", "group_mean", DPPO),
    "up": ("Fan et al. 2026 (UP), arXiv 2607.06987", "group_std", AS_DAPO),
    "dpo": (
        "Rafailov et al. 2023, arXiv 2305.18290, eq. 7; Dong et al. 2024 (RLHF Workflow), arXiv 2405.07863, §3",
        *("group_std", {"loss.objective": "dapo"}, PAIRS, ONE_UPDATE),
    ),
    "on_policy_distillation": (
        "Agarwal et al. 2023 (GKD), arXiv 2306.13649, eq. 1, §3",
        *("group_std", {"loss.objective": "dapo", "distillation.beta": 1.0}, ONE_UPDATE),
    ),
    "spo_chain": ("Guo et al. 2025, arXiv 2505.23564, §4, App. H", "group_std", SPO, CHAIN),
    "spo_tree": ("Guo et al. 2025, arXiv 2505.23564, §5, App. D, H", "group_std", SPO, TREE),
}


def _make(name: str, paper: str, advantage: str, *sections: Mapping[str, Any]) -> Algorithm:
    settings = lay_settings({}, {"loss.objective": name, "advantage.kind": advantage, "sampler.filter_groups": None})
    settings["reward"] = {"overlong": {"soft_punishment": False, "filter": False}}
    for section in sections:
        settings = lay_settings(settings, section)
    return Algorithm(paper, settings)


ALGORITHMS: Mapping[str, Algorithm] = {name: _make(name, *row) for name, row in _ROWS.items()}


# The settings of `numerics: matched`. float16 rounds 8 times finer than bfloat16 (Qi et al. 2025, arXiv 2510.26788);
# IcePop (arXiv 2510.18855) masks the tokens whose log-probs still differ strongly.
MATCHED = {
    "model.dtype": "float16",
    "model.float32_logits": True,
    "rollout.vllm.batch_invariant": True,
    "rollout.max_mismatch_kl": 0.015,
    "rollout.correction": {"weights": "token", "cap": 5.0, "mask": "token", "bound": 5.0, "lower_bound": 0.5},
}


def with_numerics(raw: Any) -> Any:
    """Apply the settings of `numerics: matched` below those of a recipe that asks for it, except those that have no
    effect in it. If the recipe sets a correction, it replaces IcePop's completely.
    """
    if not isinstance(raw, Mapping) or raw.get("numerics") != "matched":
        return raw
    settings, given = dict(MATCHED), flatten(raw)
    if given.get("rollout.engine", "hf") == "hf" or not is_cuda(str(given.get("run.device", "auto"))):
        del settings["rollout.vllm.batch_invariant"]
    has_correction = any(key.startswith("rollout.correction.") for key in given)
    has_no_use = any(raw.get(section) is not None for section in ("preference", "distillation"))
    if has_correction or has_no_use or given.get("loss.old_logprobs") == "engine":
        del settings["rollout.correction"]
    return lay_over(lay_settings({}, settings), raw)


def with_algorithm(raw: Any) -> Any:
    """Apply the settings of the algorithm below those of a recipe. An unknown name is left for validation to reject."""
    row = ALGORITHMS.get(str(raw.get("algorithm"))) if isinstance(raw, Mapping) else None
    return lay_over(row.settings, raw) if row else raw
