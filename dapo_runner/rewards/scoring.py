"""Score completions: add up their rewards by weight, add the length penalty, and decide which samples train.

Dynamic sampling uses ``Verdict.correct`` unless `sampler.filter_groups` is `reward`.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from dapo_runner.config import Config, ConfigError, RewardConfig
from dapo_runner.rewards import rules
from dapo_runner.rewards.calls import CallingReward, RewardError, Verdicts, first_error
from dapo_runner.rewards.functions import FunctionReward
from dapo_runner.rewards.judge import Judge
from dapo_runner.rewards.workers import open_code, open_rule, read_tests
from dapo_runner.types import Completion, Group, Prompt, Sample, Verdict


class TextReward(NamedTuple):
    """Judge each response by its text and the ground truth; of a list of one text, by this text."""

    judge_texts: Callable[[Sequence[str], Sequence[str]], list[Verdict]]  # of lists of both
    column: str | None = None  # of the row, in place of the ground truth
    whole: bool = False  # whether it reads what comes before the last </think>

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], *_: object) -> Verdicts:
        texts = [one.text if self.whole else one.text.rpartition("</think>")[2] for many in completions for one in many]
        truths = [rules.forms_of(p.answer)[-1] if self.column is None else p.row[self.column] for p in prompts]
        answers = [truth for truth, samples in zip(truths, completions, strict=True) for _ in samples]
        verdicts = iter(self.judge_texts(texts, answers))
        return [[next(verdicts) for _ in samples] for samples in completions]


Reward = TextReward | FunctionReward | Judge

# Rules that compare strings, with a template of a response in the format of the rule.
_RULES: dict[str, tuple[Callable[[str, str], Verdict], str]] = {
    "dapo": (rules.answer_rule, "Answer: {}"),
    "gsm8k": (rules.gsm8k_rule, "#### {}"),
    "integer": (rules.integer_rule, "{}"),
    "choice": (rules.choice_rule, "Answer: {}"),
    "exact": (rules.exact_rule, "Answer: {}"),
}


def load_reward(config: RewardConfig, use: str, device: str) -> Reward:
    """Return the rule, function or judge ``use``. Raises ConfigError if it, or a package that it needs, is missing."""
    if use in _RULES:
        return TextReward(lambda *pairs: list(map(_RULES[use][0], *pairs)), whole=use == "dapo")  # equal to its script
    if use in ("math", "json"):
        judge = open_rule(use, config.workers, config.rule_timeout).judge_texts
        return TextReward(lambda texts, answers: judge(texts, [*map(rules.as_set, answers)]))  # no schema is a list
    if use == "reasoning_gym":
        rule = open_rule(use, config.workers, config.rule_timeout)
        return TextReward(lambda *pairs: [_scale(verdict, config) for verdict in rule.judge_texts(*pairs)], "task")
    if use == "code":
        return TextReward(open_code(config.workers, config.rule_timeout, config.memory_mb).judge_texts)
    return Judge(config, device) if use == "judge" else FunctionReward(use, config)


def _scale(verdict: Verdict, config: RewardConfig) -> Verdict:
    """Scale the score of a verdict from [0, 1] to [reward.incorrect, reward.correct]."""
    return replace(verdict, value=config.incorrect + (verdict.value or 0.0) * (config.correct - config.incorrect))


def reads_answers(config: RewardConfig) -> bool:
    """Return whether the first reward extracts the answer of every response that has one."""
    return config.uses[0] in (*_RULES, "math", "reasoning_gym")


def unmatchable_answers(config: Config, prompts: Sequence[Prompt], heldout: Sequence[Prompt] = ()) -> str | None:
    """Return a warning if the first rule, or one with a weight, rejects ground truths of training or evaluation sets.

    Raises ConfigError if it rejects all that train, or `code` or `json` one. Environments and distillation need none.
    """
    reward, needs_all = config.reward, config.distillation is None
    checked = [] if config.env else [*prompts, *(prompt for prompt in heldout if prompt.eval_set)]
    needed = [prompt for prompt in checked if prompt.answer or needs_all]
    every = [] if config.env else list(dict.fromkeys(prompt.answer for prompt in (*needed, *heldout)))
    if "json" in reward.uses and every:
        open_rule("json", reward.workers, reward.rule_timeout).judge_texts(["{}"] * len(every), every)
    for answer in every if "code" in reward.uses else ():
        read_tests(answer)
    uses = {f"reward.parts.{n}.use": part.use for n, part in enumerate(reward.parts) if part.weight or n == 0}
    uses, warnings = uses or {"reward.kind": reward.kind}, list[str]()
    forms = {prompt.answer: rules.forms_of(prompt.answer)[-1] for prompt in needed}
    rejected = {(use, answer) for use in uses.values() for answer, form in forms.items() if not _can_match(use, form)}
    for (key, use), name in product(uses.items(), ("", *config.data.eval)):
        answers = [prompt.answer for prompt in needed if prompt.eval_set == name]
        unmatched = [answer for answer in answers if (use, answer) in rejected]
        noun = f"problems of data.eval.{name}" if name else "training problems"
        some = f"{len(unmatched)} of {len(answers)} {noun}, e.g. {', '.join(map(repr, unmatched[:3]))}"
        warning = f"{key}: expected a rule that can match the ground truth, got {use}, which cannot for {some}"
        if len(unmatched) == len(answers) > 0 and not name:
            raise ConfigError(f"{warning}. Choose another rule, or set data.columns.")
        warnings += [f"{warning}. It counts responses to these as incorrect."] if unmatched else []
    return "\n".join(warnings) or None


def _can_match(use: str, answer: str) -> bool:
    rule, response = _RULES.get(use, (lambda *_: Verdict(True), ""))
    encoded = {"dapo": ('{"', '["'), "math": ('{"',)}.get(use, ())  # only a response in JSON would be correct
    return rule(response.format(answer), answer).correct and not answer.startswith(encoded)


class Scorer:
    """Score the completions of prompts. Raises RewardError.

    ``shaped=False`` leaves out the length penalty and overlong filtering, as evaluation requires, and raises every
    failure. Calls from several threads are served one after the other.
    """

    def __init__(self, config: Config, *, shaped: bool = True) -> None:
        self.config, self.shaped = config.reward, shaped
        self.lengths = config.rollout.max_response_tokens, config.cache_length
        uses = {part.label: part.use for part in self.config.parts} or {"": self.config.kind}
        self.weights = {part.label: part.weight for part in self.config.parts} or {"": 1.0}
        self.rewards = {label: load_reward(self.config, use, config.run.device) for label, use in uses.items()}
        # Copies from ``unshaped`` share the following.
        self._seconds = dict.fromkeys(uses, 0.0)  # since the last ``take_counts``
        self._warnings: list[str] = []
        self._lock = threading.Lock()

    def unshaped(self) -> Scorer:
        """Return a scorer with the same rewards and ``shaped=False``."""
        other = copy.copy(self)
        other.shaped = False
        return other

    @property
    def judge(self) -> Judge | None:
        return next((reward for reward in self.rewards.values() if isinstance(reward, Judge)), None)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[Group | None]:
        """Return the group of each prompt, None if its reward failed within the allowed failures. Completions that have
        a reward of their environment are not judged.
        """
        unscored = [[one for one in found if one.environment_reward is None] for found in completions]
        indices = [index for index, found in enumerate(unscored) if found]
        judged = [prompts[index] for index in indices], [unscored[index] for index in indices]
        allowed = math.ceil(self.config.calls.max_failed * len(prompts)) if self.shaped else 0
        with self._lock:
            verdicts = [self._judge(label, *judged, allowed) for label in self.rewards] if indices else []
        by_index = dict(zip(indices, zip(*verdicts, strict=True), strict=True))
        failed = [error for found in by_index.values() if (error := first_error(found)) is not None]
        if len(failed) > allowed:  # of all rewards together
            raise RewardError(f"reward.calls.max_failed={self.config.calls.max_failed:g}: {failed[0]}") from failed[0]
        self._warnings += [f"{len(failed)} of {len(prompts)} prompts are left out: {failed[0]}"] if failed else []
        pairs = enumerate(zip(prompts, completions, strict=True))
        return [self._group(prompt, found, *by_index.get(index, ())) for index, (prompt, found) in pairs]

    def release(self) -> None:
        """Release GPU memory before the policy trains."""
        if self.judge is not None and self.judge.model is not None:
            self.judge.model.release()

    def take_counts(self) -> dict[str, float]:
        """Return the counts of each reward since the last call and, with several rewards, the seconds of each."""
        counts: dict[str, float] = {}
        for label, reward in self.rewards.items():
            found: dict[str, float] = dict(reward.take_counts()) if isinstance(reward, CallingReward) else {}
            if label:
                found["seconds"], self._seconds[label] = self._seconds[label], 0.0
            counts |= {f"{label}_{name}".lstrip("_"): value for name, value in found.items()}
        return counts

    def take_warnings(self) -> list[str]:
        """Return warnings about left-out prompts since the last call."""
        return [self._warnings.pop(0) for _ in range(len(self._warnings))]

    def _judge(self, label: str, *judged: Any) -> Verdicts:
        start = time.perf_counter()
        verdicts = self.rewards[label].judge(*judged)
        self._seconds[label] += time.perf_counter() - start
        return verdicts

    def _group(self, prompt: Prompt, completions: Sequence[Completion], *verdicts: Any) -> Group | None:
        if first_error(verdicts) is not None:
            return None
        judged = zip(*verdicts, strict=True)
        rows = [next(judged) if one.environment_reward is None else () for one in completions]
        return Group(prompt, tuple(self._sample(prompt, *one) for one in zip(completions, rows, strict=True)))

    def _sample(self, prompt: Prompt, completion: Completion, verdicts: Sequence[Verdict | None]) -> Sample:
        """Return a sample. Its verdict is the first that applies, its reward the weighted sum of all that apply."""
        if (reward := completion.environment_reward) is not None:
            return self._shaped(completion, Verdict(round(reward, 9) >= 1, None, "environment", reward), reward, {})
        found = {label: verdict for label, verdict in zip(self.rewards, verdicts, strict=True) if verdict is not None}
        if not found:
            raise RewardError(
                f"reward {', '.join(self.config.uses)}: expected a value for each response, got None for one to prompt "
                f"{prompt.id}. Return a number, or add a function to reward.parts that applies to it."
            )
        plain = {True: self.config.correct, False: self.config.incorrect}
        values = {label: plain[one.correct] if one.value is None else one.value for label, one in found.items()}
        total = sum(self.weights[label] * value for label, value in values.items())
        return self._shaped(completion, next(iter(found.values())), total, values if self.config.parts else {})

    def _shaped(self, completion: Completion, verdict: Verdict, reward: float, parts: Mapping[str, float]) -> Sample:
        overlong, penalty = self.config.overlong, 0.0
        if self.shaped and overlong.soft_punishment:
            penalty = rules.length_penalty(completion.n_sampled, *self.lengths)
        return Sample(
            completion=replace(completion, environment=None, messages=()),
            verdict=verdict,
            base_reward=round(reward, 9),  # sums of equal rewards can differ by rounding
            length_penalty=penalty,
            trains=not (self.shaped and overlong.filter and completion.truncated),
            parts=parts,
        )
