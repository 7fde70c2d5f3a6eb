"""The loop: DAPO (arXiv 2503.14476, Algorithm 1), readable top to bottom."""

from __future__ import annotations

from pathlib import Path

from dapo_runner.config import Config
from dapo_runner.interrupt import StopRequest
from dapo_runner.records.progress import Progress
from dapo_runner.run import is_due, open_run
from dapo_runner.update.advantage import make_sequences
from dapo_runner.update.learner import step_figures


def train(config: Config, progress: Progress) -> Path:
    """Run, or take up again, the run that the configuration describes. Returns its folder.

    Ctrl-C finishes the step and saves it; then KeyboardInterrupt. Raises ConfigError, SamplingExhaustedError,
    NonFiniteUpdateError, OutOfSyncError, RewardError, CheckpointError.
    """
    run = open_run(config, progress)
    with run, StopRequest(progress.note) as stop:
        run.probe()
        if run.owes_evaluation:
            run.evaluate(run.first_step)
            run.end_step(run.first_step)
        for step in range(run.first_step + 1, config.run.steps + 1):
            sampled = run.sample(step)
            run.release_engine()
            with run.timed("pack"):
                sequences = make_sequences(sampled.groups, config.advantage, step)
            minis = run.learner.prepare(sequences)
            updates = [run.update(mini, step) for mini in minis]
            in_sync = run.sync()
            run.log_step(step, sampled, sequences, step_figures(minis, updates), in_sync)
            last = step == config.run.steps
            if is_due(config, config.run.eval_every, step):
                run.evaluate(step)
            if stop.requested or is_due(config, config.run.save_every, step):
                run.save(step)
            run.end_step(step)
            if stop.requested and not last:
                progress.note(f"stopped after step {step}, which is saved")
                raise KeyboardInterrupt
    return run.folder
