"""The loop of `dapo sft`, readable top to bottom, and what it is made of. An update is a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from rich.console import Console

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.packing import count_training_tokens, pack
from dapo_runner.checkpoint import save_checkpoint
from dapo_runner.config import Config, ConfigError, SftConfig
from dapo_runner.config.checks import check_schedule, failures
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.interrupt import StopRequest
from dapo_runner.logging.metrics import prefixed
from dapo_runner.logging.progress import Progress, make_progress
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog
from dapo_runner.logging.trackers import open_trackers
from dapo_runner.policy.lengths import check_length
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.run.opening import Place, find_beginning, open_in_place, seed_generators, take_up, tell_changes
from dapo_runner.run.parts import open_learner
from dapo_runner.run.steps import is_due, speed_of
from dapo_runner.tools.sft.data import Examples, load_examples
from dapo_runner.types import Prompt, Sequence

FIGURES = ("loss", "grad_norm", "lr", "tokens", "entropy")  # of an update


def sft(recipe: SftConfig, progress: Progress | None = None) -> Path:
    """Run, or take up again, the supervised run that a recipe describes. Returns its folder.

    Ctrl-C finishes the update and saves it; then KeyboardInterrupt. Raises ConfigError, NonFiniteUpdateError,
    CheckpointError, RankLostError.
    """
    progress = make_progress(recipe.logging.progress, Console()) if progress is None else progress
    with open_in_place(recipe.training(), progress, partial(_open_sft, recipe)) as run:
        if run.first_step == 0:
            run.evaluate(0)
            run.end_step(0)
        for step in range(run.first_step + 1, run.updates + 1):
            run.update(step)
            last, stopping = step == run.updates, run.asked_to_stop()
            if last or (is_due(run.config.run.eval_every, step) and not stopping):
                run.evaluate(step)
            if stopping or last or is_due(run.config.run.save_every, step):
                run.save(step)
            run.end_step(step)
            if stopping and not last:
                run.place.progress.note(f"stopped after step {step}, which is saved")
                raise KeyboardInterrupt
    return recipe.run_dir


@dataclass
class SftRun:
    """A supervised run under way. Every rank has one; rank 0 writes."""

    place: Place
    config: Config  # what it shares with a run of `dapo train`
    examples: Examples
    cursor: PromptCursor
    learner: Learner
    log: RunLog | None  # on rank 0 alone
    stop: StopRequest
    first_step: int  # the last one behind it
    speed: dict[str, float] = field(default_factory=dict)  # of the update behind it

    def __enter__(self) -> SftRun:
        self.stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.__exit__(kind, error, trace)
        self.place.progress.close()
        for held in (self.log, self.place.lock):
            if held is not None:
                held.close()
        self.place.world.close(error)

    @property
    def updates(self) -> int:
        return self.config.run.steps

    def update(self, step: int) -> None:
        """Raises NonFiniteUpdateError."""
        sequences = self._sequences(self.cursor.take(self.config.mini_batch_size))
        (mini,) = self.learner.prepare(sequences)
        figures = self.learner.update(mini, step - 1)
        shown = prefixed("train", {name: figures[name] for name in FIGURES})
        self._log(step, "step", shown)
        self.speed = speed_of(self.learner, self.place.clock, sequences)
        self.place.progress.step(step, shown | {"loss": figures["loss"]}, self.place.clock.so_far(), self.speed)

    def evaluate(self, step: int) -> None:
        """The mean cross-entropy of the held-out completions, in nats a token."""
        if not self.examples.heldout:
            return
        world = self.place.world
        with self.place.clock.phase("evaluate"):
            sequences = self._sequences(self.examples.heldout)
            batches = pack(sequences, self.config.optimizer.token_budget, self.learner.share)
            own = math.fsum(float(self.learner.logprobs(batch).double().sum()) for batch in batches)
            total = math.fsum(world.all_gather_object(own)[:: world.layout.sequence])
            loss = -total / count_training_tokens(sequences)
        self._log(step, "eval", {"eval/loss": loss, "eval/examples": len(sequences)})
        self.place.progress.note(f"after step {step}: held-out loss {loss:.4f}")

    def save(self, step: int) -> None:
        with self.place.clock.phase("save"):
            folder = self.config.run_dir / CHECKPOINTS
            save_checkpoint(folder, step, self.learner, self.cursor, self.config.run.keep)

    def end_step(self, step: int) -> None:
        """Where its time went."""
        seconds, speed = self.place.clock.lap(), self.speed

        def write() -> None:
            assert self.log is not None
            self.log.seconds(step, seconds, speed, {})

        self.place.world.broadcast_from_rank0(write)
        self.speed = {}

    def asked_to_stop(self) -> bool:
        """Whether a signal has come, on any rank."""
        return self.place.world.any(self.stop.requested)

    def _sequences(self, prompts: list[Prompt]) -> list[Sequence]:
        return [self.examples.sequences[prompt.id] for prompt in prompts]

    def _log(self, step: int, kind: str, figures: dict[str, float]) -> None:
        def write() -> None:
            assert self.log is not None
            self.log.figures(step, kind, figures)

        self.place.world.broadcast_from_rank0(write)


def plan_updates(recipe: SftConfig, examples: Examples) -> Config:
    """Return what the recipe shares with a run, as long as its epochs are. Raises ConfigError, also for examples that
    are longer than the model takes.
    """
    assert recipe.model.path is not None
    longest = max(len(sequence.token_ids) for sequence in examples.sequences.values())
    check_length("model.path", recipe.model.path, recipe.model, longest, "data.max_tokens: an example")
    updates = math.ceil(recipe.run.epochs * len(examples.train) / recipe.optimizer.mini_batch_size)
    config = recipe.training(updates)
    if problems := list(failures(config, check_schedule)):
        raise ConfigError("\n".join(problems))
    return config


def _open_sft(recipe: SftConfig, place: Place) -> SftRun:
    """Build everything a supervised run needs, or put it back as its last checkpoint left it."""
    world, progress, folder = place.world, place.progress, recipe.run_dir
    checkpoint, changes = world.broadcast_from_rank0(lambda: find_beginning(recipe, folder))
    done = checkpoint.step if checkpoint else 0
    assert recipe.model.path is not None
    tokenizer = load_tokenizer(checkpoint.model if checkpoint else recipe.model.path, recipe.model)
    examples = world.run_or_raise_everywhere(lambda: load_examples(recipe, tokenizer))
    config = world.run_or_raise_everywhere(lambda: plan_updates(recipe, examples))
    progress.note(f"data: {examples.report.describe()}")
    progress.note(f"{config.run.steps} updates of {config.mini_batch_size} examples, {recipe.run.epochs:g} epochs")
    learner = open_learner(config, folder, checkpoint, place.device, progress, place.clock, world)
    cursor = PromptCursor(examples.train, config.run.seed, examples.heldout)
    is_resumed = checkpoint is not None
    trackers = world.run_on_rank0(lambda: open_trackers(recipe, folder, done + 1, progress.note, is_resumed))
    seed_generators(config.run.seed)
    if checkpoint:
        changes += take_up(checkpoint, learner, cursor, progress)
        progress.note(f"resuming after step {done} from {checkpoint.path}")

    def open_log() -> RunLog:
        assert trackers is not None  # on rank 0
        keep_through = done if checkpoint else -1
        log = RunLog(folder, config.logging, trackers, first_step=done, keep_through=keep_through, note=progress.note)
        if checkpoint:
            tell_changes(log, recipe, folder, changes, progress)
        return log

    log = world.run_on_rank0(open_log)
    progress.start(done, config.run.steps)
    place.clock.lap()  # what a run is made of was loaded before its first step
    stop = StopRequest(progress.note, config.run.grace)
    return SftRun(place, config, examples, cursor, learner, log, stop, first_step=done)
