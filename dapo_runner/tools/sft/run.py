"""The training loop of `dapo sft`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.config import Config, ConfigError, SftConfig, check_config, check_schedule, failures
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.interrupt import StopRequest
from dapo_runner.logging.metrics import prefixed
from dapo_runner.logging.progress import Progress, RunConsole, make_progress
from dapo_runner.logging.speed import speed_metrics
from dapo_runner.policy.lengths import check_length, refuse_quantized
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.run.context import RunContext, open_context
from dapo_runner.run.start import build_learner, find_start, load_start, open_log
from dapo_runner.run.training import TrainingRun
from dapo_runner.tools.sft.data import Examples, load_examples
from dapo_runner.types import Prompt, TrainingSequence

FIGURES = ("loss", "grad_norm", "lr", "tokens", "entropy", "loss_scale", "skipped_updates")  # logged per update


def sft(recipe: SftConfig, progress: Progress | None = None) -> Path:
    """Start the supervised run that a recipe describes, or resume it. Return its folder.

    Ctrl-C finishes and saves the update, then raises KeyboardInterrupt. Raises ConfigError, NonFiniteUpdateError,
    CheckpointError, RankLostError.
    """
    check_config(recipe)
    progress = make_progress(recipe.logging.progress, RunConsole()) if progress is None else progress
    context = open_context(recipe.training(), progress)
    with context.closed_on_error():
        opened = _open_sft(recipe, context)
    with opened as run:
        if run.owes_evaluation:
            run.evaluate(run.last_completed_step)
            run.end_step(run.last_completed_step)
        for step in range(run.last_completed_step + 1, run.config.run.steps + 1):
            run.train_step(step)
            if run.must_evaluate(step):
                run.evaluate(step)
            if run.must_save(step):
                run.save(step)
            run.end_step(step)
    return recipe.run_dir


@dataclass(kw_only=True)
class SftRun(TrainingRun):
    """A supervised run. Its batches are examples, and each update is a step."""

    examples: Examples
    sampler: PromptCursor

    def train_step(self, step: int) -> None:
        """Make one update and log it. Raises NonFiniteUpdateError."""
        sequences = self._sequences(self.sampler.take(self.config.mini_batch_size))
        (mini,) = self.learner.prepare(sequences)
        figures = self.update(mini, step)
        shown = prefixed("train", {name: figures[name] for name in FIGURES if name in figures})
        self.write(lambda log: log.figures(step, "step", shown))
        self.complete_step(step)  # only now: a step that is saved has its line
        self.speed = speed_metrics(self.learner.policy, sequences, self.clock.so_far())
        self.progress.step(step, shown | {"loss": figures["loss"]}, self.clock.so_far(), self.speed)

    def evaluate(self, step: int) -> None:
        """Log the mean cross-entropy of the held-out completions, in nats per token."""
        if not self.examples.heldout:
            return
        with self.clock.phase("evaluate"):
            sequences = self._sequences(self.examples.heldout)
            batches = self.learner.pack(sequences)[self.world.data_rank]
            local = math.fsum(float(self.learner.logprobs(batch).double().sum()) for batch in batches)
            loss = -math.fsum(self.world.gather_shares(local)) / count_training_tokens(sequences)
        self.write(lambda log: log.figures(step, "eval", {"eval/loss": loss, "eval/examples": len(sequences)}))
        self.progress.note(f"after step {step}: held-out loss {loss:.4f}")

    def _sequences(self, prompts: list[Prompt]) -> list[TrainingSequence]:
        return [self.examples.sequences[prompt.id] for prompt in prompts]


def plan_updates(recipe: SftConfig, examples: Examples) -> Config:
    """Return the configuration with as many updates as the epochs need. Raises ConfigError, also for long examples."""
    assert recipe.model.path is not None
    ids = [sequence.token_ids for sequence in examples.sequences.values()]
    highest = max(int(sequence.max()) for sequence in ids)
    key, path, longest = "model.path", recipe.model.path, max(map(len, ids))
    refuse_quantized(key, check_length(key, path, recipe.model, longest, "data.max_tokens", highest))
    size, n_examples = recipe.optimizer.mini_batch_size, len(examples.train)
    config = recipe.training(math.ceil(round(recipe.run.epochs * n_examples / size, 6)))
    fits = ("optimizer.mini_batch_size", size <= n_examples, f"at most {n_examples}, the training examples")
    if problems := list(failures(iter((fits, *check_schedule(config))), config)):
        raise ConfigError("\n".join(problems))
    return config


def _open_sft(recipe: SftConfig, context: RunContext) -> SftRun:
    world, progress, folder = context.world, context.progress, recipe.run_dir
    start = world.broadcast_from_rank0(lambda: find_start(recipe, folder))
    assert recipe.model.path is not None
    tokenizer = load_tokenizer(start.checkpoint.model if start.checkpoint else recipe.model.path, recipe.model)
    examples = world.run_or_raise_everywhere(lambda: load_examples(recipe, tokenizer))
    config = world.run_or_raise_everywhere(lambda: plan_updates(recipe, examples))
    progress.note(f"data: {examples.report.describe('examples')}")
    if examples.note is not None:
        progress.note(examples.note)
    progress.note(f"{config.run.steps} updates of {config.mini_batch_size} examples, {recipe.run.epochs:g} epochs")
    learner = build_learner(config, start.checkpoint, context)
    cursor = PromptCursor(examples.train, config.run.seed, examples.heldout)
    start = load_start(start, learner, cursor, context)
    log = open_log(recipe, start, context)
    return SftRun(
        context=context,
        config=config,
        learner=learner,
        sampler=cursor,
        log=log,
        stop=StopRequest(progress.note, config.run.grace),
        last_completed_step=start.last_completed_step,
        owes_evaluation=bool(examples.heldout) and world.broadcast_from_rank0(lambda: start.owes_evaluation(config)),
        examples=examples,
    )
