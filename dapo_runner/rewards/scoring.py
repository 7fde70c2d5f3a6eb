"""Scoring: adds the rewards of a completion up by weight, adds the length term, and decides what trains.

Dynamic sampling goes by ``Verdict.correct`` unless `sampler.filter_on` is `reward`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dapo_runner.config import Config, RewardConfig
from dapo_runner.rewards.code_rule import open_code
from dapo_runner.rewards.functions import FunctionReward
from dapo_runner.rewards.judge import Judge
from dapo_runner.rewards.match import FuzzyReward, choice_rule, exact_rule
from dapo_runner.rewards.numbers import gsm8k_rule, integer_rule
from dapo_runner.rewards.overlong import length_penalty
from dapo_runner.rewards.reward import Reward, RewardError, TextReward, Verdicts
from dapo_runner.rewards.rule import answer_rule
from dapo_runner.rewards.worker_rules import open_json, open_math
from dapo_runner.types import Completion, Group, Prompt, Sample, Verdict

ScoreGroups = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], list[Group]]
"""Returns the scored groups of some prompts, in order, without those that failed calls cost."""
SameAnswer = Callable[[str, Sequence[str]], list[bool | None]]
"""Returns which of the other responses give the first one's answer; None where that could not be found out."""

# Rules that compare strings, with a response that gives an answer as the rule wants it.
_RULES: dict[str, tuple[Callable[[str, str], Verdict], str]] = {
    "dapo": (answer_rule, "Answer: {}"),
    "gsm8k": (gsm8k_rule, "#### {}"),
    "integer": (integer_rule, "{}"),
    "choice": (choice_rule, "Answer: {}"),
    "exact": (exact_rule, "Answer: {}"),
}


class StringReward(TextReward):
    """Judges by one of the rules that compare strings."""

    def __init__(self, kind: str) -> None:
        self._rule, _ = _RULES[kind]

    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return list(map(self._rule, texts, answers))


def load_reward(config: RewardConfig, use: str) -> Reward:
    """Return the rule or function of that name. Raises ConfigError where it, or what it needs, cannot be found."""
    if use in _RULES:
        return StringReward(use)
    if use == "fuzzy":
        return FuzzyReward(config.correct, config.incorrect)
    if use == "math":
        return open_math(config.workers, config.deadline)
    if use == "json":
        return open_json(config.workers, config.deadline, config.json_schema)
    if use == "code":
        return open_code(config.workers, config.deadline, config.memory_mb)
    return Judge(config) if use == "judge" else FunctionReward(use, config)


def load_same_answer(config: RewardConfig) -> SameAnswer | None:
    """Return how answers are compared where the rule calculates. None: by the text that it extracted."""
    return open_math(config.workers, config.deadline).compare if config.uses[0] == "math" else None


def reads_answers(config: RewardConfig) -> bool:
    """Return whether the first reward extracts an answer wherever there is one."""
    return config.uses[0] in (*_RULES, "math", "fuzzy")


def unmatchable_answers(config: RewardConfig, prompts: Sequence[Prompt]) -> str | None:
    """Return a warning where a rule that compares strings rejects the ground truth of a problem as its answer."""
    use = config.uses[0]
    if use not in _RULES:
        return None
    rule, response = _RULES[use]
    lost = [prompt.answer for prompt in prompts if not rule(response.format(prompt.answer), prompt.answer).correct]
    if not lost:
        return None
    return (
        f"reward.kind={use}: the rule cannot match the ground truth of {len(lost)} of {len(prompts)} training "
        f"problems, e.g. {', '.join(map(repr, lost[:3]))}"
    )


@dataclass(slots=True)
class _Part:
    label: str
    weight: float
    reward: Reward
    seconds: float = 0.0  # since the counts were taken


@dataclass(slots=True)
class _Shared:
    """What a scorer shares with its unshaped copies."""

    parts: list[_Part]
    lock: threading.Lock = field(default_factory=threading.Lock)
    warnings: list[str] = field(default_factory=list)


class Scorer:
    """Scores the completions of prompts: a ``ScoreGroups``. Raises RewardError.

    ``shaped=False`` leaves the length term and overlong filtering out, for the plain correctness that evaluation
    reports, and lets failed calls cost no prompt. Calls from several threads are served one after the other.
    """

    def __init__(self, config: Config, *, shaped: bool = True) -> None:
        self.config, self.shaped = config.reward, shaped
        self.max_length = config.overlong_max_length
        parts = [(part.label, part.weight, part.use) for part in self.config.parts] or [("", 1.0, self.config.kind)]
        self._shared = _Shared([_Part(label, weight, load_reward(self.config, use)) for label, weight, use in parts])

    def unshaped(self) -> Scorer:
        """Return a scorer of the same rewards with ``shaped=False``."""
        other = copy.copy(self)
        other.shaped = False
        return other

    @property
    def judge(self) -> Judge | None:
        return next((part.reward for part in self._shared.parts if isinstance(part.reward, Judge)), None)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Iterable[Completion]]) -> list[Group]:
        return [group for group in self.score_each(prompts, completions) if group is not None]

    def score_each(self, prompts: Sequence[Prompt], completions: Sequence[Iterable[Completion]]) -> list[Group | None]:
        """Return the group of each prompt, None where a reward failed and was allowed to."""
        samples = [list(of_prompt) for of_prompt in completions]
        with self._shared.lock:
            verdicts = [self._judge(part, prompts, samples) for part in self._shared.parts]
        groups: list[Group | None] = []
        for prompt, of_prompt, *found in zip(prompts, samples, *verdicts, strict=True):
            judged = [own for own in found if not isinstance(own, RewardError)]
            if len(judged) == len(found):
                scored = zip(of_prompt, *judged, strict=True)
                groups.append(Group(prompt, tuple(self._sample(prompt, *sample) for sample in scored)))
            else:
                groups.append(None)
        return groups

    def release(self) -> None:
        """Give up GPU memory: the policy is about to train."""
        if self.judge is not None:
            self.judge.release()

    def close(self) -> None:
        """Stop writing a judge's verdicts into the run's folder."""
        if self.judge is not None:
            self.judge.close()

    def take_counts(self) -> dict[str, float]:
        """Return, since the last call, what each reward counted and how many seconds each of several took."""
        counts: dict[str, float] = {}
        for part in self._shared.parts:
            found: dict[str, float] = dict(part.reward.take_counts())
            if part.label:
                found["seconds"], part.seconds = part.seconds, 0.0
            counts |= {f"{part.label}_{name}".lstrip("_"): value for name, value in found.items()}
        return counts

    def take_warnings(self) -> list[str]:
        """Return which prompts were left out since the last call."""
        warnings, self._shared.warnings = self._shared.warnings, []
        return warnings

    def _judge(self, part: _Part, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        start = time.perf_counter()
        verdicts = part.reward.judge(prompts, completions)
        part.seconds += time.perf_counter() - start
        failures = [found for found in verdicts if isinstance(found, RewardError)]
        if failures and not self.shaped:
            raise failures[0]
        if failures:
            self._shared.warnings.append(f"{len(failures)} of {len(prompts)} prompts are left out: {failures[0]}")
        return verdicts

    def _sample(self, prompt: Prompt, completion: Completion, *verdicts: Verdict | None) -> Sample:
        """The verdict is the first that applies, the reward the weighted sum of all that do."""
        pairs = zip(self._shared.parts, verdicts, strict=True)
        found = [(part, verdict) for part, verdict in pairs if verdict is not None]
        if not found:
            uses = ", ".join(self.config.uses)
            raise RewardError(f"reward {uses}: none of them applies to prompt {prompt.id}", prompt, completion)
        values = {part.label: self._value(verdict) for part, verdict in found}
        overlong, penalty = self.config.overlong, 0.0
        if self.shaped and overlong.soft_punishment:
            penalty = length_penalty(completion.length, self.max_length, overlong.cache_length)
        return Sample(
            completion=completion,
            verdict=found[0][1],
            base_reward=sum(part.weight * values[part.label] for part, _ in found),
            length_penalty=penalty,
            trains=not (self.shaped and overlong.filter and completion.truncated),
            parts=values if self.config.parts else {},
        )

    def _value(self, verdict: Verdict) -> float:
        if verdict.value is not None:
            return verdict.value
        return self.config.correct if verdict.correct else self.config.incorrect
