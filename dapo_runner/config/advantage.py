"""The settings of advantages: of responses, of single tokens, of segments."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from dapo_runner.config.section import Int, PositiveInt, Section, Share


class SegmentsConfig(Section):
    """Segment Policy Optimization (arXiv 2505.23564): advantages of the parts of a response. docs/spo.md."""

    requires = {"kind=chain": "interval samples", "kind=tree": "branching tokens per_step"}

    kind: Literal["chain", "tree"]  # chain: values from continuations; tree: from the responses below a node
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.9  # ρ: a token less likely than that is a cut point
    mask: bool = True  # only cut points train
    interval: PositiveInt = 5  # chain: cut points in a segment
    samples: PositiveInt = 9  # chain: continuations that the value of a segment's beginning is the mean of
    # tree: children of a node, by level; null: rollout.group_size in three factors that differ least, or in two.
    branching: Annotated[list[Annotated[Int, Field(ge=2)]], Field(min_length=2)] | None = None
    # tree: of a segment, but on the last level, where it ends the response; null: as many as every level can have.
    tokens: PositiveInt | None = None
    per_step: PositiveInt | None = None  # tree: its responses that a step trains on, the rest later; null: all at once


class TreeShape(NamedTuple):
    """Children of a node by level, from the root down, and tokens of a segment but on the last level."""

    branching: tuple[int, ...]
    tokens: int

    @property
    def leaves(self) -> int:
        """Responses of a whole tree."""
        return math.prod(self.branching)

    @property
    def before_last(self) -> int:
        """Tokens of a response in front of the last level."""
        return self.tokens * (len(self.branching) - 1)


def steps_of_tree(leaves: int, per_step: int) -> int:
    """Over how many steps a tree with so much to train on is trained, as `DynamicSampler.spread` takes it apart."""
    steps = 0
    while leaves:
        leaves -= math.ceil(leaves / math.ceil(leaves / per_step))
        steps += 1
    return steps


def factors(number: int) -> tuple[int, ...]:
    """Three factors that differ least, or where there are none two, the largest first; empty of a prime."""
    divisors = [divisor for divisor in range(number - 1, 1, -1) if number % divisor == 0]
    for n in (3, 2):
        found = [chosen for chosen in combinations_with_replacement(divisors, n) if math.prod(chosen) == number]
        if found:
            return min(found, key=lambda factors: factors[0] - factors[-1])
    return ()


BY_RESPONSE = ("group_std", "group_mean", "batch_std", "batch_mean", "batch_whitened", "leave_one_out")
BY_TOKEN = ("gae", "returns", "group_returns")  # advantages of single tokens, made once a step is sampled

COMPARING = ("group_std", "group_mean", "batch_std", "leave_one_out", "group_returns")  # samples of one prompt


def _check_kind(value: str) -> str:
    if value not in BY_RESPONSE + BY_TOKEN and ":" not in value:
        raise ValueError(f"expected one of {', '.join(BY_RESPONSE + BY_TOKEN)}, or module:function, got {value!r}")
    return value


class AdvantageConfig(Section):
    requires = {
        "kind=gae|returns|group_returns": "gamma",
        "kind=gae": "lam",
        "kind=group_std !rollout.stop !rollout.max_staleness !reward.calls.max_failed": "segments",
    }

    # group_std, group_mean, batch_std, batch_mean, batch_whitened, leave_one_out; per token gae, returns,
    # group_returns; or module:function. Formulas and papers: dapo_runner.algorithms.advantage.
    kind: Annotated[str, AfterValidator(_check_kind)] = "group_std"
    gamma: Share = 1.0  # Formulas: dapo_runner.algorithms.returns
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95  # gae
    segments: SegmentsConfig | None = None  # in the place of kind

    @property
    def by_token(self) -> bool:
        return self.kind in BY_TOKEN
