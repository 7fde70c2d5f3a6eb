"""The steps of a run, as the training loop calls them."""

from __future__ import annotations

import math
from collections import ChainMap
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.losses import pair_metrics, pair_sequences
from dapo_runner.algorithms.segments import segment_metrics, tree_segments
from dapo_runner.checkpoint import keeping_generators, take_snapshot
from dapo_runner.data.dataset import Dataset
from dapo_runner.evaluate import evaluate
from dapo_runner.interrupt import StepAbandonedError, StopRequest
from dapo_runner.logging.metrics import batch_metrics, prefixed, sampling_metrics
from dapo_runner.logging.run_log import RunLog
from dapo_runner.logging.speed import speed_metrics
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.rollout.asynchronous import AsynchronousSampler
from dapo_runner.rollout.group_buffer import SampledStep
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.rollout.segments import value_chains
from dapo_runner.rollout.worker import RolloutWorker, rollout_sampling
from dapo_runner.run.early_stop import EarlyStop
from dapo_runner.run.training import TrainingRun
from dapo_runner.timing import StepClock
from dapo_runner.types import Group, Prompt, TrainingSequence, make_requests


class TrainedStep(NamedTuple):
    """A step whose updates are applied to the weights."""

    step: int
    sampled: SampledStep
    sequences: list[TrainingSequence]  # on rank 0
    figures: dict[str, float]  # metrics of its updates


@dataclass(kw_only=True)
class Run(TrainingRun):
    """A run of `dapo train`. Only rank 0 has the groups."""

    sampler: DynamicSampler | AsynchronousSampler
    dataset: Dataset
    worker: RolloutWorker
    sync_probe: SyncProbe
    early_stop: EarlyStop
    untrained: SampledStep | None = None  # taken from an asynchronous sampler, not trained on yet
    unlogged: TrainedStep | None = None
    in_sync: dict[str, float] = field(default_factory=dict)  # metrics of the probe, of the unlogged step

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine, self.score = self.worker.engine, self.worker.score
        # The ranks wait for asynchronous rollouts in a process group with the timeout of a whole step.
        self.waiting_world = self.world
        if isinstance(self.sampler, AsynchronousSampler) and not self.world.is_single_process:
            self.waiting_world = self.world.new_group(self.sampler.step_timeout)

    def close(self, error: BaseException | None) -> None:
        self.engine.close()
        if isinstance(self.sampler, AsynchronousSampler):
            self.sampler.close()
        for source in (self.score, self.worker.episodes):
            for warning in source.take_warnings() if source else ():  # of a step that did not end, on rank 0
                self.progress.note(warning)
        super().close(error)

    def is_last(self, step: int) -> bool:
        return super().is_last(step) or self.early_stop.reason is not None

    def count_calls(self) -> dict[str, float]:
        sources = {"reward": self.score} | ({"env": self.worker.episodes} if self.worker.episodes else {})
        figures: dict[str, float] = {}
        for area, source in sources.items():
            warnings = dict.fromkeys(source.take_warnings(), "" if self.world.is_main else self.world.name)
            for warning, rank in ChainMap(*self.world.all_gather_object(warnings)).items():  # of the first rank
                self.progress.note(f"{rank}{warning}")
            counts = self.world.all_gather_object(source.take_counts())
            names = dict.fromkeys(name for part in counts for name in part)
            figures |= prefixed(area, {name: sum(part.get(name, 0.0) for part in counts) for name in names})
        return figures

    def prepare_snapshot(self) -> dict[str, Any] | None:
        snapshot = self.snapshot
        if isinstance(self.sampler, AsynchronousSampler):  # its threads have sampled more since the snapshot
            if self.untrained is not None:
                self.sampler.return_step(self.untrained)
            snapshot = take_snapshot(self.sampler)
        if self.unlogged is not None:
            self.log_step(self.in_sync)
        return snapshot

    def sample(self, step: int) -> SampledStep:
        """Return the groups of a step, on rank 0."""
        self.stop.expect_step(self.seconds_of_last_step)
        if isinstance(self.sampler, AsynchronousSampler):
            sampled = self._wait_for_sample(self.sampler)
        else:
            sampler, self.snapshot = self.sampler, take_snapshot(self.sampler)
            sampled = self.worker.run_on_rank0(lambda: self._sample(sampler, step)) or SampledStep()
        if self.config.rollout.engine_spec.is_remote and self.world.any(self.engine.is_unprobed):
            self.probe()  # a server has restarted: check its weights before its responses train
        return sampled

    def _sample(self, sampler: DynamicSampler, step: int) -> SampledStep:
        sampled, advantage = sampler.next(self.generate_round), self.config.advantage
        if advantage.segments is None:
            return sampled
        if advantage.segments.kind == "chain":
            with self.clock.phase("segments"):
                worker = replace(self.worker, phases=("segments", "segments"))
                sampling = rollout_sampling(self.config, f"segments:{step}")
                groups, counts = value_chains(sampled.groups, advantage.segments, sampling, worker.generate)
            counts |= segment_metrics(groups)
            return replace(sampled, groups=groups, segments=counts, continued=int(counts["tokens"]))
        groups = [tree_segments(group, advantage.segments) for group in sampled.groups]
        counts = {"tokens": sampled.stats["generated"], **segment_metrics(groups)}
        if advantage.segments.per_step is not None:
            groups, waiting = sampler.buffer.spread(groups, advantage.segments.per_step)
            counts |= waiting
        return replace(sampled, groups=groups, segments=counts)

    def _wait_for_sample(self, sampler: AsynchronousSampler) -> SampledStep:
        if self.world.any(self.stop.is_late):
            raise StepAbandonedError

        def take() -> None:
            with self.stop.abandoning():
                self.untrained = sampler.next(self.generate_round)

        with self.clock.phase("wait"):
            self.waiting_world.broadcast_from_rank0(take)
        return self.untrained or SampledStep()

    def generate_round(self, prompts: list[Prompt], number: int) -> list[Group]:
        """Return the scored groups of a round of training prompts.

        Asynchronous rollouts call this from threads on rank 0, without the clock, the signals and the other ranks,
        which belong to the main thread. Of the rounds in flight, the earliest has priority.
        """
        requests = make_requests(prompts, rollout_sampling(self.config, number))
        if isinstance(self.sampler, DynamicSampler):
            return self.worker.generate(requests)
        worker = replace(self.worker, world=SINGLE_PROCESS, clock=StepClock(), stop=StopRequest(), tree=None)
        groups = worker.generate(requests, priority=number)
        return [replace(group, step=self.start_step + group.oldest_version) for group in groups]

    def release_engine(self) -> None:
        with self.clock.phase("sync"):
            self.engine.release()
            if isinstance(self.sampler, DynamicSampler):
                self.score.release()

    def training_records(self, groups: list[Group], step: int) -> list[TrainingSequence]:
        """Return the sequences of a step on rank 0, in the order of their groups; an empty list on other ranks."""
        with self.clock.phase("pack"):
            if self.config.preference is not None:
                return self.world.run_on_rank0(lambda: pair_sequences(groups, step)) or []
            return self.world.run_on_rank0(lambda: make_sequences(groups, self.config.advantage, step)) or []

    def end_training(self, trained: TrainedStep) -> None:
        """Complete a step. From here on it can be saved, even if something after it fails."""
        with self.clock.phase("sync"):
            self.learner.move_reference()
        self.unlogged, self.untrained, self.in_sync = trained, None, {}
        self.complete_step(trained.step)

    def sync(self) -> dict[str, float]:
        """Send the policy's weights to the engine and probe whether it has them. Raises OutOfSyncError."""
        with self.clock.phase("sync"):
            self.engine.sync(self.learner.policy)
        return self.probe()

    def probe(self) -> dict[str, float]:
        """Measure the difference between the log-probs of engine and trainer. Raises OutOfSyncError."""
        with self.clock.phase("probe"):
            return self.sync_probe(self.engine, self.learner)

    def check_mismatch(self, trained: TrainedStep) -> None:
        """Warn if the KL between engine and trainer exceeds `rollout.max_mismatch_kl`."""
        limit, kl = self.config.rollout.max_mismatch_kl, trained.figures.get("rollout_k3", 0.0)
        if limit is not None and kl > limit:
            got = f"got {kl:.3g} in step {trained.step}. See docs/mismatch.md."
            self.progress.note(f"rollout.max_mismatch_kl: expected at most {limit:g}, {got}")

    def log_step(self, in_sync: dict[str, float]) -> None:
        """Log the last trained step, with the metrics of the probe. If this fails, a save of the step repeats it."""
        assert self.unlogged is not None
        trained, self.in_sync = self.unlogged, in_sync
        with self.clock.phase("log"):
            self.speed = speed_metrics(self.learner.policy, trained.sequences, self.clock.so_far())
            n_tokens = self.write(lambda log: self._log_step(log, trained))
        self.unlogged = None
        self.early_stop.count(trained.step, n_tokens)

    def _log_step(self, log: RunLog, trained: TrainedStep) -> int:
        """Return the number of tokens that the engine generated."""
        step, sampled = trained.step, trained.sampled
        figures = (
            sampling_metrics(sampled.stats, self.config.sampler.filter_groups)
            | {"sampling/tokens": sampled.generated}
            | batch_metrics(sampled.groups, step)
            | prefixed("segments", sampled.segments)
            | prefixed("train", trained.figures | pair_metrics(sampled.groups, self.config.preference))
            | prefixed("sync", self.in_sync)
        )
        if isinstance(self.sampler, AsynchronousSampler):
            figures |= prefixed("async", self.sampler.metrics(sampled.groups))
        log.step(step, figures, sampled.groups, trained.sequences, self.learner.token_values)
        self.progress.step(step, figures, self.clock.so_far(), self.speed)
        if sampled.shortfall:
            self.progress.note(sampled.shortfall)
        norm = trained.figures.get("grad_norm", trained.figures["updates"])  # 0 also without an update
        if step == self.start_step + 1 and norm == 0 and self.config.distillation is None:  # noted once
            self.progress.note("train/grad_norm is 0. Are the rewards in each group equal? See docs/troubleshooting.md")
        return sampled.generated

    def evaluate(self, step: int) -> None:
        if not self.dataset.heldout:
            return
        with self.clock.phase("evaluate"), keeping_generators():
            score, episodes = self.score.unshaped(), self.worker.episodes and self.worker.episodes.uncounted()
            worker = replace(self.worker, score=score, tree=None, episodes=episodes, clock=StepClock())
            self.stop.expect_step(math.inf)  # a step that is trained is saved before a kill; a resume evaluates it
            found = worker.run_on_rank0(lambda: evaluate(worker.generate, self.dataset.heldout, self.config))
            groups, metrics = found or ([], {})  # on rank 0
            self.write(lambda log: log.evaluation(step, prefixed("eval", metrics), groups))
            figures = self.world.broadcast_from_rank0(lambda: metrics)
        self.early_stop.observe(step, prefixed("eval", figures))
        self.progress.evaluation(step, figures)
