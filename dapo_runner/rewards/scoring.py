"""Rewards: rules and functions judge completions; scoring adds them and the length term up and decides what trains.

A reward judges a batch: prompts, and the completions of each. The rules shipped here (`RULES` of the settings) hold a
response against its prompt's answer; functions of the user's own are named as `module:function` (`plugin.py`). One may
set ``Verdict.value`` to a reward of its own, while dynamic sampling goes by ``Verdict.correct`` alone, unless
`sampler.filter_on` is `reward`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from dapo_runner.config import Config, RewardConfig
from dapo_runner.rewards.calls import BatchCalls
from dapo_runner.rewards.code_rule import code_judge
from dapo_runner.rewards.json_rule import json_judge
from dapo_runner.rewards.judge import judge_of
from dapo_runner.rewards.match import FuzzyRule, choice_rule, exact_rule
from dapo_runner.rewards.math_rule import math_judge
from dapo_runner.rewards.numbers import gsm8k_rule, integer_rule
from dapo_runner.rewards.overlong import length_penalty
from dapo_runner.rewards.plugin import BatchReward, RewardError, Verdicts, find_function, one_at_a_time, takes_batch
from dapo_runner.rewards.rule import answer_rule
from dapo_runner.types import Completion, Group, Prompt, Sample, Verdict

__all__ = [
    "SameAnswer",
    "ScoreGroups",
    "Scorer",
    "load_reward",
    "load_same_answer",
    "reads_answers",
    "unmatchable_answers",
]

ScoreGroups = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], list[Group]]
"""The scored groups of some prompts, in order, less those that a reward failed on and was allowed to."""
SameAnswer = Callable[[str, Sequence[str]], list[bool | None]]
"""Which of the other responses give the first one's answer; None where that could not be found out."""
Rule = Callable[[str, str], Verdict]
"""Holds a text against an answer."""

# Each with an answer as it wants it written.
_RULES: dict[str, tuple[Rule, str]] = {
    "dapo": (answer_rule, "Answer: {}"),
    "gsm8k": (gsm8k_rule, "#### {}"),
    "integer": (integer_rule, "{}"),
    "choice": (choice_rule, "Answer: {}"),
    "exact": (exact_rule, "Answer: {}"),
}
_WITHOUT_ANSWERS = ("json", "code", "judge")


def load_reward(config: RewardConfig, use: str | None = None, max_failed: float = 0.0) -> BatchReward:
    """The rule or function of that name (None: the first of the configuration). Raises ConfigError when a function
    cannot be found, or something that a rule needs.
    """
    use = use or config.uses[0]
    if use == "math":
        return _by_prompt(math_judge(config.workers, config.deadline))
    if use == "code":
        return _all_at_once(code_judge(config.code))
    if use == "judge":
        judge = judge_of(config)
        return judge.judge_all if judge.endpoint is None else BatchCalls(use, judge.ask, config, max_failed, None)
    if use == "fuzzy":
        return _one_by_one(FuzzyRule(config))
    if use == "json":
        return _by_prompt(json_judge(config.workers, config.deadline, config.json_schema))
    if use == "dapo":
        return _one_by_one(partial(answer_rule, boxed_fallback=config.boxed_fallback))
    if use in _RULES:
        return _one_by_one(_RULES[use][0])
    function = find_function(use)
    if takes_batch(function):
        return BatchCalls(use, function, config, max_failed, config.plugin_deadline)
    return one_at_a_time(use, function, config)


def _by_prompt(judge: Callable[[Sequence[str], str], Sequence[Verdict]]) -> BatchReward:
    def reward(prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        pairs = zip(prompts, completions, strict=True)
        return [list(judge([completion.text for completion in samples], prompt.answer)) for prompt, samples in pairs]

    return reward


def _one_by_one(rule: Rule) -> BatchReward:
    return _by_prompt(lambda texts, answer: [rule(text, answer) for text in texts])


def _all_at_once(judge: Callable[[Sequence[str], Sequence[str]], Sequence[Verdict]]) -> BatchReward:
    def reward(prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        pairs = list(zip(prompts, completions, strict=True))
        answers = [prompt.answer for prompt, samples in pairs for _ in samples]
        verdicts = iter(judge([completion.text for samples in completions for completion in samples], answers))
        return [[next(verdicts) for _ in samples] for _, samples in pairs]

    return reward


def load_same_answer(config: RewardConfig) -> SameAnswer | None:
    """How wrong answers are told apart where the rule compares by calculation. None: by the text it extracted."""
    return math_judge(config.workers, config.deadline).same if config.uses[0] == "math" else None


def reads_answers(config: RewardConfig) -> bool:
    """Whether what says right or wrong is known to read an answer wherever there is one."""
    use = config.uses[0]
    return ":" not in use and use not in _WITHOUT_ANSWERS


def unmatchable_answers(config: RewardConfig, prompts: Sequence[Prompt]) -> str | None:
    """A word on problems whose ground truth a rule by strings does not find right even where it is the answer."""
    use = config.uses[0]
    if use not in _RULES:
        return None
    rule, ideal = _RULES[use]
    lost = [prompt.answer for prompt in prompts if not rule(ideal.format(prompt.answer), prompt.answer).correct]
    if not lost:
        return None
    return (
        f"reward.kind={use}: {len(lost)} of {len(prompts)} training problems can never be right: the rule "
        f"cannot read their ground truth, e.g. {', '.join(map(repr, lost[:3]))}"
    )


@dataclass(frozen=True, slots=True)
class _Part:
    label: str
    weight: float
    judge: BatchReward


class Scorer:
    """Scores the completions of prompts: a ``ScoreGroups``. Raises RewardError.

    ``shaped=False`` leaves the length term and overlong filtering out, for the plain correctness that evaluation
    reports, and lets no prompt be lost to a failure. Calls from several threads are served one after the other, also
    those of scorers that share a ``turn``.
    """

    def __init__(
        self,
        config: Config,
        *,
        shaped: bool = True,
        timed: Callable[[str], AbstractContextManager[None]] | None = None,
        note: Callable[[str], None] | None = None,
        turn: threading.Lock | None = None,
    ) -> None:
        """``timed`` is told which of several rewards is at work, ``note`` which prompts were left out."""
        self.config = config.reward
        self.timed, self.note = timed or (lambda _: nullcontext()), note
        self.max_failed = config.reward.calls.max_failed if shaped else 0.0
        parts = [(part.label, part.weight, part.use) for part in config.reward.parts]
        self.parts = [
            _Part(label, weight, load_reward(config.reward, use, self.max_failed))
            for label, weight, use in parts or [("", 1.0, config.reward.kind)]
        ]
        self.judge = None if config.reward.judge is None else judge_of(config.reward)
        overlong = config.reward.overlong
        self.punish, self.filter_truncated = shaped and overlong.soft_punishment, shaped and overlong.filter
        self.max_length, self.cache_length = config.overlong_max_length, overlong.cache_length
        self.turn = turn or threading.Lock()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Iterable[Completion]]) -> list[Group]:
        answers = [list(samples) for samples in completions]
        with self.turn:
            judged = [self._judge(part, prompts, answers) for part in self.parts]
        groups = []
        for prompt, samples, *verdicts in zip(prompts, answers, *judged, strict=True):
            whole = [own for own in verdicts if own is not None]
            if len(whole) == len(self.parts):
                of_samples = zip(samples, *whole, strict=True)
                groups.append(Group(prompt, tuple(self._sample(prompt, *sample) for sample in of_samples)))
        return groups

    def release(self) -> None:
        """Give up what memory can be given up: the policy is about to train."""
        if self.judge is not None:
            self.judge.model.release()

    def close(self) -> None:
        """At the end of a run: what a judge says from here on is none of its."""
        if self.judge is not None:
            self.judge.close()

    def counts(self) -> dict[str, int]:
        """Since it was last asked: of every function of a batch its calls, and how many were retried and failed."""
        counted = {}
        for part in self.parts:
            if isinstance(part.judge, BatchCalls):
                counts, part.judge.counts = part.judge.counts, Counter()
                for what in ("calls", "retried", "failed"):
                    counted["_".join(filter(None, (part.label, what)))] = counts[what]
        return counted

    def _judge(self, part: _Part, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        with self.timed(f"score_{part.label}") if part.label else nullcontext():
            verdicts = part.judge(prompts, completions)
        lost = part.judge.lost if isinstance(part.judge, BatchCalls) else []
        if lost and self.note is not None:
            self.note(f"{verdicts.count(None)} of {len(prompts)} prompts are left out; the first: {lost[0]}")
        return verdicts

    def _sample(self, prompt: Prompt, completion: Completion, *verdicts: Verdict | None) -> Sample:
        """The verdict is the first one's that applies, the reward the weighted sum of all that do."""
        said = [(part, verdict) for part, verdict in zip(self.parts, verdicts, strict=True) if verdict is not None]
        if not said:
            uses = ", ".join(self.config.uses)
            raise RewardError(f"reward {uses}: none of them applies to prompt {prompt.id}", prompt, completion)
        values = {part.label: self._value(verdict) for part, verdict in said}
        penalty = length_penalty(completion.length, self.max_length, self.cache_length) if self.punish else 0.0
        return Sample(
            completion=completion,
            verdict=said[0][1],
            base_reward=sum(part.weight * values[part.label] for part, _ in said),
            length_penalty=penalty,
            trains=not (self.filter_truncated and completion.truncated),
            parts=values if self.config.parts else {},
        )

    def _value(self, verdict: Verdict) -> float:
        if verdict.value is not None:
            return verdict.value
        return self.config.correct if verdict.correct else self.config.incorrect
