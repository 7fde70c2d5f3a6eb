"""Prompts over the ranks' engines, and what came of them back to all: first who was right and how long, the tokens only
of the groups that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dapo_runner.parallel.balance import spread
from dapo_runner.parallel.world import World
from dapo_runner.types import Group, Prompt, Sample, SamplingParams

AnswerPrompts = Callable[[list[Prompt], list[SamplingParams]], list[Group]]


def answer(
    world: World, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams], work: AnswerPrompts
) -> list[Group]:
    """A group for each prompt, in their order, on every rank. ``work`` is given this rank's share of the prompts and
    how to sample each, which does not depend on how many ranks there are; it may leave a prompt out, and leaves out all
    where this rank does not lead its engine. Of another rank's responses the tokens and texts are absent until
    ``complete``. ``sampling`` is one for all, or one for each prompt.

    Raises on all ranks what ``work`` raises on one.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    tokens = [len(prompt.token_ids) + own.max_tokens for prompt, own in zip(prompts, each, strict=True)]
    costs = {place: float(cost) for place, cost in enumerate(tokens)}
    mine = spread(costs, world.n_engines)[world.engine]
    own: dict[int, Group] = {}

    def found() -> dict[int, Group]:
        left = iter(mine)
        for group in work([prompts[place] for place in mine], [replace(each[place], index=place) for place in mine]):
            own[next(place for place in left if prompts[place] is group.prompt)] = group
        return {place: _without_tokens(group) for place, group in own.items()}

    groups: dict[int, Group] = {}
    for told in world.run_and_gather(found):
        groups |= told
    groups |= own
    return [groups[place] for place in sorted(groups)]


def complete(world: World, groups: Sequence[Group]) -> list[Group]:
    """The same groups with the tokens and texts of all their responses, on every rank."""
    held = {place: group for place, group in enumerate(groups) if _has_tokens(group)} if world.is_engine_leader else {}
    whole: dict[int, Group] = {}
    for part in world.all_gather_object(held):
        whole |= part
    return [whole[place] for place in range(len(groups))]


def _has_tokens(group: Group) -> bool:
    return not any(sample.completion.token_ids.is_meta for sample in group.samples)


def _without_tokens(group: Group) -> Group:
    def bare(sample: Sample) -> Sample:
        completion = sample.completion
        tokens, logprobs = completion.token_ids.to("meta"), completion.logprobs.to("meta")
        return replace(
            sample, completion=replace(completion, token_ids=tokens, logprobs=logprobs, text="", support=None)
        )

    return replace(group, samples=tuple(bare(sample) for sample in group.samples))
