"""A run: what the loop does with it, step by step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.losses import pair_metrics, pair_sequences
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.segments import segment_metrics, tree_segments
from dapo_runner.checkpoint import BackgroundSaves, save_checkpoint, take_snapshot
from dapo_runner.config import Config
from dapo_runner.data.dataset import Dataset
from dapo_runner.early_stop import EarlyStop
from dapo_runner.evaluate import Evaluation, evaluate
from dapo_runner.interrupt import StepGivenUpError, StopRequest
from dapo_runner.logging.metrics import batch_metrics, prefixed, sampling_metrics
from dapo_runner.logging.postmortem import save_batch
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog
from dapo_runner.logging.speed import peak_flops, peak_memory, speed_figures, training_flops
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.rollout.asynchronous import AsynchronousSampler
from dapo_runner.rollout.group_buffer import SampledStep
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.rollout.segments import value_chains
from dapo_runner.rollout.worker import RolloutWorker, make_requests, rollout_sampling
from dapo_runner.run.context import RunContext
from dapo_runner.timing import StepClock
from dapo_runner.types import CallOptions, Group, Prompt, Sequence

NONFINITE = "nonfinite"


@dataclass(frozen=True)
class TrainedStep:
    """A step whose updates are in the weights."""

    step: int
    sampled: SampledStep
    sequences: list[Sequence]
    figures: dict[str, float]  # of its updates


@dataclass
class Run:
    """The components of a run and how far it is. Every rank has one; rank 0 has the groups and writes.

    ``snapshot`` and the weights resume the step after ``last_completed_step``, unless ``is_updating``: the optimizer
    has begun to change the weights.
    """

    context: RunContext
    config: Config
    dataset: Dataset
    learner: Learner
    worker: RolloutWorker
    sampler: DynamicSampler | AsynchronousSampler
    sync_probe: SyncProbe
    log: RunLog | None  # on rank 0
    stop: StopRequest
    early_stop: EarlyStop
    background_saves: BackgroundSaves | None  # with run.async_save
    last_completed_step: int
    owes_evaluation: bool  # of the policy that the run starts with
    stopping: bool = False  # after the step that is running
    is_updating: bool = False
    snapshot: dict[str, Any] | None = None
    untrained: SampledStep | None = None  # that an asynchronous sampler has given
    unlogged: TrainedStep | None = None
    speed: dict[str, float] = field(default_factory=dict)  # of the step that is running, once it has trained
    seconds_of_last_step: float = 0.0

    def __post_init__(self) -> None:
        self.world, self.clock, self.progress = self.context.world, self.context.clock, self.context.progress
        self.engine, self.score, self.folder = self.worker.engine, self.worker.score, self.config.run_dir
        self.start_step = self.saved_step = self.last_completed_step
        # The ranks wait for asynchronous rollouts in a group of their own, whose timeout is that of a step.
        self.waiting_world = self.world
        if isinstance(self.sampler, AsynchronousSampler) and not self.world.is_single_process:
            self.waiting_world = self.world.new_group(self.sampler.step_timeout)

        def set_updating(*_: object) -> None:
            self.is_updating = True

        for part in self.learner.parts():
            if part.optimizer is not None:
                part.optimizer.register_step_pre_hook(set_updating)

    def __enter__(self) -> Run:
        self.stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish_saving()
            else:
                self.save_before_stopping(error)
        finally:
            self.stop.__exit__(kind, error, trace)
            self.close(error)

    def close(self, error: BaseException | None) -> None:
        self.engine.close()
        if isinstance(self.sampler, AsynchronousSampler):
            self.sampler.close()
        self.score.close()
        if self.log is not None:
            self.log.close()
        self.context.close(error)

    def is_last(self, step: int) -> bool:
        return step == self.config.run.steps or self.early_stop.reason is not None

    def asked_to_stop(self) -> bool:
        """Return whether a signal has come, on any rank."""
        self.stopping = self.world.any(self.stop.requested)
        return self.stopping

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return self.clock.phase(phase)

    # Sampling

    def sample(self, step: int) -> SampledStep:
        """Return the groups of a step on rank 0."""
        self.stop.expect_step(self.seconds_of_last_step)
        if isinstance(self.sampler, AsynchronousSampler):
            sampled = self._wait_for_sample(self.sampler)
        else:
            sampler, self.snapshot = self.sampler, take_snapshot(self.sampler)
            sampled = self.worker.lead(lambda: self._sample(sampler, step)) or SampledStep()
        if self.config.rollout.engine_spec.is_remote and self.world.any(self.engine.is_unprobed):
            self.probe()  # a server is back: before its responses train
        return sampled

    def _sample(self, sampler: DynamicSampler, step: int) -> SampledStep:
        sampled, advantage = sampler.next(self.generate_round), self.config.advantage
        if advantage.segments is None:
            return sampled
        if advantage.segments.kind == "chain":
            with self.timed("segments"):
                worker = replace(self.worker, phases=("segments", "segments"))
                sampling = rollout_sampling(self.config, f"segments:{step}")
                groups, counts = value_chains(sampled.groups, advantage.segments, sampling, worker.generate)
            counts |= segment_metrics(groups)
            return replace(sampled, groups=groups, segments=counts, continued=int(counts["tokens"]))
        groups = [tree_segments(group) for group in sampled.groups]
        counts = {"tokens": sampled.stats.generated, **segment_metrics(groups)}
        if advantage.segments.per_step is not None:
            groups, waiting = sampler.buffer.spread(groups, advantage.segments.per_step)
            counts |= waiting
        return replace(sampled, groups=groups, segments=counts)

    def _wait_for_sample(self, sampler: AsynchronousSampler) -> SampledStep:
        if self.world.any(self.stop.is_late):
            raise StepGivenUpError("this step would not end before the process is killed")

        def take() -> None:
            with self.stop.giving_up():
                self.untrained = sampler.next(self.generate_round)

        with self.timed("wait"):
            self.waiting_world.broadcast_from_rank0(take)
        return self.untrained or SampledStep()

    def generate_round(self, prompts: list[Prompt], number: int) -> list[Group]:
        """Return the scored groups of a round of training prompts.

        Asynchronous rollouts call this in threads of their own on rank 0: clock, signals and the other ranks belong to
        the loop, and of the rounds in flight the earlier goes first.
        """
        requests = make_requests(prompts, rollout_sampling(self.config, number))
        options = CallOptions(completion_fraction=1 / self.config.sampler.oversample)
        if isinstance(self.sampler, DynamicSampler):
            return self.worker.generate(requests, options)
        worker = replace(self.worker, world=SINGLE_PROCESS, clock=StepClock(), stop=StopRequest(), tree=None)
        groups = worker.generate(requests, replace(options, priority=number))
        return [replace(group, step=self.start_step + group.oldest_version) for group in groups]

    def release_engine(self) -> None:
        """Give up GPU memory: the policy is about to train."""
        with self.timed("sync"):
            self.engine.release()
            if isinstance(self.sampler, DynamicSampler):
                self.score.release()

    # Training

    def training_records(self, groups: list[Group], step: int) -> list[Sequence]:
        """Return the sequences of a step, group by group in order."""
        with self.timed("pack"):
            return self.world.broadcast_from_rank0(lambda: self._make_sequences(groups, step))

    def _make_sequences(self, groups: list[Group], step: int) -> list[Sequence]:
        if self.config.preference is not None:
            return pair_sequences(groups, self.config.preference, step)
        return make_sequences(groups, self.config.advantage, step)

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """Make one update. Saves its batch where its loss or gradient is not finite."""
        try:
            return self.learner.update(mini, step - 1)
        except NonFiniteUpdateError as error:
            rank = "" if self.world.is_single_process else f"_rank_{self.world.rank}"
            path = self.folder / NONFINITE / f"step_{step:06d}{rank}.safetensors"
            save_batch(path, mini.micro_batches, str(error))
            raise NonFiniteUpdateError(f"{error}. The batch of each rank is in {path.parent}", mini) from error

    def end_training(self, trained: TrainedStep) -> None:
        """Complete a step: a checkpoint may hold it from here on, whatever fails after it."""
        with self.timed("sync"):
            self.learner.move_reference()
        self.last_completed_step, self.unlogged, self.untrained = trained.step, trained, None
        self.snapshot, self.is_updating = take_snapshot(self.sampler), False

    def sync(self) -> dict[str, float]:
        """Send the policy's weights to the engine, and check that it has them. Raises OutOfSyncError."""
        with self.timed("sync"):
            self.engine.update_weights(self.learner.policy.named_weights())
        return self.probe()

    def probe(self) -> dict[str, float]:
        """Measure how far the log-probs of engine and learner differ. Raises OutOfSyncError."""
        with self.timed("probe"):
            return self.sync_probe(self.engine, self.learner)

    # Logging and evaluation

    def log_step(self, in_sync: dict[str, float]) -> None:
        """Log the step that was trained last. ``in_sync``: what the probe measured."""
        assert self.unlogged is not None
        trained, self.unlogged = self.unlogged, None
        with self.timed("log"):
            self.speed = speed_of(self.learner, self.clock, trained.sequences)
            n_tokens = self.world.broadcast_from_rank0(lambda: self._log_step(trained, in_sync))
        self.early_stop.count(trained.step, n_tokens)

    def _log_step(self, trained: TrainedStep, in_sync: dict[str, float]) -> int:
        """Return how many tokens the engine generated."""
        step, sampled = trained.step, trained.sampled
        assert self.log is not None
        figures = (
            sampling_metrics(sampled.stats, self.config.filter_on, self.config.sampler.oversample > 1)
            | {"sampling/tokens": sampled.generated}
            | batch_metrics(sampled.groups, step)
            | prefixed("segments", sampled.segments)
            | prefixed("train", trained.figures | pair_metrics(sampled.groups, self.config.preference))
            | prefixed("sync", in_sync)
        )
        if isinstance(self.sampler, AsynchronousSampler):
            figures |= prefixed("async", self.sampler.metrics(sampled.groups))
        self.log.step(step, figures, sampled.groups, trained.sequences, self.learner.token_values)
        self.progress.step(step, figures, self.clock.so_far(), self.speed)
        for note in self.sampler.buffer.notes(sampled):
            self.progress.note(note)
        return sampled.generated

    def evaluate(self, step: int) -> None:
        if not self.dataset.heldout:
            return
        with self.timed("evaluate"):
            worker = replace(
                self.worker,
                score=self.score.unshaped(),
                tree=None,
                clock=StepClock(),
                stop=StopRequest(),
            )
            result = worker.lead(lambda: evaluate(worker.generate, self.dataset.heldout, self.config))
            metrics = self.world.broadcast_from_rank0(lambda: self._log_evaluation(step, result))
        self.early_stop.observe(step, prefixed("eval", metrics))
        self.progress.evaluation(step, metrics)

    def _log_evaluation(self, step: int, result: Evaluation | None) -> dict[str, float]:
        assert self.log is not None
        assert result is not None  # on rank 0
        self.log.evaluation(step, prefixed("eval", result.metrics), result.groups)
        return result.metrics

    def end_step(self, step: int) -> None:
        """Log where the time of a step went, its evaluation and checkpoint included. A kill before this loses no more
        than that line.
        """
        seconds = self.clock.lap()
        self.seconds_of_last_step = sum(seconds.values())
        counts = self.world.all_gather_object(self.score.take_counts())
        calls = {name: sum(part[name] for part in counts) for name in counts[0]}
        self.world.broadcast_from_rank0(lambda: self._log_seconds(step, seconds, calls))
        for warning in self.score.take_warnings():
            self.progress.note(warning)
        self.speed = {}

    def _log_seconds(self, step: int, seconds: dict[str, float], calls: dict[str, float]) -> None:
        assert self.log is not None
        self.log.seconds(step, seconds, self.speed, calls)

    # Saving

    def save(self, step: int, snapshot: dict[str, Any] | None = None) -> None:
        """With run.async_save the checkpoint is still being written when this returns, unless it is the last."""
        with self.timed("save"):
            folder, keep = self.folder / CHECKPOINTS, self.config.run.keep
            if self.background_saves is None:
                save_checkpoint(folder, step, self.learner, self.sampler, keep, snapshot)
                self.saved_step = step
                return
            self.finish_saving()
            self.background_saves.start(folder, step, self.learner, self.sampler, keep, snapshot)
            if self.stopping or step == self.config.run.steps:
                self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError where it could not be."""
        done = self.background_saves.finish() if self.background_saves is not None else None
        if done is not None:
            self.saved_step = done.step

    def save_before_stopping(self, error: BaseException) -> None:
        """Save the last completed step when ``error`` stops the run. A failure is noted, not raised.

        Several ranks can save only together: where all of them stop with an error at the same time. A save that is in
        progress needs no more than that none was killed.
        """
        step, note = self.last_completed_step, self.progress.note
        if not (self.world.is_single_process or isinstance(error, Exception)):
            return
        if isinstance(error, StepGivenUpError):
            note(f"step {step + 1} is given up: {error}")
        try:
            self.finish_saving()
            if step == self.saved_step:
                return
            if self.is_updating:
                note(f"stopped during an update: the last checkpoint is of step {self.saved_step}")
            elif not self.world.all_stopped(error):
                note(f"step {step} is not saved: not every rank stopped with an error of its own")
            else:
                self._save_last_completed_step()
        except Exception as failure:  # what stopped the run is what is raised
            note(f"step {step} could not be saved: {failure}")

    def _save_last_completed_step(self) -> None:
        snapshot = self.snapshot
        if isinstance(self.sampler, AsynchronousSampler):  # whose threads have gone on sampling
            if self.untrained is not None:
                self.sampler.put_back(self.untrained)
            snapshot = take_snapshot(self.sampler)
        if self.unlogged is not None:
            self.log_step({})
        self.save(self.last_completed_step, snapshot)
        self.finish_saving()
        self.progress.note(f"step {self.last_completed_step} is saved before the run stops")


def speed_of(learner: Learner, clock: StepClock, sequences: list[Sequence]) -> dict[str, float]:
    """Return the speed of the step that has trained on ``sequences``. Collective."""
    policy = learner.policy
    lengths = [sequence.length - 1 for sequence in sequences if sequence.mask[1:].any()]  # the rest is not packed
    flops, peak = training_flops(policy.model, lengths), peak_flops(policy.device)
    memory = max(learner.world.all_gather_object(peak_memory(policy.device)))
    figures = speed_figures(flops, sum(lengths), clock.so_far(), learner.world.size, peak)
    return figures | {"memory_gib": memory}


def is_due(every: int, step: int) -> bool:
    """Return whether something done ``every`` so many steps comes after this one."""
    return every > 0 and step % every == 0
