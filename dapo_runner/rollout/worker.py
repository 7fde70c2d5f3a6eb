"""The single path from prompts to scored groups, for training, evaluation, segments and asynchronous rollouts.

With several ranks, rank 0 decides what to sample and gets the groups. The other ranks follow: each engine completes
and scores its share of the requests and sends the groups to rank 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from dapo_runner.algorithms.packing import spread
from dapo_runner.config import Config, TreeShape
from dapo_runner.engines.engine import Groups, RolloutEngine
from dapo_runner.interrupt import StepAbandonedError, StopRequest
from dapo_runner.parallel.world import SINGLE_PROCESS, Outcome, World
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.rollout.segments import grow_trees, join_continuation
from dapo_runner.timing import StepClock
from dapo_runner.types import Group, RolloutRequest, SamplingParams

T = TypeVar("T")


class _Share(NamedTuple):
    """A message of rank 0 to another rank: requests, or the end of ``run_on_rank0``."""

    requests: list[RolloutRequest]
    priority: int | None = None
    is_end: bool = False


@dataclass(frozen=True)
class RolloutWorker:
    """Sample completions and score them.

    ``tree``: the shape of the trees of responses, if any. ``episodes`` runs episodes of several turns in place of
    single responses. ``clock`` measures the ``phases`` of sampling and of scoring. ``stop`` may abandon a step that
    would not end before the process is killed.
    """

    engine: RolloutEngine
    score: Scorer
    tokenizer: Any
    tree: TreeShape | None = None
    episodes: EpisodeRunner | None = None
    world: World = SINGLE_PROCESS
    clock: StepClock = field(default_factory=StepClock)
    stop: StopRequest = field(default_factory=StopRequest)
    phases: tuple[str, str] = ("rollout", "score")

    def run_on_rank0(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0, where it may call ``generate``. The other ranks follow and return None.

        Raises the error of ``work`` on every rank. Collective.
        """
        if not self.world.is_main:  # an error here ends the rank, which the others notice wherever they wait
            with self.clock.phase("wait"):
                while not (share := self._scatter([])).is_end:
                    self._answer(share)
        return self.world.run_on_rank0(lambda: self._lead(work))

    def _lead(self, work: Callable[[], T]) -> T:
        outcome = Outcome.of(work)
        self._scatter([_Share([], is_end=True)] * self._n_engines)
        return cast(T, outcome.value())

    def generate(self, requests: Sequence[RolloutRequest], priority: int | None = None) -> list[Group]:
        """Return scored groups in the order of the requests.

        Requests whose reward or episodes failed within the allowed failures have no group. With several ranks only rank
        0 calls this, inside ``run_on_rank0``.
        """
        with self.clock.phase("wait") if self.world.size > 1 else nullcontext():
            costs = [float(len(request.prompt.token_ids) + request.sampling.max_tokens) for request in requests]
            parts = spread(costs, self._n_engines)
            return self._answer(self._scatter([_Share([requests[i] for i in part], priority) for part in parts]))

    @property
    def _n_engines(self) -> int:
        return self.world.size // self.world.layout.rollout_tensor

    def _scatter(self, shares: list[_Share]) -> _Share:
        return self.world.scatter_from_rank0(shares, self.world.layout.rollout_tensor)

    def _answer(self, share: _Share) -> list[Group]:
        """Complete this rank's share. Rank 0 returns the groups of all ranks. Collective."""
        is_late = self.world.any(self.stop.is_late)
        found = self.world.run_and_gather_on_rank0(lambda: self._answer_share(share, is_late))
        groups = {index: group for part in found for index, group in part.items()}
        return [groups[index] for index in sorted(groups)]

    def _answer_share(self, share: _Share, is_late: bool) -> dict[int, Group]:
        if is_late:
            raise StepAbandonedError
        sampling, scoring = self.phases
        with self._timed(sampling):
            completions = self._sample(share)
        if not self.world.is_engine_leader:
            return {}
        completed = [(one, found) for one, found in zip(share.requests, completions, strict=True) if found]
        with self._timed(scoring):
            groups = self.score([one.prompt for one, _ in completed], [found for _, found in completed])
        scored = zip(completed, groups, strict=True)
        return {request.index: group for (request, _), group in scored if group is not None}

    def _sample(self, share: _Share) -> Groups:
        if self.tree is not None:
            return grow_trees(self.engine.generate, self.tokenizer, share.requests, self.tree)
        if self.episodes is not None:
            return self.episodes(self.engine, share.requests, share.priority)
        prompts = [request.prompt for request in share.requests]
        completions = self.engine.generate(share.requests, share.priority)
        return [
            [join_continuation(prompt, end, self.tokenizer) for end in found] if prompt.n_response_tokens else found
            for prompt, found in zip(prompts, completions, strict=True)
        ]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Measure a phase. Only an engine of one rank may abandon it: in a larger one the other ranks would wait."""
        may_abandon = self.world.layout.rollout_tensor == 1
        with self.clock.phase(phase), self.stop.abandoning() if may_abandon else nullcontext():
            yield


def rollout_sampling(config: Config, round_name: int | str) -> SamplingParams:
    """Return the sampling of one round of training prompts. Each round has its own seed."""
    rollout = config.rollout
    return rollout.params(
        n=rollout.group_size,
        stop=tuple(rollout.stop),
        max_tokens=rollout.max_response_tokens,
        seed=random.Random(f"{config.run.seed}:{round_name}").getrandbits(31),
        sampling_mask=rollout.sampling_mask,
    )
