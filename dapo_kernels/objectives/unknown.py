"""Errors for an unknown objective or keyword. They suggest our name for one that TRL, verl or transformers uses."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# Our keywords, and their names in TRL, verl, transformers and other trainers.
ELSEWHERE = {
    "target_ids": ("labels",),
    "mask": ("response_mask", "completion_mask", "loss_mask", "action_mask", "attention_mask", "ignore_index"),
    "old_logprobs": ("old_log_prob", "old_log_probs", "old_logps", "old_per_token_logps"),
    "ref_logprobs": ("ref_log_prob", "ref_log_probs", "ref_logps", "ref_per_token_logps"),
    "importance_weights": ("rollout_is_weights", "tis_weights", "vllm_is_ratio", "importance_sampling_ratio"),
    "denominator": ("num_tokens", "batch_num_tokens", "num_items_in_batch"),
    "softcap": ("logit_softcap", "logit_softcapping", "final_logit_softcapping"),
    "objective": ("loss_type", "loss_mode"),
    "aggregate": ("loss_agg_mode", "reduction"),
    "length_norm": ("loss_scale_factor", "max_completion_length"),
    "ratio": ("importance_sampling_level",),
    "clip_low and clip_high": ("epsilon", "clip_ratio", "cliprange", "clip_range", "clip_eps", "eps_clip"),
    "clip_low": ("epsilon_low", "clip_ratio_low", "cliprange_low", "clip_eps_low", "eps_clip_low"),
    "clip_high": ("epsilon_high", "clip_ratio_high", "cliprange_high", "clip_eps_high", "eps_clip_high"),
    "dual_clip": ("clip_ratio_c", "eps_clip_c", "delta"),
    "sapo_tau": ("tau_pos", "tau_neg", "sapo_temperature_pos", "sapo_temperature_neg"),
    "kl_coef": ("beta", "kl_beta", "kl_coeff", "kl_loss_coef"),
    "kl_estimator": ("kl_loss_type",),
    "kl_through_ratio": ("use_bias_correction_kl",),
    "entropy_coef": ("entropy_coeff",),
    "top_entropy": ("top_entropy_quantile",),
}
# bnpo (TRL), gpg and vanilla (verl) are the same losses, each with its own default clip bounds. The last two have other
# names here.
_OBJECTIVES_ELSEWHERE = {
    "bnpo": "'ppo'",
    "gpg": "'reinforce'",
    "vanilla": "'ppo' with dual_clip=3.0",
    "dpo": "the function preference_loss",
    "dppo": "'dppo_tv' or 'dppo_kl'",
}
# What differs beside the name.
_DIFFERENCES = {
    "attention_mask": "True where a token trains, not the prompt",
    "ignore_index": "mask=target_ids != ignore_index",
    "delta": "the same from 1 + clip_high on",
    "epsilon_high": "with 'cispo', TRL's minus 1",
}


def unknown_objective(caller: str, name: str, known: Collection[str]) -> ValueError:
    """Return the error for an objective that is not among ``known``."""
    spelled = name.lower().replace("-", "_")
    # With one letter changed a short name is often another algorithm: 'orpo' is no 'grpo'.
    close = difflib.get_close_matches(spelled, known, n=1, cutoff=0.78)
    near = _OBJECTIVES_ELSEWHERE.get(spelled) or (repr(close[0]) if close else None)
    hint = f" (did you mean {near}?)" if near else ""
    return ValueError(f"{caller}: unknown objective {name!r}{hint}; known: {', '.join(known)}")


def unknown_keyword(caller: str, name: str, known: Collection[str]) -> TypeError:
    """Return the error for a keyword that is not among ``known``. It suggests none that the function lacks."""
    ours = [key.split(" and ") for key, names in ELSEWHERE.items() if name in names]
    near = ours[0] if ours else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    but = f"; {_DIFFERENCES[name]}" if name in _DIFFERENCES else ""
    hint = f" (did you mean {' and '.join(map(repr, near))}?{but})" if near and {*known}.issuperset(near) else ""
    return TypeError(f"{caller}: unknown argument {name!r}{hint}; known: {', '.join(known)}")
