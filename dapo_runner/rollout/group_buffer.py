"""Dynamic sampling (DAPO, Section 3.2, Eq. 11): ask until the batch is full of groups that teach something.

A group is kept when some but not all of its samples are right, judged on correctness and never on the shaped
reward; with `filter_on: reward`, when the rewards of its samples vary before the length term is added. Groups are
accepted in the order of their prompts, whatever order they were finished in: taking the quick ones first would favour
short responses. What is left over opens the next step, unless it has grown too old.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dapo_runner.config import SamplerConfig
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.errors import RunError
from dapo_runner.types import Branch, Completion, Group, Prompt, Sample, Segment, TruncatedSupport, Verdict, VersionSpan

GenerateGroups = Callable[[list[Prompt], int], list[Group]]
"""Scored groups for prompts, in their order, of this step where they name none. The second argument counts the rounds
of the whole run: a seed made from it differs from round to round and is the same again after a resume."""

# The weight of `initial_acceptance`, in groups: steadies the first rounds, soon outweighed by what is seen.
PRIOR_GROUPS = 4
# What earlier rounds saw counts less with each round: a policy that learns changes its acceptance rate.
MEMORY = 0.7
# Standard deviations by which a round is to exceed what is missing: 2.3 % of the rounds do not. Asking for the bare
# expectation takes 1.8 rounds a step, each with a tail as long as its longest response.
MARGIN = 2.0
# No round asks for more than a whole step takes at this share of `initial_acceptance`: a policy that has come to fail
# (or to solve) everything must not ask for ever more.
LEAST_SHARE = 0.5


class SamplingExhaustedError(RunError):
    """The rounds of a step ran out before its batch was full, and the configuration calls that an error."""


@dataclass(slots=True)
class SamplingStats:
    """What one step generated, kept or not; all of it counts of groups, but for the last six, of samples."""

    rounds: int = 0
    asked: int = 0  # prompts
    groups: int = 0
    all_correct: int = 0
    all_incorrect: int = 0
    mixed: int = 0
    graded: int = 0  # all right or all wrong, and yet their rewards vary
    varying: int = 0  # their rewards vary
    carried_in: int = 0  # groups left over from earlier steps
    carried_out: int = 0
    too_old: int = 0  # groups left over, or asked long before, that are past `max_age`, and gone
    samples: int = 0
    correct: int = 0
    truncated: int = 0
    tokens: int = 0
    generated: int = 0  # tokens, less those that samples of a tree share
    reward: float = 0.0  # sum over samples

    def count(self, groups: list[Group]) -> None:
        for group in groups:
            self.groups += 1
            self.all_correct += group.all_correct
            self.all_incorrect += group.all_incorrect
            self.mixed += group.has_mixed_correctness
            self.varying += group.has_varying_reward
            self.graded += group.has_varying_reward and not group.has_mixed_correctness
            self.samples += len(group.samples)
            self.correct += group.n_correct
            self.truncated += group.n_truncated
            self.tokens += sum(sample.completion.length for sample in group.samples)
            self.generated += group.n_generated
            self.reward += sum(sample.reward for sample in group.samples)


@dataclass(frozen=True, slots=True)
class SampledStep:
    """With `on_exhausted: train_partial`, ``groups`` may be short; ``shortfall`` then says why. ``caution`` tells,
    once, of groups that another filter would have kept. ``segments`` are figures of segment advantages, where they are
    taken.
    """

    groups: list[Group]
    stats: SamplingStats
    shortfall: str | None = None
    caution: str | None = None
    segments: Mapping[str, float] = field(default_factory=dict)
    continued: int = 0  # tokens generated to value segments with

    @property
    def generated(self) -> int:
        """Tokens that the engine generated for this step, those of dropped groups included."""
        return self.stats.generated + self.continued


class DynamicSampler:
    """Turns a prompt cursor and a generator into full batches of groups."""

    def __init__(
        self,
        cursor: PromptCursor,
        config: SamplerConfig,
        on_round: Callable[[int, SamplingStats], None] | None = None,
        complete: Callable[[list[Group]], list[Group]] = list,
        *,
        filter_on: str = "correctness",
        max_age: int = 1,
    ) -> None:
        """``on_round(groups at hand, stats)`` is called after every round: progress while a step fills. ``complete``
        fetches what the groups that are kept lack: the tokens that other ranks hold.
        """
        self.cursor = cursor
        self.config = config
        self.filter_on = filter_on
        self.max_age = max_age
        self.on_round = on_round
        self.complete = complete
        self.rounds_so_far = self.steps = 0
        self.buffer: list[Group] = []
        self.waiting: list[Group] = []  # parts of groups that later steps train on
        self.in_flight = 0  # prompts that were being answered as what it was loaded from was saved: asked again
        self.generated = 0  # tokens of what it was loaded with, which no step has told of
        self._accepted = self._tried = 0.0  # groups, with fading memory
        self._cautioned = False

    @property
    def acceptance(self) -> float:
        """The share of groups that is expected to be kept; in (0, 1]."""
        prior = self.config.initial_acceptance * PRIOR_GROUPS
        return (self._accepted + prior) / (self._tried + PRIOR_GROUPS)

    def next(self, generate_groups: GenerateGroups) -> SampledStep:
        """The groups of one step.

        Raises SamplingExhaustedError when `max_rounds` rounds do not fill it and `on_exhausted` is `error`.
        With `train_partial` the step may be short, or even empty when no group at all was mixed.
        """

        def answered(missing: int) -> tuple[int, list[Group]]:
            prompts = self.cursor.take(self.round_size(missing), self.steps)
            return len(prompts), generate_groups(prompts, self.rounds_so_far)

        return self.fill(answered)

    def fill(self, answered: Callable[[int], tuple[int, list[Group]]]) -> SampledStep:
        """``next`` where ``answered`` is told how many groups are missing, and gives the size of a round of prompts and
        its groups.
        """
        self.steps += 1
        stats, self.generated = SamplingStats(generated=self.generated), 0
        wanted, self.buffer = self.config.prompts_per_step, self._young(self.buffer, stats)
        stats.carried_in = len(self.buffer)
        while len(self.buffer) < wanted and stats.rounds < self.config.max_rounds:
            n_asked, groups = answered(wanted - len(self.buffer))
            self.rounds_so_far += 1
            stats.rounds += 1
            stats.asked += n_asked
            stats.count(groups)
            self.cursor.observe(groups)
            kept = self.complete([group for group in groups if self._keeps(group)])
            self.buffer += self._young([replace(group, step=group.step or self.steps) for group in kept], stats)
            self._accepted = MEMORY * self._accepted + len(kept)
            self._tried = MEMORY * self._tried + len(groups)
            if self.on_round is not None:
                self.on_round(len(self.buffer), stats)
        shortfall = self._explain(stats) if len(self.buffer) < wanted else None
        if shortfall is not None and self.config.on_exhausted == "error":
            raise SamplingExhaustedError(
                f"{shortfall} (sampler.on_exhausted: train_partial goes on with what there is)"
            )
        step, self.buffer = self.buffer[:wanted], self.buffer[wanted:]
        stats.carried_out = len(self.buffer)
        return SampledStep(step, stats, shortfall, self._caution(stats))

    def spread(self, groups: list[Group], n: int) -> tuple[list[Group], dict[str, float]]:
        """At most ``n`` samples of each of the step's ``groups``, after as many of those that earlier steps left
        waiting; samples without a segment that trains are left out. Of a group they are taken at equal distances:
        neighbours in a tree have most in common. With it counts of samples: those that wait now, and those that
        waited for longer than `max_age` and are gone.
        """
        young = [group for group in self.waiting if self.steps - group.step <= self.max_age]
        too_old = _n_samples(self.waiting) - _n_samples(young)
        now, self.waiting = [], []
        for group in young + groups:
            samples = [sample for sample in group.samples if any(segment.trains for segment in sample.segments)]
            distance = math.ceil(len(samples) / n)
            if samples:
                now.append(replace(group, samples=tuple(samples[::distance])))
            if rest := [sample for place, sample in enumerate(samples) if place % distance]:
                self.waiting.append(replace(group, samples=tuple(rest)))
        return now, {"waiting": _n_samples(self.waiting), "too_old": too_old}

    def _young(self, groups: list[Group], stats: SamplingStats) -> list[Group]:
        young = [group for group in groups if self.steps - group.step <= self.max_age]
        stats.too_old += len(groups) - len(young)
        return young

    def _keeps(self, group: Group) -> bool:
        if not self.config.filter_groups:
            return True
        return group.has_varying_reward if self.filter_on == "reward" else group.has_mixed_correctness

    def _loses_graded(self, stats: SamplingStats) -> bool:
        return bool(stats.graded) and self.config.filter_groups and self.filter_on == "correctness"

    def _caution(self, stats: SamplingStats) -> str | None:
        if self._cautioned or not self._loses_graded(stats):
            return None
        self._cautioned = True
        return (
            f"dynamic sampling turned away {stats.graded} of {stats.groups} groups whose rewards vary, because all of "
            "their samples are right, or all wrong: sampler.filter_on=reward keeps them"
        )

    def expected(self, n_prompts: int) -> int:
        """How many groups of so many prompts will be kept, at the acceptance so far."""
        answered = round(n_prompts / self.config.oversample)
        return int(answered * self.acceptance) if self.config.filter_groups else answered

    def round_size(self, missing: int) -> int:
        """As many prompts as will give the missing groups at the acceptance so far, times `oversample`."""
        needed = missing
        if self.config.filter_groups:
            ceiling = prompts_for(self.config.prompts_per_step, LEAST_SHARE * self.config.initial_acceptance)
            needed = min(prompts_for(missing, self.acceptance), ceiling)
        return round(self.config.oversample * needed)

    def _explain(self, stats: SamplingStats) -> str:
        by_reward = self.config.filter_groups and self.filter_on == "reward"
        graded = f" ({stats.graded} of these with rewards that vary)" if by_reward else ""
        return (
            f"dynamic sampling: {len(self.buffer)} of {self.config.prompts_per_step} groups after "
            f"{stats.rounds} rounds of at most {self.config.max_rounds}: of {stats.groups} groups generated, "
            f"{stats.all_correct} were all right, {stats.all_incorrect} all wrong{graded}, {stats.mixed} mixed; "
            f"{stats.truncated} of {stats.samples} samples were truncated. {self._advice(stats)}"
        )

    def _advice(self, stats: SamplingStats) -> str:
        if self._loses_graded(stats):
            return f"In {stats.graded} that are not mixed the rewards vary: sampler.filter_on=reward keeps them."
        return _advice(stats, len(self.cursor.prompts))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: the cursor, the acceptance rate and the groups carried over."""
        return {
            "cursor": self.cursor.state_dict(),
            "rounds_so_far": self.rounds_so_far,
            "steps": self.steps,
            "accepted": self._accepted,
            "tried": self._tried,
            "generated": self.generated,
            "buffer": [group_state(group) for group in self.buffer],
            "waiting": [group_state(group) for group in self.waiting],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor.load_state_dict(state["cursor"])
        self.rounds_so_far, self.steps = state["rounds_so_far"], state["steps"]
        self._accepted, self._tried = state["accepted"], state["tried"]
        self.in_flight, self.generated = state.get("in_flight", 0), state.get("generated", 0)
        # Groups of older versions do not say when they were sampled: not after the last step.
        waiting = state.get("waiting", [])
        prompts = {prompt.id: prompt for prompt in self.cursor.prompts} if state["buffer"] or waiting else {}
        self.buffer = [_group_from_state({"step": self.steps, **group}, prompts) for group in state["buffer"]]
        self.waiting = [_group_from_state(group, prompts) for group in waiting]


def prompts_for(groups: int, acceptance: float) -> int:
    """The smallest n of which ``groups`` are kept with a margin, the binomial's mean less MARGIN standard deviations:
    n·p − MARGIN·√(n·p·(1 − p)) ≥ groups at an acceptance of p.
    """
    spread = MARGIN**2 * (1 - acceptance) / 4
    kept = groups + 2 * spread + 2 * math.sqrt(spread * (spread + groups))  # n·p
    return math.ceil(kept / acceptance)


def _advice(stats: SamplingStats, n_prompts: int) -> str:
    solved = "The problems are mostly solved: harder data, or the end of this run."
    if 4 * stats.all_correct >= 3 * stats.groups:  # cut or not
        return solved
    if stats.mixed and stats.groups > n_prompts:
        return f"The {n_prompts} prompts were gone through {stats.groups / n_prompts:.1f} times: more data."
    if 2 * stats.truncated >= stats.samples:
        return "Most samples were cut: raise rollout.max_response_tokens."
    if stats.all_correct >= stats.all_incorrect:
        return solved
    return "The problems are mostly out of reach: easier data, larger groups, or check the answer format."


def _n_samples(groups: list[Group]) -> int:
    return sum(len(group.samples) for group in groups)


def group_state(group: Group) -> dict[str, Any]:
    """Plain values and tensors."""
    return {
        "step": group.step,
        "prompt": {name: getattr(group.prompt, name) for name in ("id", "token_ids", "text", "answer", "source")},
        "samples": [
            {
                "token_ids": sample.completion.token_ids,
                "logprobs": sample.completion.logprobs,
                "finish_reason": sample.completion.finish_reason,
                "text": sample.completion.text,
                "path": [tuple(branch) for branch in sample.completion.path],
                "support": None if sample.completion.support is None else tuple(sample.completion.support),
                "loss_mask": sample.completion.loss_mask,
                "versions": [tuple(stretch) for stretch in sample.completion.versions],
                "verdict": asdict(sample.verdict),
                "base_reward": sample.base_reward,
                "length_penalty": sample.length_penalty,
                "trains": sample.trains,
                "parts": dict(sample.parts),
                "segments": [asdict(segment) for segment in sample.segments],
            }
            for sample in group.samples
        ],
    }


def _group_from_state(state: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> Group:
    """``prompts`` by their ids: the data set's rows are not in the state."""
    samples = tuple(
        Sample(
            completion=Completion(
                item["token_ids"],
                item["logprobs"],
                item["finish_reason"],
                item["text"],
                tuple(Branch(*branch) for branch in item.get("path", ())),  # older ones knew no trees
                TruncatedSupport(*item["support"]) if item.get("support") else None,
                tuple(VersionSpan(*stretch) for stretch in item.get("versions", ())),
                item.get("loss_mask"),
            ),
            verdict=Verdict(**item["verdict"]),
            base_reward=item["base_reward"],
            length_penalty=item["length_penalty"],
            trains=item["trains"],
            parts=item.get("parts", {}),  # older ones had none
            segments=tuple(Segment(**segment) for segment in item.get("segments", ())),
        )
        for item in state["samples"]
    )
    prompt = state["prompt"]
    read = Prompt(**{**prompt, "token_ids": tuple(prompt["token_ids"])})
    known = prompts.get(read.id, read)
    return Group(replace(read, messages=known.messages, row=known.row), samples, state["step"])
