"""Scoring: adds the rewards of a completion up by weight, adds the length term, and decides what trains.

Dynamic sampling goes by ``Verdict.correct`` unless `sampler.filter_on` is `reward`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dapo_runner.config import Config, ConfigError, RewardConfig
from dapo_runner.rewards import rules
from dapo_runner.rewards.functions import FunctionReward
from dapo_runner.rewards.judge import Judge
from dapo_runner.rewards.reward import Reward, RewardError, TextReward, Verdicts, first_error
from dapo_runner.rewards.workers import open_code, open_rule, require_package
from dapo_runner.types import Completion, Group, Prompt, Sample, Verdict

SameAnswer = Callable[[str, Sequence[str]], list[bool | None]]
"""Returns which of the other responses give the first one's answer; None where that could not be found out."""

# Rules that compare strings, with a response that gives an answer as the rule wants it.
_RULES: dict[str, tuple[Callable[[str, str], Verdict], str]] = {
    "dapo": (rules.answer_rule, "Answer: {}"),
    "gsm8k": (rules.gsm8k_rule, "#### {}"),
    "integer": (rules.integer_rule, "{}"),
    "choice": (rules.choice_rule, "Answer: {}"),
    "exact": (rules.exact_rule, "Answer: {}"),
}


def load_reward(config: RewardConfig, use: str) -> Reward:
    """Return the rule or function of that name. Raises ConfigError where it, or what it needs, cannot be found."""
    if use in _RULES:
        return _compare_by(_RULES[use][0])
    if use == "fuzzy":
        require_package("fuzzy")
        return _compare_by(partial(rules.fuzzy_rule, correct=config.correct, incorrect=config.incorrect))
    if use in ("math", "json"):
        schema = config.json_schema if use == "json" else None
        return TextReward(open_rule(use, config.workers, config.deadline, schema).judge_texts)
    if use == "code":
        return TextReward(open_code(config.workers, config.deadline, config.memory_mb).judge_texts)
    return Judge(config) if use == "judge" else FunctionReward(use, config)


def _compare_by(rule: Callable[[str, str], Verdict]) -> TextReward:
    return TextReward(lambda texts, answers: list(map(rule, texts, answers)))


def load_same_answer(config: RewardConfig) -> SameAnswer | None:
    """Return how answers are compared where the rule calculates. None: by the text that it extracted."""
    return open_rule("math", config.workers, config.deadline).compare if config.uses[0] == "math" else None


def reads_answers(config: RewardConfig) -> bool:
    """Return whether the first reward extracts an answer wherever there is one."""
    return config.uses[0] in (*_RULES, "math", "fuzzy")


def unmatchable_answers(config: RewardConfig, prompts: Sequence[Prompt]) -> str | None:
    """Return a warning where a rule that compares strings rejects the ground truth of a problem as its answer.

    Raises ConfigError where it rejects all of them.
    """
    use = config.uses[0]
    rule, response = _RULES.get(use, (lambda *_: Verdict(True), ""))
    lost = [prompt.answer for prompt in prompts if not rule(response.format(prompt.answer), prompt.answer).correct]
    some = f"{len(lost)} of {len(prompts)} training problems, e.g. {', '.join(map(repr, lost[:3]))}"
    warning = f"reward.kind={use}: the rule cannot match the ground truth of {some}"
    if len(lost) == len(prompts):
        raise ConfigError(f"{warning}. Choose another rule, or set data.columns.")
    return warning if lost else None


class Scorer:
    """Scores the completions of prompts. Raises RewardError.

    ``shaped=False`` leaves the length term and overlong filtering out, for the plain correctness that evaluation
    reports, and lets failed calls cost no prompt. Calls from several threads are served one after the other.
    """

    def __init__(self, config: Config, *, shaped: bool = True) -> None:
        self.config, self.shaped, self.max_length = config.reward, shaped, config.overlong_max_length
        uses = {part.label: part.use for part in self.config.parts} or {"": self.config.kind}
        self.weights = {part.label: part.weight for part in self.config.parts} or {"": 1.0}
        self.rewards = {label: load_reward(self.config, use) for label, use in uses.items()}
        # What follows is shared with the unshaped copies.
        self._seconds = dict.fromkeys(uses, 0.0)  # since the counts were taken
        self._warnings: list[str] = []
        self._lock = threading.Lock()

    def unshaped(self) -> Scorer:
        """Return a scorer of the same rewards with ``shaped=False``."""
        other = copy.copy(self)
        other.shaped = False
        return other

    @property
    def judge(self) -> Judge | None:
        return next((reward for reward in self.rewards.values() if isinstance(reward, Judge)), None)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[Group | None]:
        """Return the group of each prompt, None where a reward failed and was allowed to."""
        with self._lock:
            verdicts = [self._judge(label, prompts, completions) for label in self.rewards]
        return [self._group(*one) for one in zip(prompts, completions, *verdicts, strict=True)]

    def release(self) -> None:
        """Give up GPU memory: the policy is about to train."""
        if self.judge is not None:
            self.judge.release()

    def take_counts(self) -> dict[str, float]:
        """Return, since the last call, what each reward counted and how many seconds each of several took."""
        counts: dict[str, float] = {}
        for label, reward in self.rewards.items():
            found: dict[str, float] = dict(reward.take_counts())
            if label:
                found["seconds"], self._seconds[label] = self._seconds[label], 0.0
            counts |= {f"{label}_{name}".lstrip("_"): value for name, value in found.items()}
        return counts

    def take_warnings(self) -> list[str]:
        """Return which prompts were left out since the last call."""
        warnings = list(self._warnings)
        self._warnings.clear()
        return warnings

    def _judge(self, label: str, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        start = time.perf_counter()
        verdicts = self.rewards[label].judge(prompts, completions)
        self._seconds[label] += time.perf_counter() - start
        failures = [found for found in verdicts if isinstance(found, RewardError)]
        if failures and not self.shaped:
            raise failures[0]
        if failures:
            self._warnings.append(f"{len(failures)} of {len(prompts)} prompts are left out: {failures[0]}")
        return verdicts

    def _group(self, prompt: Prompt, completions: Sequence[Completion], *verdicts: Any) -> Group | None:
        if first_error(verdicts) is not None:
            return None
        return Group(prompt, tuple(self._sample(prompt, *one) for one in zip(completions, *verdicts, strict=True)))

    def _sample(self, prompt: Prompt, completion: Completion, *verdicts: Verdict | None) -> Sample:
        """The verdict is the first that applies, the reward the weighted sum of all that do."""
        found = {label: verdict for label, verdict in zip(self.rewards, verdicts, strict=True) if verdict is not None}
        if not found:
            uses = ", ".join(self.config.uses)
            raise RewardError(f"reward {uses}: none of them applies to prompt {prompt.id}")
        values = {label: self._value(verdict) for label, verdict in found.items()}
        overlong, penalty = self.config.overlong, 0.0
        if self.shaped and overlong.soft_punishment:
            penalty = rules.length_penalty(completion.length, self.max_length, overlong.cache_length)
        return Sample(
            completion=completion,
            verdict=next(iter(found.values())),
            base_reward=sum(self.weights[label] * value for label, value in values.items()),
            length_penalty=penalty,
            trains=not (self.shaped and overlong.filter and completion.truncated),
            parts=values if self.config.parts else {},
        )

    def _value(self, verdict: Verdict) -> float:
        if verdict.value is not None:
            return verdict.value
        return self.config.correct if verdict.correct else self.config.incorrect
