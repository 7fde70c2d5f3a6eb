"""How the prompts of a run are answered: by the engines of all ranks, which also score what they answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dapo_runner.algorithms.segments import segment_metrics, tree_segments
from dapo_runner.config import Config
from dapo_runner.interrupt import StepGivenUpError, StopRequest
from dapo_runner.parallel.rollouts import answer
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.rewards.scoring import ScoreGroups, Scorer
from dapo_runner.rollout.asynchronous import AheadSampler
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.group_buffer import DynamicSampler, SampledStep
from dapo_runner.rollout.segments import grow_trees, joined, value_chains
from dapo_runner.timing import OTHER, StepClock
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Group, Prompt, SamplingParams


@dataclass
class Rollouts:
    """Turns prompts into scored groups. What it does in the loop's thread is timed, and given up where it is late."""

    world: World
    config: Config
    engine: RolloutEngine
    score: Scorer
    tokenizer: Any
    clock: StepClock
    stop: StopRequest
    first_step: int  # the run's: the last one behind it
    waiting: World  # the same ranks, who wait for what rank 0 samples ahead

    def generate_groups(self, prompts: list[Prompt], round_number: int) -> list[Group]:
        """In the order of the prompts, less those that a reward failed on and was allowed to."""
        with self.clock.phase(OTHER if self.world.is_single_process else "wait"):
            self.give_up_if_late()
            sampling = rollout_sampling(self.config, round_number)
            options = self.call_options()
            return self.answer(prompts, sampling, self.score, self.rollout_phase, self.respond, options=options)

    def next_ahead(self, sampler: AheadSampler) -> SampledStep:
        """The next step, which rank 0 alone has its ``sampler`` sample, for all."""
        self.give_up_if_late()
        taken: list[SampledStep] = []

        def take() -> SampledStep:
            with self.stop.giving_up():
                taken.append(sampler.next(self.generate_ahead))
            return taken[0]

        try:
            return self.waiting.broadcast_from_rank0(take)
        except BaseException:  # another rank is lost
            if taken:
                sampler.put_back(taken[0])
            raise

    def generate_ahead(self, prompts: list[Prompt], round_number: int) -> list[Group]:
        """Groups beside the training, in threads of an ``AheadSampler``: clock and signals are the loop's, and no other
        rank takes part. Of the rounds under way the earlier goes before.
        """
        sampling, options = rollout_sampling(self.config, round_number), self.call_options(round_number)
        groups = self.answer(prompts, sampling, self.score, world=SINGLE_PROCESS, options=options)
        return [replace(group, step=self.first_step + group.oldest_version) for group in groups]

    def call_options(self, priority: int | None = None) -> CallOptions:
        return CallOptions(priority, 1 / self.config.sampler.oversample)

    def give_up_if_late(self) -> None:
        """Before an engine is asked. Raises StepGivenUpError."""
        if self.world.any(self.stop.late):
            raise StepGivenUpError("this step would not end before the process is killed")

    def respond(
        self, prompts: SequenceOf[Prompt], each: SequenceOf[SamplingParams], options: CallOptions
    ) -> list[list[Completion]]:
        """Responses to this rank's share of the prompts of a step."""
        tree = self.config.tree
        if tree is None:
            return self.engine.generate(prompts, each, options)
        return grow_trees(self.engine.generate, self.tokenizer, prompts, each, tree)

    def value_segments(self, sampled: SampledStep, step: int, sampler: DynamicSampler) -> SampledStep:
        """The groups of a step with the segments of their responses: `advantage.segments`."""
        advantage, groups, continued = self.config.advantage, sampled.groups, 0
        assert advantage.segments is not None
        if advantage.segments.kind == "tree":
            groups = [tree_segments(group) for group in groups]
            counts = {"tokens": sampled.stats.generated, **segment_metrics(groups)}
            if advantage.segments.per_step is not None:
                groups, of_waiting = sampler.spread(groups, advantage.segments.per_step)
                counts |= of_waiting
        else:
            with self.clock.phase("segments" if self.world.is_single_process else "wait"):
                self.give_up_if_late()
                sampling = rollout_sampling(self.config, f"segments:{step}")
                groups, counts = value_chains(groups, advantage.segments, sampling, self.answer_continued)
            continued = int(counts["tokens"])
            counts |= segment_metrics(groups)
        return replace(sampled, groups=groups, segments=counts, continued=continued)

    def answer_continued(self, prefixes: SequenceOf[Prompt], each: list[SamplingParams]) -> list[Group]:
        """Scored groups of whole responses that begin with the prefixes."""

        def score(share: SequenceOf[Prompt], continuations: SequenceOf[SequenceOf[Completion]]) -> list[Group]:
            pairs = zip(share, continuations, strict=True)
            return self.score(share, [[joined(prefix, end, self.tokenizer) for end in ends] for prefix, ends in pairs])

        return self.answer(prefixes, each, score, lambda _: self.rollout_phase("segments"))

    @contextmanager
    def rollout_phase(self, name: str) -> Iterator[None]:
        """Given up in its midst only by an engine of one rank: in a larger one the others would wait for it."""
        alone = self.world.layout.rollout_tensor == 1
        with self.clock.phase(name), self.stop.giving_up() if alone else nullcontext():
            yield

    def answer(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | list[SamplingParams],
        score: ScoreGroups,
        timed: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        respond: Any = None,
        world: World | None = None,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> list[Group]:
        """A scored group for each prompt that was answered; the engines of the ranks, of ``world`` by default this
        one's, share them, and of the ranks of an engine one scores. ``respond`` is by default the engine's
        ``generate``.
        """

        def work(share: list[Prompt], each: list[SamplingParams]) -> list[Group]:
            with timed("rollout"):
                completions = (respond or self.engine.generate)(share, each, options)
            if not self.world.is_engine_leader:
                return []
            answered = [(prompt, found) for prompt, found in zip(share, completions, strict=True) if found]
            with timed("score"):
                return score([prompt for prompt, _ in answered], [found for _, found in answered])

        return answer(world or self.world, prompts, sampling, work)


def rollout_sampling(config: Config, round_name: int | str) -> SamplingParams:
    """The sampling of one generation round, with a seed of its own."""
    rollout = config.rollout
    return rollout.params(
        n=rollout.group_size,
        stop=tuple(rollout.stop),
        max_tokens=rollout.max_response_tokens,
        seed=random.Random(f"{config.run.seed}:{round_name}").getrandbits(31),
        sampling_mask=rollout.sampling_mask,
    )
