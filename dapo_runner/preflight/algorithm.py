"""Every part of the algorithm that a configuration describes: a plan and a run's first lines say them one by one.

`loss.objective` chooses a loss and nothing else, while the name it goes by is also that of a paper with an advantage, a
filter and a length term of its own; `algorithm` sets them all, and what a recipe says otherwise is a departure from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_kernels import OBJECTIVES, Objective
from dapo_runner.algorithms.advantage import ADVANTAGES
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.config import AdvantageConfig, Config, CorrectionConfig, PreferenceConfig, SegmentsConfig, TreeShape
from dapo_runner.config.algorithms import ALGORITHMS, lay_over
from dapo_runner.early_stop import early_stop_metric

SELECTIONS = ("top_entropy", "clip_cov", "kl_cov", "max_old_prob", "off_policy_mask")


def algorithm(config: Config) -> dict[str, str]:
    """Labels and what stands for them. Raises ConfigError where the objective cannot be trained."""
    return {
        **_name(config),
        "optimizer": _optimizer(config),
        **(_of_tokens(config) if config.preference is None else _of_pairs(config, config.preference)),
        "curriculum": _curriculum(config),
        **({"stop strings": ", ".join(map(repr, config.rollout.stop))} if config.rollout.stop else {}),
        "filter": _filter(config),
        "length shaping": _length_shaping(config),
        **({} if config.run.early_stop is None else {"early stop": _early_stop(config)}),
        **({} if config.run.max_tokens is None else {"budget": f"{config.run.max_tokens:,} generated tokens"}),
    }


def _of_tokens(config: Config) -> dict[str, str]:
    objective = resolve_objective(config)
    selected = {name: getattr(objective, name) for name in SELECTIONS}
    selection = ", ".join(f"{name}={_figures(value)}" for name, value in selected.items() if value is not None)
    return {
        "objective": _objective(config, objective),
        "ratio and clip": _ratio(objective),
        **({"experts": "in an update those that the old log-probs came from"} if config.loss.routing_replay else {}),
        **({"selection": selection} if selection else {}),
        **({} if objective.vespo is None else {"sequence weight": f"vespo={_figures(objective.vespo)}"}),
        "KL": _kl(config, objective),
        **({} if config.reward.kl is None else {"KL in the reward": _reward_kl(config)}),
        **({"entropy bonus": f"{objective.entropy_coef:g}"} if objective.entropy_coef else {}),
        "aggregation": f"{objective.aggregate} over a mini-batch"
        + (f", divided by {objective.length_norm:g}" if objective.length_norm is not None else ""),
        "advantage": _advantage(config),
        **({} if config.critic is None else {"critic": _critic(config)}),
    }


def _of_pairs(config: Config, preference: PreferenceConfig) -> dict[str, str]:
    smoothed = f", label smoothing {preference.label_smoothing:g}" if preference.label_smoothing else ""
    start_of_step = "the policy as it was when the step began"
    return {
        "objective": f"preference loss {preference.loss_type} (docs/objectives.md), β {preference.beta:g}{smoothed}, "
        "mean over the pairs of a mini-batch",
        "pairs": f"up to {preference.pairs_per_group} of a group, best against worst by reward; ties are dropped",
        "reference": _reference(config) if preference.reference == "start" else start_of_step,
    }


def _name(config: Config) -> dict[str, str]:
    name, objective = config.algorithm, config.loss.objective
    if name is not None:
        return {
            "algorithm": f"{name} ({ALGORITHMS[name].paper})",
            "departures": ", ".join(departures(config)) or "none",
        }
    if objective == "dapo" or objective not in ALGORITHMS:
        return {}
    return {"algorithm": f"none named; algorithm={objective} sets advantage, filter and length shaping as its paper"}


def departures(config: Config) -> list[str]:
    """Settings that are not those of the algorithm that is named, each as `key=value (NAME: its value)`."""
    name = config.algorithm
    if name is None:
        return []
    row = ALGORITHMS[name].settings
    objective = OBJECTIVES[row["loss"]["objective"]]
    overrides = {field: getattr(objective, field) for field in config.loss.overrides}
    # Where a row says nothing of these, it means what they are by default.
    whole = {
        "loss": {"overrides": overrides},
        "advantage": AdvantageConfig.model_validate(row["advantage"]).model_dump(),
        "rollout": {"correction": CorrectionConfig().model_dump()},
        "preference": None,
    }
    return [
        f"{key} ({name}: null)" if isinstance(own, Mapping) else f"{key}={_figures(own)} ({name}: {_figures(value)})"
        for key, own, value in _differences(config.model_dump(), lay_over(whole, row))
    ]


def _differences(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """By dotted keys, of settings by section: each that is not as wanted, and what was. A section that one side alone
    has is a single one.
    """
    for key, value in wanted.items():
        found = own.get(key)
        if isinstance(found, Mapping) and isinstance(value, Mapping):
            yield from ((f"{key}.{below}", *values) for below, *values in _differences(found, value))
        elif found != value:
            yield key, found, value


def _optimizer(config: Config) -> str:
    settings = config.optimizer
    clip = "no gradient clipping" if settings.grad_clip is None else f"gradient clipped at norm {settings.grad_clip:g}"
    return (
        f"AdamW, lr {settings.lr:g} {_schedule(config)}; betas {settings.betas[0]:g} and {settings.betas[1]:g}, "
        f"weight decay {settings.weight_decay:g}, {clip}"
    )


def _schedule(config: Config) -> str:
    settings = config.optimizer
    then: str = settings.schedule
    if then != "constant":
        then += f" to {settings.lr * settings.min_lr_ratio:g} after step {config.run.steps}"
    return (
        f"warmed up linearly over {settings.warmup_steps} rollout steps, then {then}"
        if settings.warmup_steps > 1
        else then
    )


def _curriculum(config: Config) -> str:
    chosen = config.sampler.curriculum
    if chosen is None:
        return "none, all prompts in a new order every epoch"
    if chosen.by == "column":
        return (
            f"the easiest {chosen.start:.0%} of the prompts by {chosen.column} (larger is {chosen.larger_is}), all of "
            f"them from step {chosen.steps + 1} on"
        )
    return (
        f"prompts of which {chosen.low:.0%} of the samples or fewer were right, or {chosen.high:.0%} or more, rest for "
        f"{chosen.rest} epochs"
    )


def _filter(config: Config) -> str:
    if not config.sampler.filter_groups:
        return "none, every group is trained on"
    by_reward = config.filter_on == "reward"
    return "keeps groups " + ("whose rewards vary" if by_reward else "neither all right nor all wrong")


def _objective(config: Config, objective: Objective) -> str:
    name, overrides = config.loss.objective, config.loss.overrides
    changes = ", ".join(f"{key}={_figures(value)}" for key, value in overrides.items())
    alone = "; this chooses the loss alone: advantage, filter and length shaping are settings of their own"
    return f"{name} ({objective.paper})" + (f" with {changes}" if changes else "") + ("" if name == "dapo" else alone)


def _ratio(objective: Objective) -> str:
    if objective.surrogate == "reinforce":
        return "reinforce: no ratio, no clip"
    of = {
        "token": "a token",
        "sequence": "a sequence",
        "sequence_token": "a sequence, with the gradient of each token",
        "sequence_clipped": "a sequence, each token's clipped before the mean",
    }
    ratio = f"{objective.surrogate}, the ratio of {of[objective.ratio]}"
    if objective.surrogate == "sapo":
        positive, negative = objective.sapo_tau
        return f"{ratio} softly gated, τ {positive:g} / {negative:g}"
    if objective.surrogate in ("dppo_tv", "dppo_kl"):
        measure = "total variation" if objective.surrogate == "dppo_tv" else "KL divergence"
        bounds = f"{objective.clip_low:g} downwards and {objective.clip_high:g} upwards"
        return f"{objective.surrogate}, a token's probability within {bounds}, as {measure}"
    high = "no bound above" if math.isinf(objective.clip_high) else f"1 + {objective.clip_high:g}"
    dual = "" if objective.dual_clip is None else f", dual clip {objective.dual_clip:g}"
    return f"{ratio} within 1 − {objective.clip_low:g} and {high}{dual}"


def _kl(config: Config, objective: Objective) -> str:
    if not objective.kl_coef:
        return "none"
    estimate = f"{objective.kl_coef:g} × {objective.kl_estimator}" + (" × ratio" if objective.kl_through_ratio else "")
    if objective.kl_to == "old":
        return f"{estimate} to the policy that sampled"
    return f"{estimate} to {_reference(config)}"


def _reward_kl(config: Config) -> str:
    kl = config.reward.kl
    assert kl is not None
    return f"{kl.coef:g} × {kl.estimator} off the reward of every token, to {_reference(config)}"


def _reference(config: Config) -> str:
    start, alpha = config.loss.reference or "the model that training starts from", config.loss.reference_ema
    if alpha is None:
        return start
    return f"{start}, which follows the policy: after each step {alpha:g} of itself and {1 - alpha:g} of the policy"


def _advantage(config: Config) -> str:
    if config.advantage.segments is not None:
        return _segments(config, config.advantage.segments)
    settings, advantage = config.advantage, ADVANTAGES[config.advantage.kind]
    formula = advantage.formula()
    if settings.by_token:
        of = (
            f"GAE with γ {settings.gamma:g}, λ {settings.lam:g}"
            if settings.kind == "gae"
            else f"returns with γ {settings.gamma:g}"
        )
        whitened = ", whitened over the tokens of the step" if settings.whiten else ""
        formula = f"{of} of {formula} on the last token{whitened}"
    return f"{settings.kind}: {formula} ({advantage.paper})"


def _critic(config: Config) -> str:
    critic = config.critic
    assert critic is not None
    clip = "its values not clipped" if critic.clip is None else f"its values clipped at ±{critic.clip:g}"
    if critic.share_trunk:
        return f"a value head on the policy, its loss × {critic.coef:g}, {clip}"
    of = critic.path or "the model that training starts from"
    warmup = f", alone for the first {critic.warmup_steps} steps" if critic.warmup_steps else ""
    return f"a value head on {of}, lr {critic.lr:g}{warmup}, {clip}"


def _segments(config: Config, segments: SegmentsConfig) -> str:
    limit = config.rollout.max_response_tokens
    trains = f"; only tokens less likely than {segments.threshold:g} train" if segments.mask else ""
    if segments.kind == "chain":
        return (
            f"V(end) − V(beginning) of every segment of {segments.interval} tokens less likely than "
            f"{segments.threshold:g}, V from {segments.samples} continuations of each beginning{trains} (SPO-chain, "
            "arXiv 2505.23564)"
        )
    tree = config.tree
    assert tree is not None
    later = f"; at most {segments.per_step} responses of a tree in a step, the rest later" if segments.per_step else ""
    return (
        f"V(node) − V(parent) of every segment of a tree of {' × '.join(map(str, tree.branching))} children, "
        f"{tree.tokens} tokens each but on the last level{trains}{later}; at most {_tree_tokens(tree, limit):,} tokens "
        f"a tree, {tree.leaves * limit:,} for as many responses alone (SPO-tree, arXiv 2505.23564)"
    )


def _tree_tokens(tree: TreeShape, limit: int) -> int:
    """What an engine generates for a whole tree of responses of ``limit`` tokens."""
    inner = sum(math.prod(tree.branching[:depth]) for depth in range(1, len(tree.branching)))
    return inner * tree.tokens + tree.leaves * (limit - tree.before_last)


def _length_shaping(config: Config) -> str:
    overlong = config.reward.overlong
    soft = f"soft punishment over the last {overlong.cache_length} of {config.overlong_max_length} tokens"
    return (soft if overlong.soft_punishment else "none") + (
        "; truncated samples do not train" if overlong.filter else ""
    )


def _early_stop(config: Config) -> str:
    settings, metric = config.run.early_stop, early_stop_metric(config)
    assert settings is not None
    better = f"without a {'higher' if settings.mode == 'max' else 'lower'} {metric}"
    ends = []
    if settings.patience is not None:
        ends.append(f"after {settings.patience} evaluations {better}")
    if settings.target is not None:
        ends.append(f"once {metric} is {settings.target:g} or {'more' if settings.mode == 'max' else 'less'}")
    return ", or ".join(ends)


def _figures(value: object) -> str:
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, tuple):
        return f"({', '.join(map(_figures, value))})"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
