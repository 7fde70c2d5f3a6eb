"""The base of `dapo train` and `dapo sft`: save checkpoints, log the time of each phase, stop on a signal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from torch.distributed.checkpoint.stateful import Stateful

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.checkpoint import BackgroundSaves, CheckpointError, save_checkpoint, take_snapshot
from dapo_runner.checkpoint.files import is_whole
from dapo_runner.config import Config
from dapo_runner.interrupt import StepAbandonedError, StopRequest
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog, save_batch
from dapo_runner.run.context import RunContext

T = TypeVar("T")


@dataclass(kw_only=True)
class TrainingRun:
    """The components and the progress of a training run. Every rank has one; rank 0 writes.

    A checkpoint holds the state of ``sampler`` beside the learner. ``snapshot`` and the weights resume after
    ``last_completed_step``, unless ``is_updating``: then the optimizer has begun to change the weights.
    """

    context: RunContext
    config: Config
    learner: Learner
    sampler: Stateful
    log: RunLog | None  # on rank 0
    stop: StopRequest
    last_completed_step: int
    owes_evaluation: bool  # whether to evaluate before the first step
    background_saves: BackgroundSaves | None = None  # with run.async_save
    stopping: bool = False  # after the step that is running
    is_updating: bool = False
    snapshot: dict[str, Any] | None = None
    speed: dict[str, float] = field(default_factory=dict)  # of the current step, once it has trained
    seconds_of_last_step: float = 0.0

    def __post_init__(self) -> None:
        self.world, self.clock, self.progress = self.context.world, self.context.clock, self.context.progress
        self.folder = self.config.run_dir
        self.start_step = self.saved_step = self.last_completed_step

        def set_updating(*_: object) -> None:
            self.is_updating = True

        for part in self.learner.parts():
            if part.optimizer is not None:
                part.optimizer.register_step_pre_hook(set_updating)

    def __enter__(self) -> Self:
        self.stop.__enter__()
        self.progress.start(done := self.last_completed_step, self.config.run.steps)
        if done >= self.config.run.steps:
            self.progress.note(f"all {done} steps are complete. Set a larger run.steps (sft: run.epochs) to go on")
        self.clock.lap()  # loading is not part of the first step
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.finish_saving()
            else:
                self.save_before_stopping(error)
        finally:
            self.stop.__exit__(kind, error, trace)
            self.close(error)

    def close(self, error: BaseException | None) -> None:
        if self.log is not None:
            self.log.trackers.close(error)
        self.context.close(error)

    def is_last(self, step: int) -> bool:
        return step == self.config.run.steps

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """Make one update. If its loss or gradient is not finite, save its batch and raise NonFiniteUpdateError."""
        try:
            return self.learner.update(mini, step - 1)
        except NonFiniteUpdateError as error:
            rank = "" if self.world.is_single_process else f"_rank_{self.world.rank}"
            path = self.folder / "nonfinite" / f"step_{step:06d}{rank}.safetensors"
            save_batch(path, mini.micro_batches, str(error))
            raise NonFiniteUpdateError(f"{error}. The batch of each rank is in {path.parent}") from error

    def complete_step(self, step: int) -> None:
        """Mark the step as completed. From here on it can be saved, even if something after it fails."""
        self.last_completed_step, self.snapshot, self.is_updating = step, take_snapshot(self.sampler), False

    def must_evaluate(self, step: int) -> bool:
        """Return whether to evaluate after this step. Collective: the ranks also agree on whether to stop."""
        self.stopping = self.world.any(self.stop.requested)
        return self.is_last(step) or (is_due(self.config.run.eval_every, step) and not self.stopping)

    def must_save(self, step: int) -> bool:
        """Return whether to save after this step. Call it after the evaluation, which can end the run early."""
        return self.stopping or self.is_last(step) or is_due(self.config.run.save_every, step)

    def end_step(self, step: int) -> None:
        """Log the time of each phase of a step, evaluation and checkpoint included. A kill before this loses only
        that line. Raises KeyboardInterrupt if a signal has asked the run to stop.
        """
        seconds, calls = self.clock.lap(), self.count_calls()
        self.seconds_of_last_step = sum(seconds.values())
        self.write(lambda log: log.seconds(step, seconds, self.speed, calls))
        self.speed = {}
        if self.stopping and not self.is_last(step):
            self.progress.note(f"stopped after step {step}, which is saved")
            raise KeyboardInterrupt

    def write(self, work: Callable[[RunLog], T]) -> T:
        """Run ``work`` with the log on rank 0 and return its result, or raise its error, on every rank."""
        return self.world.broadcast_from_rank0(lambda: work(cast(RunLog, self.log)))

    def count_calls(self) -> dict[str, float]:
        """Return how often the step called rewards and environments, by metric name. Collective."""
        return {}

    def save(self, step: int, snapshot: dict[str, Any] | None = None) -> None:
        """Save a checkpoint. With run.async_save it is written in the background, unless it is the last one."""
        with self.clock.phase("save"):
            folder, keep = self.folder / CHECKPOINTS, self.config.run.keep
            snapshot = snapshot or take_snapshot(self.sampler)
            if self.background_saves is None:
                save_checkpoint(folder, step, self.learner, snapshot, keep)
                self.saved_step = step
                return
            self.finish_saving()
            self.background_saves.start(folder, step, self.learner, snapshot, keep)
            if self.stopping or step == self.config.run.steps:
                self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written. Raises CheckpointError if it failed."""
        if self.background_saves is not None and (done := self.background_saves.finish()) is not None:
            self.saved_step = done.step

    def save_before_stopping(self, error: BaseException) -> None:
        """Save the last completed step when ``error`` stops the run. A failure is noted, not raised.

        Several ranks can save only if all of them stop with an error at the same time. A background save that is
        already in progress finishes as long as no rank is killed.
        """
        step, note = self.last_completed_step, self.progress.note
        if not (self.world.is_single_process or isinstance(error, (Exception, StepAbandonedError))):
            return
        if isinstance(error, StepAbandonedError):
            note(f"what follows step {step} is abandoned: {error}")
        try:
            try:
                self.finish_saving()
            except CheckpointError as failure:  # this step may still be saved
                note(str(failure))
            path = self.folder / CHECKPOINTS / f"step_{step:06d}"
            if step == self.saved_step or (self.world.is_single_process and is_whole(path)):
                return
            if self.is_updating:
                note(f"stopped during an update: the last checkpoint is of step {self.saved_step}")
            elif not self.world.all_stopped(error):
                note(f"step {step} is not saved: saving requires all ranks, and some ended without an error")
            else:
                self.save(step, self.prepare_snapshot())
                self.finish_saving()
                note(f"step {step} is saved before the run stops")
        except Exception as failure:  # the caller raises the error that stopped the run
            note(f"step {step} could not be saved: {failure}")

    def prepare_snapshot(self) -> dict[str, Any] | None:
        """Return the sampler's snapshot to save with the last completed step."""
        return self.snapshot


def is_due(every: int, step: int) -> bool:
    """Return whether ``every`` divides ``step``; False if ``every`` is 0."""
    return every > 0 and step % every == 0
