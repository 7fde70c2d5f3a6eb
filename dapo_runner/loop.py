"""The loop: DAPO (arXiv 2503.14476, Algorithm 1), readable top to bottom."""

from __future__ import annotations

from pathlib import Path

from dapo_runner.config import Config, check_config
from dapo_runner.logging.progress import Progress, RunConsole, make_progress
from dapo_runner.run.start import open_run
from dapo_runner.run.steps import TrainedStep


def train(config: Config, progress: Progress | None = None) -> Path:
    """Start the run that the configuration describes, or resume it. Return its folder.

    Args:
        progress: What shows the progress; by default what `logging.progress` selects, on the standard output.

    Raises:
        ConfigError, RunError: The run cannot start, or cannot go on. The message or the subclass of RunError says why.
        KeyboardInterrupt, StepAbandonedError: After Ctrl-C or SIGTERM, once the step is saved or abandoned.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from dapo_runner import load_config, train
        >>> small = ["run.steps=1", "data.eval_size=2", "sampler.prompts_per_step=2", "optimizer.mini_batch_size=null"]
        >>> with TemporaryDirectory() as folder:
        ...     options = [f"run.output_dir={folder}", "logging.progress=off", "model.tiny.warmup.steps=1"]
        ...     train(load_config("recipes/tiny.yaml", [*small, *options])).name
        'tiny'
    """
    check_config(config)
    progress = make_progress(config.logging.progress, RunConsole()) if progress is None else progress
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
            trained = TrainedStep(step, sampled, sequences, run.learner.step_metrics(minis, updates))
            run.end_training(trained)
            run.log_step(run.sync())
            run.check_mismatch(trained)
            if run.must_evaluate(step):
                run.evaluate(step)
            if run.must_save(step):
                run.save(step)
            run.end_step(step)
    return run.folder
