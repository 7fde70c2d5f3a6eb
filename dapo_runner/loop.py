"""The loop: DAPO (arXiv 2503.14476, Algorithm 1), readable top to bottom."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dapo_runner.config import Config, check_config
from dapo_runner.interrupt import StopRequest
from dapo_runner.records.progress import Progress, make_progress
from dapo_runner.run import is_due, open_run
from dapo_runner.update.advantage import make_sequences
from dapo_runner.update.learner import step_figures


def train(config: Config, progress: Progress | None = None) -> Path:
    """Run, or take up again, the run that the configuration describes. Returns its folder. ``progress`` is by default
    what `logging.progress` asks for, on the standard output.

    Ctrl-C finishes the step and saves it; then KeyboardInterrupt. Raises ConfigError, SamplingExhaustedError,
    NonFiniteUpdateError, OutOfSyncError, RewardError, CheckpointError.
    """
    check_config(config)
    progress = make_progress(config.logging.progress, Console()) if progress is None else progress
    run = open_run(config, progress)
    with run, StopRequest(progress.note) as stop:
        run.probe()
        if run.owes_evaluation:
            run.evaluate(run.first_step)
            run.end_step(run.first_step)
        for step in range(run.first_step + 1, config.run.steps + 1):
            if run.early_stop.reason is not None:
                progress.note(run.early_stop.reason)
                break
            sampled = run.sample(step)
            run.release_engine()
            with run.timed("pack"):
                sequences = make_sequences(sampled.groups, config.advantage, step)
            minis = run.learner.prepare(sequences)
            updates = [run.update(mini, step) for mini in minis]
            in_sync = run.sync()
            run.log_step(step, sampled, sequences, step_figures(minis, updates), in_sync)
            if is_due(config, config.run.eval_every, step):
                run.evaluate(step)
            ended = step == config.run.steps or run.early_stop.reason is not None
            if stop.requested or ended or is_due(config, config.run.save_every, step):
                run.save(step)
            run.end_step(step)
            if stop.requested and not ended:
                progress.note(f"stopped after step {step}, which is saved")
                raise KeyboardInterrupt
    return run.folder
