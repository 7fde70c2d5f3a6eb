"""The loop: DAPO (arXiv 2503.14476, Algorithm 1), readable top to bottom."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dapo_runner.algorithms.learner import step_metrics
from dapo_runner.config import Config, check_config
from dapo_runner.logging.progress import Progress, make_progress
from dapo_runner.run.start import open_run
from dapo_runner.run.steps import TrainedStep


def train(config: Config, progress: Progress | None = None) -> Path:
    """Start the run that the configuration describes, or resume it. Returns its folder. ``progress`` is by default what
    `logging.progress` asks for, on the standard output.

    Ctrl-C finishes the step and saves it; then KeyboardInterrupt. Raises ConfigError, SamplingExhaustedError,
    SamplingStalledError, NonFiniteUpdateError, OutOfSyncError, RewardError, RolloutError, CheckpointError;
    StepGivenUpError after SIGTERM; RankLostError.
    """
    check_config(config)
    progress = make_progress(config.logging.progress, Console()) if progress is None else progress
    with open_run(config, progress) as run:
        run.probe()
        if run.owes_evaluation:
            run.evaluate(run.last_completed_step)
            run.end_step(run.last_completed_step)
        for step in range(run.last_completed_step + 1, config.run.steps + 1):
            if run.early_stop.reason is not None:
                run.progress.note(run.early_stop.reason)
                break
            sampled = run.sample(step)
            run.release_engine()
            sequences = run.training_records(sampled.groups, step)
            minis = run.learner.prepare(sequences)
            updates = [run.update(mini, step) for mini in minis]
            run.end_training(TrainedStep(step, sampled, sequences, step_metrics(minis, updates, run.world)))
            run.log_step(run.sync())
            if run.must_evaluate(step):
                run.evaluate(step)
            if run.must_save(step):
                run.save(step)
            run.end_step(step)
    return run.folder
