"""A run under way: what the loop does with it, step by step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.pairs import pair_metrics, pair_sequences
from dapo_runner.checkpoint import BackgroundSaves, save_checkpoint, take_snapshot
from dapo_runner.config import Config
from dapo_runner.data.dataset import Dataset
from dapo_runner.early_stop import EarlyStop
from dapo_runner.evaluate import evaluate
from dapo_runner.folder import FolderLock
from dapo_runner.interrupt import StepGivenUpError, StopRequest
from dapo_runner.logging.metrics import batch_metrics, prefixed, sampling_metrics
from dapo_runner.logging.postmortem import save_batch
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog
from dapo_runner.logging.speed import peak_flops, peak_memory, speed_figures, training_flops
from dapo_runner.parallel.rollouts import complete
from dapo_runner.parallel.world import World
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.asynchronous import AheadSampler
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.group_buffer import DynamicSampler, SampledStep
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.worker import Rollouts
from dapo_runner.timing import StepClock
from dapo_runner.types import Group, Prompt, SamplingParams, Sequence

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
    """A run under way: what the loop works with, and where it writes. Every rank has one; rank 0 writes."""

    world: World
    config: Config
    folder: Path
    dataset: Dataset
    learner: Learner
    engine: RolloutEngine
    rollouts: Rollouts
    sampler: DynamicSampler | AheadSampler
    sync_probe: SyncProbe
    score: Scorer
    log: RunLog | None  # on rank 0 alone, as the lock
    progress: Progress
    clock: StepClock
    lock: FolderLock | None
    stop: StopRequest
    early_stop: EarlyStop
    first_step: int  # the last one behind it
    trained: int  # the last step whose updates are complete
    saved: int  # the last step that a finished checkpoint holds
    in_background: BackgroundSaves | None  # with run.async_save
    owes_evaluation: bool  # of the policy it begins with, or because that failed
    stopping: bool = False  # after the step under way
    last_step_took: float = 0.0  # seconds
    speed: dict[str, float] = field(default_factory=dict)  # of the step under way, once it has trained
    unlogged: TrainedStep | None = None
    # Returns the sampler and random generators to resume step `trained` with. None while an update changes the weights.
    resume_state: Callable[[], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        def clear_resume_state(*_: object) -> None:
            self.resume_state = None

        for part in self.learner.parts():
            if part.optimizer is not None:
                part.optimizer.register_step_pre_hook(clear_resume_state)

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
        if isinstance(self.sampler, AheadSampler):
            self.sampler.close()
        self.progress.close()
        for held in (self.score, self.log, self.lock):
            if held is not None:
                held.close()

        self.world.close(error)

    def is_last(self, step: int) -> bool:
        return step == self.config.run.steps or self.early_stop.reason is not None

    def asked_to_stop(self) -> bool:
        """Whether a signal has come, on any rank."""
        self.stopping = self.world.any(self.stop.requested)
        return self.stopping

    def sample(self, step: int) -> SampledStep:
        """Return the groups of a step."""
        self.stop.step_takes(self.last_step_took)
        if isinstance(self.sampler, AheadSampler):
            ahead = self.sampler
            self.resume_state = partial(take_snapshot, ahead)
            with self.timed("wait"):
                sampled = self.rollouts.next_ahead(ahead)

            def put_back() -> dict[str, Any]:
                ahead.put_back(sampled)
                return take_snapshot(ahead)

            self.resume_state = put_back
            self.probe_returned()
            return sampled
        before = take_snapshot(self.sampler)
        self.resume_state = lambda: before
        sampled = self.sampler.next(self.rollouts.generate_groups)
        self.probe_returned()
        if self.config.advantage.segments is None:
            return sampled
        return self.rollouts.value_segments(sampled, step, self.sampler)

    def save_before_stopping(self, error: BaseException) -> None:
        """Save step `trained`, if no checkpoint holds it, when ``error`` stops the run. A failure is noted, not raised.

        Several ranks can save only together: where all of them stop with an error at the same time. A save that is
        under way needs no more than that none was killed.
        """
        if not (self.world.is_single_process or isinstance(error, Exception)):
            return
        if isinstance(error, StepGivenUpError):
            self.progress.note(f"step {self.trained + 1} is given up: {error}")
        try:
            self.finish_saving()
            if self.trained == self.saved:
                return
            if self.resume_state is None:
                self.progress.note(f"stopped during an update: the last checkpoint is of step {self.saved}")
                return
            if not self.world.all_stopped(error):
                self.progress.note(f"step {self.trained} is not saved: not every rank stopped with an error of its own")
                return
            snapshot = self.resume_state()
            if self.unlogged is not None:
                self.log_step({})
            self.save(self.trained, snapshot)
            self.finish_saving()
            self.progress.note(f"step {self.trained} is saved before the run stops")
        except Exception as failure:  # what stopped the run is what is raised
            self.progress.note(f"step {self.trained} could not be saved: {failure}")

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return self.clock.phase(phase)

    def release_engine(self) -> None:
        """The policy is about to train and wants the memory."""
        with self.timed("sync"):
            self.engine.release()
            if not self.config.rollout.max_staleness:
                self.score.release()

    def training_records(self, groups: list[Group], step: int) -> list[Sequence]:
        """Of every sample of a step, in order."""
        with self.timed("pack"):
            if self.config.preference is not None:
                return pair_sequences(groups, self.config.preference, step)
            return make_sequences(groups, self.config.advantage, step, self.world)

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """One update; where its loss or gradient is not finite, the batch is kept."""
        try:
            return self.learner.update(mini, step - 1)
        except NonFiniteUpdateError as error:
            rank = "" if self.world.is_single_process else f"_rank_{self.world.rank}"
            path = self.folder / NONFINITE / f"step_{step:06d}{rank}.safetensors"
            save_batch(path, mini.micro_batches, str(error))
            where = (
                path if self.world.is_single_process else f"{path.parent}/step_{step:06d}_rank_*, of each rank its own"
            )
            raise NonFiniteUpdateError(f"{error}. The batch is in {where}", mini) from error

    def end_training(self, trained: TrainedStep) -> None:
        """From here on a checkpoint may hold the step, whatever fails after it."""
        with self.timed("sync"):
            self.learner.move_reference()
        self.trained, self.unlogged = trained.step, trained
        if isinstance(self.sampler, AheadSampler):  # whose threads go on sampling
            self.resume_state = partial(take_snapshot, self.sampler)
        else:
            now = take_snapshot(self.sampler)
            self.resume_state = lambda: now

    def sync(self) -> dict[str, float]:
        """Send the policy's weights to the engine, and check that it took them. Raises OutOfSyncError."""
        with self.timed("sync"):
            self.engine.update_weights(self.learner.policy.named_weights())
        return self.probe()

    def probe(self) -> dict[str, float]:
        """How far engine and learner are apart. Raises OutOfSyncError."""
        with self.timed("probe"):
            return self.sync_probe(self.engine, self.learner)

    def probe_returned(self) -> None:
        """Probe again where a server has come back since the last probe: before its responses train."""
        if self.config.rollout.engine_spec.is_remote and self.world.any(self.engine.is_unprobed):
            self.probe()

    def log_step(self, in_sync: dict[str, float]) -> None:
        """Log the step that was trained last. ``in_sync``: what the probe measured."""
        assert self.unlogged is not None
        trained, self.unlogged = self.unlogged, None
        with self.timed("log"):
            self.speed = speed_of(self.learner, self.clock, trained.sequences)
            self.world.broadcast_from_rank0(lambda: self._log_step(trained, in_sync))
        self.early_stop.count(trained.step, trained.sampled.generated)

    def _log_step(self, trained: TrainedStep, in_sync: dict[str, float]) -> None:
        step, sampled, sequences = trained.step, trained.sampled, trained.sequences
        assert self.log is not None
        figures = (
            sampling_metrics(sampled.stats, self.config.filter_on, self.config.sampler.oversample > 1)
            | {"sampling/tokens": sampled.generated}
            | batch_metrics(sampled.groups, step)
            | prefixed("segments", sampled.segments)
            | prefixed("train", trained.figures | pair_metrics(sampled.groups, self.config.preference))
            | prefixed("sync", in_sync)
        )
        if isinstance(self.sampler, AheadSampler):
            figures |= prefixed("async", self.sampler.figures(sampled.groups))
        self.log.step(step, figures, sampled.groups, sequences, self.learner.token_values)
        self.progress.step(step, figures, self.clock.so_far(), self.speed)
        for note in (sampled.shortfall, sampled.caution):
            if note is not None:
                self.progress.note(note)

    def save(self, step: int, snapshot: dict[str, Any] | None = None) -> None:
        """With run.async_save the checkpoint is only on its way when this returns, unless it is the last."""
        with self.timed("save"):
            folder, keep = self.folder / CHECKPOINTS, self.config.run.keep
            if self.in_background is None:
                save_checkpoint(folder, step, self.learner, self.sampler, keep, snapshot)
                self.saved = step
                return
            self.finish_saving()
            self.in_background.start(folder, step, self.learner, self.sampler, keep, snapshot)
            if self.stopping or step == self.config.run.steps:
                self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is on its way. Raises CheckpointError where it could not be written."""
        done = self.in_background.finish() if self.in_background is not None else None
        if done is not None:
            self.saved = done.step

    def end_step(self, step: int) -> None:
        """After all of a step, its evaluation and its checkpoint included: where its time went. A kill before it loses
        no more than that line.
        """
        seconds = self.clock.lap()
        self.last_step_took = sum(seconds.values())
        counts = self.world.all_gather_object(self.score.take_counts())
        calls = {name: sum(part[name] for part in counts) for name in counts[0]}
        self.world.broadcast_from_rank0(lambda: self._log_seconds(step, seconds, calls))
        for warning in self.score.take_warnings():
            self.progress.note(warning)
        self.speed = {}

    def _log_seconds(self, step: int, seconds: dict[str, float], calls: dict[str, float]) -> None:
        assert self.log is not None
        self.log.seconds(step, seconds, self.speed, calls)

    def _log_evaluation(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        assert self.log is not None
        self.log.evaluation(step, metrics, groups)

    def evaluate(self, step: int) -> None:
        if not self.dataset.heldout:
            return
        with self.timed("evaluate"):
            unshaped = self.score.unshaped()

            def answer_all(prompts: SequenceOf[Prompt], sampling: SamplingParams) -> list[Group]:
                return complete(self.world, self.rollouts.answer(prompts, sampling, unshaped))

            result = evaluate(answer_all, self.dataset.heldout, self.config)
            # Rank 0 decides what the answers amount to: a comparison of two may run into its deadline.
            metrics = self.world.broadcast_from_rank0(lambda: result.metrics)
            self.world.run_on_rank0(lambda: self._log_evaluation(step, prefixed("eval", metrics), result.groups))
        self.early_stop.observe(step, prefixed("eval", metrics))
        self.progress.evaluation(step, metrics)


def speed_of(learner: Learner, clock: StepClock, sequences: list[Sequence]) -> dict[str, float]:
    """Of the step under way, once it has trained on ``sequences``. Collective."""
    policy = learner.policy
    lengths = [sequence.length - 1 for sequence in sequences if sequence.mask[1:].any()]  # the rest is not packed
    flops, peak = training_flops(policy.model, lengths), peak_flops(policy.device)
    memory = max(learner.world.all_gather_object(peak_memory(policy.device)))
    figures = speed_figures(flops, sum(lengths), clock.so_far(), learner.world.size, peak)
    return figures | {"memory_gib": memory}


def is_due(every: int, step: int) -> bool:
    """Whether what is done ``every`` so many steps comes after this one."""
    return every > 0 and step % every == 0
