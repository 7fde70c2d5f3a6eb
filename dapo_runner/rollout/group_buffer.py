"""Dynamic sampling (DAPO, Section 3.2, Eq. 11): collect accepted groups until a step is full.

A group is accepted if it has correct and incorrect samples, or with `sampler.filter_groups: reward` if its rewards
without the length penalty vary. Groups are accepted in the order of their prompts, whatever order they were finished
in: taking the quick ones first would favour short responses. Groups that are left over start the next step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_runner.config import Config
from dapo_runner.errors import RunError
from dapo_runner.types import Group, Prompt

PRIOR_GROUPS = 4  # the weight of `initial_acceptance`, in groups
MEMORY = 0.7  # weight of earlier rounds, per round: the acceptance rate changes as the policy learns
# Standard deviations by which the expected number of accepted groups exceeds the missing groups: 2.3 % of the rounds
# are too small. Without a margin a step takes 1.8 rounds, and each waits for its longest response.
MARGIN = 2.0
# No round is larger than a whole step needs at this share of `initial_acceptance`, even if acceptance is lower.
LEAST_SHARE = 0.5


class SamplingExhaustedError(RunError):
    """A step was not full after its last round, and `sampler.on_exhausted` is `error`."""


SamplingStats = Counter[str]
"""Counts of all that one step generated, accepted or not; 0 for a name that is not there.

rounds: of prompts. carried_in, carried_out: groups left over from earlier steps, and for later ones. too_old: groups
dropped because they exceed `max_age`. The rest are sums of ``counts_of`` over groups.
"""


def counts_of(group: Group) -> dict[str, Any]:
    """Return the counts of one group, and from ``samples`` on of its samples."""
    return {
        "groups": 1,
        "all_correct": int(group.n_correct == len(group.samples)),
        "all_incorrect": int(group.n_correct == 0),
        "mixed": int(group.has_mixed_correctness),
        "varying_reward": int(group.has_varying_reward),
        "varying_reward_only": int(group.has_varying_reward and not group.has_mixed_correctness),
        "samples": len(group.samples),
        "correct": group.n_correct,
        "truncated": group.n_truncated,
        "tokens": sum(sample.completion.n_sampled for sample in group.samples),
        "generated": group.n_generated,  # tokens; shared prefixes of a tree count once
        "reward": sum(sample.reward for sample in group.samples),
    }


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The groups of a step on rank 0, empty on other ranks.

    ``shortfall`` says why there are too few, with `on_exhausted: train_partial`. ``segments``: metrics of segment
    advantages. ``continued``: number of tokens generated to estimate values.
    """

    groups: list[Group] = field(default_factory=list)
    stats: SamplingStats = field(default_factory=SamplingStats)
    shortfall: str = ""
    segments: Mapping[str, float] = field(default_factory=dict)
    continued: int = 0

    @property
    def generated(self) -> int:
        """Number of tokens of this step's rollouts, including dropped groups but not those without a reward."""
        return self.stats["generated"] + self.continued


class GroupBuffer:
    """Accepted groups, in the order of their prompts.

    For each step call ``begin_step``, then ``add`` until ``is_done``, then ``take_step``.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.max_age = config.sampler, config.max_age
        self.groups: list[Group] = []
        self.waiting: list[Group] = []  # remaining samples of groups, for later steps
        self.step = 0  # the step that is being filled, or was taken last
        self.stats = SamplingStats()
        self._accepted = self._tried = 0.0  # numbers of groups, weighted by age

    @property
    def acceptance(self) -> float:
        """The expected share of accepted groups, in (0, 1]."""
        return (self._accepted + self.config.initial_acceptance * PRIOR_GROUPS) / (self._tried + PRIOR_GROUPS)

    @property
    def missing(self) -> int:
        return max(0, self.config.prompts_per_step - len(self.groups))

    @property
    def is_done(self) -> bool:
        """Whether the step is full, or has used all its rounds."""
        return not self.missing or self.stats["rounds"] >= self.config.max_rounds

    def begin_step(self) -> None:
        self.step += 1
        self.groups = self._recent(self.groups)
        self.stats["carried_in"] = len(self.groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Count a round and add its groups that are accepted."""
        self.stats["rounds"] += 1
        for group in groups:
            self.stats.update(counts_of(group))
        by = self.config.filter_groups
        accepted = [group for group in groups if not by or group.varies_in(by)]
        self.groups += self._recent([replace(group, step=group.step or self.step) for group in accepted])
        self._accepted = MEMORY * self._accepted + len(accepted)
        self._tried = MEMORY * self._tried + len(groups)

    def take_step(self) -> SampledStep:
        """Return the finished step. Raises SamplingExhaustedError if it is short and `on_exhausted` is `error`."""
        shortfall = self._describe_shortfall() if self.missing else ""
        if shortfall and self.config.on_exhausted == "error":
            raise SamplingExhaustedError(f"{shortfall} Or set sampler.on_exhausted.")
        n_groups, stats = self.config.prompts_per_step, self.stats
        groups, self.groups, self.stats = self.groups[:n_groups], self.groups[n_groups:], SamplingStats()
        stats["carried_out"] = len(self.groups)
        return SampledStep(groups, stats, shortfall)

    def spread(self, groups: Sequence[Group], n: int) -> tuple[list[Group], dict[str, float]]:
        """Return at most ``n`` samples of each of the step's ``groups`` and of each group in ``waiting``, and metrics.

        Samples without a training segment are left out. The samples of a group are taken at equal distances, because
        neighbours in a tree are most similar. The metrics are the number of samples that wait now, and of those dropped
        because they exceed `max_age`.
        """
        recent = [group for group in self.waiting if self._is_recent(group)]
        too_old = _n_samples(self.waiting) - _n_samples(recent)
        now, self.waiting = [], []
        for group in [*groups, *recent]:
            samples = [sample for sample in group.samples if any(segment.trains for segment in sample.segments)]
            distance = math.ceil(len(samples) / n)
            if samples:
                now.append(replace(group, samples=tuple(samples[::distance])))
            if rest := [sample for index, sample in enumerate(samples) if index % distance]:
                self.waiting.append(replace(group, samples=tuple(rest)))
        return now, {"waiting": _n_samples(self.waiting), "too_old": too_old}

    def expected(self, n_prompts: int) -> int:
        """Return the expected number of accepted groups among ``n_prompts``, at the current acceptance."""
        return int(n_prompts * self.acceptance) if self.config.filter_groups else n_prompts

    def round_size(self, missing: int) -> int:
        """Return the number of prompts to submit for the missing groups, at the current acceptance."""
        if not self.config.filter_groups:
            return missing
        ceiling = prompts_for(self.config.prompts_per_step, LEAST_SHARE * self.config.initial_acceptance)
        return min(prompts_for(missing, self.acceptance), ceiling)

    def _describe_shortfall(self) -> str:
        n = self.stats
        return (
            f"sampler.max_rounds: expected {self.config.prompts_per_step} groups in {n['rounds']} rounds, got fewer. "
            f"Of {n['groups']} groups {n['all_correct']} are all correct, {n['all_incorrect']} all incorrect, "
            f"{n['varying_reward_only']} of these have varying rewards; "
            f"{n['truncated']} of {n['samples']} samples are truncated (rollout.max_response_tokens, "
            "env.max_turn_tokens)."
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.step,
            "accepted": self._accepted,
            "tried": self._tried,
            "generated": self.stats["generated"],
            "buffer": without_rows(self.groups),
            "waiting": without_rows(self.waiting),
        }

    def load_state_dict(self, state: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> None:
        """Load a state. ``prompts`` by id provide the messages and rows, which are not saved."""

        def with_row(group: Group) -> Group:
            known = prompts.get(group.prompt.id, group.prompt)
            return replace(group, prompt=replace(group.prompt, messages=known.messages, row=known.row))

        self.step, self._accepted, self._tried = state["steps"], state["accepted"], state["tried"]
        self.stats = SamplingStats(generated=state["generated"])
        self.groups, self.waiting = (list(map(with_row, state[name])) for name in ("buffer", "waiting"))

    def _recent(self, groups: Sequence[Group]) -> list[Group]:
        recent = [group for group in groups if self._is_recent(group)]
        self.stats["too_old"] += len(groups) - len(recent)
        return recent

    def _is_recent(self, group: Group) -> bool:
        return self.step - group.step <= self.max_age


def prompts_for(groups: int, acceptance: float) -> int:
    """Return the smallest number of prompts n from which ``groups`` are accepted with MARGIN standard deviations:
    n·p − MARGIN·√(n·p·(1 − p)) ≥ groups at acceptance p.
    """
    spread = MARGIN**2 * (1 - acceptance) / 4
    accepted = groups + 2 * spread + 2 * math.sqrt(spread * (spread + groups))  # n·p
    return math.ceil(accepted / acceptance)


def without_rows(groups: Sequence[Group]) -> list[Group]:
    """Return groups without messages and rows: a row of the data set may contain objects that cannot be saved."""
    return [replace(group, prompt=replace(group.prompt, messages=(), row={})) for group in groups]


def _n_samples(groups: Sequence[Group]) -> int:
    return sum(len(group.samples) for group in groups)
