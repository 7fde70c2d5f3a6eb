"""Rewards: a function judges a completion; scoring adds the length term and decides what trains.

A reward function is any `(prompt, completion) -> Verdict`; `math` alone judges all completions of a prompt at once,
side by side. A plug-in is named in the configuration as
`module:function` (`plugin.py`); it may set ``Verdict.value`` to a reward of its own, while dynamic sampling goes by
``Verdict.correct`` alone, unless `sampler.filter_on` is `reward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dapo_runner.config import Config, RewardConfig
from dapo_runner.rewards.math_rule import math_judge
from dapo_runner.rewards.numbers import gsm8k_rule, integer_rule
from dapo_runner.rewards.overlong import length_penalty
from dapo_runner.rewards.plugin import load_plugin
from dapo_runner.rewards.rule import answer_rule
from dapo_runner.types import Completion, Group, Prompt, Sample, Verdict

__all__ = [
    "GroupReward",
    "RewardFunction",
    "SameAnswer",
    "ScoreGroup",
    "load_group_reward",
    "load_reward",
    "load_same_answer",
    "make_scorer",
    "never_right",
]

RewardFunction = Callable[[Prompt, Completion], Verdict]
GroupReward = Callable[[Prompt, Sequence[Completion]], list[Verdict]]
ScoreGroup = Callable[[Prompt, Iterable[Completion]], Group]
SameAnswer = Callable[[str, Sequence[str]], list[bool | None]]
"""Which of the other responses give the first one's answer; None where that could not be found out."""

_RULES: dict[str, Callable[[str, str], Verdict]] = {"dapo": answer_rule, "gsm8k": gsm8k_rule, "integer": integer_rule}
_IDEAL = {"dapo": "Answer: {}", "gsm8k": "#### {}", "integer": "{}"}  # the answer as each rule wants it written


def load_reward(config: RewardConfig) -> RewardFunction:
    """The reward function that the configuration names. Raises ConfigError when a plug-in cannot be found, or a
    package that it needs.
    """
    if config.kind == "math":
        judge = math_judge(config.workers, config.deadline)
        return lambda prompt, completion: judge([completion.text], prompt.answer)[0]
    if config.kind in _RULES:
        rule = _RULES[config.kind]
        if config.kind == "dapo":
            rule = partial(answer_rule, boxed_fallback=config.boxed_fallback)
        return lambda prompt, completion: rule(completion.text, prompt.answer)
    return load_plugin(config)


def load_group_reward(config: RewardConfig) -> GroupReward:
    """The same for all completions of one prompt. Raises ConfigError as ``load_reward`` does."""
    if config.kind == "math":
        judge = math_judge(config.workers, config.deadline)
        return lambda prompt, completions: judge([completion.text for completion in completions], prompt.answer)
    reward = load_reward(config)
    return lambda prompt, completions: [reward(prompt, completion) for completion in completions]


def load_same_answer(config: RewardConfig) -> SameAnswer | None:
    """How wrong answers are told apart where the rule compares by calculation. None: by the text it extracted."""
    return math_judge(config.workers, config.deadline).same if config.kind == "math" else None


def never_right(config: RewardConfig, prompts: Sequence[Prompt]) -> str | None:
    """A word on problems whose ground truth a rule by strings does not find right even where it is the answer."""
    rule = _RULES.get(config.kind)
    if rule is None:
        return None
    ideal = _IDEAL[config.kind]
    lost = [prompt.answer for prompt in prompts if not rule(ideal.format(prompt.answer), prompt.answer).correct]
    if not lost:
        return None
    return (
        f"reward.kind={config.kind}: {len(lost)} of {len(prompts)} training problems can never be right: the rule "
        f"cannot read their ground truth, e.g. {', '.join(map(repr, lost[:3]))}"
    )


def make_scorer(config: Config, *, shaped: bool = True) -> ScoreGroup:
    """A function that scores the completions of one prompt.

    ``shaped=False`` leaves the length term and overlong filtering out: the plain correctness that evaluation
    reports.
    """
    reward = load_group_reward(config.reward)
    overlong = config.reward.overlong
    punish, filter_truncated = shaped and overlong.soft_punishment, shaped and overlong.filter
    max_length, cache_length = config.overlong_max_length, overlong.cache_length

    def make_sample(completion: Completion, verdict: Verdict) -> Sample:
        value = verdict.value
        if value is None:
            value = config.reward.correct if verdict.correct else config.reward.wrong
        return Sample(
            completion=completion,
            verdict=verdict,
            base_reward=value,
            length_penalty=length_penalty(completion.length, max_length, cache_length) if punish else 0.0,
            trains=not (filter_truncated and completion.truncated),
        )

    def score(prompt: Prompt, completions: Iterable[Completion]) -> Group:
        completions = list(completions)
        verdicts = reward(prompt, completions)
        return Group(prompt, tuple(map(make_sample, completions, verdicts)))

    return score
