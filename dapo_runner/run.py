"""What a run is made of: built, or put back as its last checkpoint left it; and whether it is the same run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo_runner.checkpoint import (
    Checkpoint,
    checkpoint_to_resume,
    load_checkpoint,
    moment,
    save_checkpoint,
)
from dapo_runner.config import Config, ConfigError, cautions
from dapo_runner.early_stop import EarlyStop
from dapo_runner.evaluate import evaluate
from dapo_runner.folder import TINY_MODEL, FolderLock, check_alone, check_same_run, lock_folder, write_config
from dapo_runner.fork import rewarded_otherwise, start_fork
from dapo_runner.policy.model import load_model, load_policy, load_reference, load_tokenizer, resolve_device
from dapo_runner.preflight.algorithm import algorithm
from dapo_runner.preflight.needs import check_needs
from dapo_runner.records.metrics import METRICS_FILE, batch_metrics, prefixed, read_log, sampling_metrics
from dapo_runner.records.postmortem import save_batch
from dapo_runner.records.progress import Progress
from dapo_runner.records.run_log import CHECKPOINTS, RunLog
from dapo_runner.records.trackers import open_trackers
from dapo_runner.rewards.scoring import Scorer, never_right
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.sampling.curriculum import make_curriculum
from dapo_runner.sampling.data import Dataset, PromptCursor, load_data
from dapo_runner.sampling.sampler import DynamicSampler, SampledStep
from dapo_runner.tasks.tiny import ensure_tiny_model
from dapo_runner.timing import StepClock
from dapo_runner.types import Group, Prompt, SamplingParams, Sequence
from dapo_runner.update.learner import Learner, MiniBatch, NonFiniteUpdateError, resolve_objective

NONFINITE = "nonfinite"


@dataclass
class Run:
    """A run under way: what the loop works with, and where it writes."""

    config: Config
    folder: Path
    dataset: Dataset
    learner: Learner
    engine: RolloutEngine
    sampler: DynamicSampler
    sync_probe: SyncProbe
    score: Scorer
    log: RunLog
    progress: Progress
    clock: StepClock
    lock: FolderLock
    early_stop: EarlyStop
    first_step: int  # the last one behind it
    saved: int  # the last one that is safe on the disk
    owes_evaluation: bool  # of the policy it begins with, or because that failed

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.close()
        self.log.close()
        self.lock.release()

    def sample(self, step: int) -> SampledStep:
        """The groups of a step. Where that fails, the steps before it are saved, as they were before it began."""
        with self.saving_first(step - 1, moment(self.sampler)):
            return self.sampler.next(self.generate_groups)

    @contextmanager
    def saving_first(self, step: int, then: dict[str, Any]) -> Iterator[None]:
        """An engine or a reward function that fails takes no step with it that was done before: ``step`` is saved,
        with ``then`` as the moment to go on from.
        """
        try:
            yield
        except Exception:
            if step > self.saved:
                try:
                    self.save(step, then)
                    self.progress.note(f"step {step} is saved; what follows stopped the run after it")
                except Exception as error:  # what stopped the run is what is raised
                    self.progress.note(f"step {step} could not be saved: {error}")
            raise

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return self.clock.phase(phase)

    def generate_groups(self, prompts: list[Prompt], round_number: int) -> list[Group]:
        """In the order of the prompts, less those that a reward failed on and was allowed to."""
        with self.timed("rollout"):
            completions = self.engine.generate(prompts, rollout_sampling(self.config, round_number))
        with self.timed("score"):
            return self.score(prompts, completions)

    def release_engine(self) -> None:
        """The policy is about to train and wants the memory."""
        with self.timed("sync"):
            self.engine.release()

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """One update; where its loss or gradient is not finite, the batch is kept."""
        try:
            return self.learner.update(mini, step - 1)
        except NonFiniteUpdateError as error:
            path = self.folder / NONFINITE / f"step_{step:06d}.safetensors"
            save_batch(path, mini.micro_batches, str(error))
            raise NonFiniteUpdateError(f"{error}. The batch is in {path}", mini) from error

    def sync(self) -> dict[str, float]:
        """Hand the engine the policy's weights, and see that it took them. Raises OutOfSyncError."""
        with self.timed("sync"):
            self.engine.update_weights(self.learner.policy.named_weights())
        return self.probe()

    def probe(self) -> dict[str, float]:
        """How far engine and learner are apart. Raises OutOfSyncError."""
        with self.timed("probe"):
            return self.sync_probe(self.engine, self.learner)

    def log_step(
        self,
        step: int,
        sampled: SampledStep,
        sequences: list[Sequence],
        trained: dict[str, float],
        in_sync: dict[str, float],
    ) -> None:
        with self.timed("log"):
            figures = (
                sampling_metrics(sampled.stats, self.config.sampler.filter_on)
                | batch_metrics(sampled.groups, step)
                | prefixed("train", trained)
                | prefixed("sync", in_sync)
            )
            news = self.log.step(step, figures, sampled.groups, sequences)
            self.progress.step(step, figures, self.clock.so_far())
            for note in (news, sampled.shortfall, sampled.caution):
                if note is not None:
                    self.progress.note(note)

    def save(self, step: int, then: dict[str, Any] | None = None) -> None:
        with self.timed("save"):
            save_checkpoint(self.folder / CHECKPOINTS, step, self.learner, self.sampler, self.config.run.keep, then)
        self.saved = step

    def end_step(self, step: int) -> None:
        """After all of a step, its evaluation and its checkpoint included: where its time went. A kill before it loses
        no more than that line.
        """
        self.log.seconds(step, self.clock.lap(), self.score.counts())

    def evaluate(self, step: int) -> None:
        if not self.dataset.heldout:
            return
        with self.saving_first(step, moment(self.sampler)), self.timed("evaluate"):
            unshaped = Scorer(self.config, shaped=False)
            result = evaluate(self.engine.generate, self.dataset.heldout, unshaped, self.config)
            news = self.log.evaluation(step, prefixed("eval", result.metrics), result.groups)
        self.early_stop.observe(step, prefixed("eval", result.metrics))
        self.progress.evaluation(step, result.metrics)
        if news is not None:
            self.progress.note(news)


def rollout_sampling(config: Config, round_number: int) -> SamplingParams:
    """The sampling of one generation round, with a seed of its own."""
    rollout = config.rollout
    return SamplingParams(
        n=rollout.group_size,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        max_tokens=rollout.max_response_tokens,
        seed=random.Random(f"{config.run.seed}:{round_number}").getrandbits(31),
    )


def open_run(config: Config, progress: Progress) -> Run:
    """Build everything a run needs, or put it back as its last checkpoint left it. The run's folder is locked until the
    run is left.
    """
    check_alone()
    resolve_objective(config)
    if config.parallel.gpus > 1:
        raise ConfigError(
            f"parallel.gpus: expected 1, which is what this version trains on, got {config.parallel.gpus}; "
            "--dry-run makes a plan for any number"
        )
    check_needs(config)
    device = resolve_device(config.run.device)
    lock = lock_folder(config.run_dir, progress.note)
    try:
        return _open_run(config, device, progress, lock)
    except BaseException:
        lock.release()
        raise


def _open_run(config: Config, device: torch.device, progress: Progress, lock: FolderLock) -> Run:
    folder = config.run_dir
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    changes = check_same_run(config, folder)
    for part, choice in algorithm(config).items():
        progress.note(f"{part}: {choice}")
    checkpoint = checkpoint_to_resume(folder / CHECKPOINTS)
    if checkpoint is None:
        write_config(config, folder)
    if checkpoint is None and config.run.from_ is not None:
        checkpoint = start_fork(config, folder)
        changes = []
    done = checkpoint.step if checkpoint else 0
    is_new = done == config.run.forked_at
    keep_through = done - 1 if is_new else done
    source = checkpoint.model if checkpoint else initial_model(config, folder, progress)
    dataset = load_data(config, load_tokenizer(source, config.model))
    for note in (f"data: {dataset.report.describe()}", *cautions(config), never_right(config.reward, dataset.train)):
        if note is not None:
            progress.note(note)
    clock = StepClock(device, progress.phase)
    learner = open_learner(config, folder, checkpoint, device, progress, clock)
    curriculum = make_curriculum(config.sampler.curriculum, dataset.train)
    cursor = PromptCursor(dataset.train, config.run.seed, dataset.heldout, curriculum)
    sampler = DynamicSampler(cursor, config.sampler, progress.round)
    engine = open_engine(config, source, device)
    trackers = open_trackers(config, folder, keep_through + 1)
    # Nothing that draws a random number comes after this: a resumed run must see the numbers the first one saw.
    torch.manual_seed(config.run.seed)
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    if checkpoint:
        load_checkpoint(checkpoint, learner, sampler)
        if is_new and (changed := rewarded_otherwise(folder)):
            progress.note(f"{len(sampler.buffer)} groups left over are dropped: {', '.join(changed)} is another now")
            sampler.buffer = []
        progress.note(f"resuming after step {done} from {checkpoint.path}")
    score = Scorer(config, timed=clock.phase, note=progress.note)
    log = RunLog(folder, config.logging, trackers, first_step=done, keep_through=keep_through)
    if checkpoint:
        log.changes(changes)
        write_config(config, folder)  # behind the log: what a kill comes between is told twice, not never
        for change in changes:
            progress.note(f"from step {done + 1} on {change}")
    early_stop = EarlyStop(config)
    for event in read_log(folder / METRICS_FILE):
        if event["kind"] == "eval":
            early_stop.observe(event["step"], event)
    progress.start(done, config.run.steps)
    clock.lap()  # what a run is made of was loaded before its first step
    return Run(
        config=config,
        folder=folder,
        dataset=dataset,
        learner=learner,
        engine=engine,
        sampler=sampler,
        sync_probe=SyncProbe(dataset.train, config),
        score=score,
        log=log,
        progress=progress,
        clock=clock,
        lock=lock,
        early_stop=early_stop,
        first_step=done,
        saved=done,
        owes_evaluation=bool(dataset.heldout) and (is_new or _missed_evaluation(config, folder, done)),
    )


def is_due(config: Config, every: int, step: int) -> bool:
    """Whether what is done ``every`` so many steps, and after the last, comes after this one."""
    return step == config.run.steps or (every > 0 and step % every == 0)


def _missed_evaluation(config: Config, folder: Path, step: int) -> bool:
    """Whether the evaluation after a step that was saved is not in the log: it failed."""
    logged = {event["step"] for event in read_log(folder / METRICS_FILE) if event["kind"] == "eval"}
    return is_due(config, config.run.eval_every, step) and step not in logged


def open_learner(
    config: Config,
    folder: Path,
    checkpoint: Checkpoint | None,
    device: torch.device,
    progress: Progress,
    clock: StepClock,
) -> Learner:
    """The policy, where the objective has a KL penalty its reference, and the optimizer.

    Adapters are put on the model that training started from: what a checkpoint holds has them merged in.
    """
    start = initial_model(config, folder, progress)
    source = start if checkpoint is None or config.model.lora is not None else checkpoint.model
    policy = load_policy(source, config.model, device, config.run.seed)
    needs_reference = resolve_objective(config).kl_coef != 0
    own_reference = config.model.lora is not None and config.loss.reference is None
    reference = None
    if needs_reference and not own_reference:
        reference = load_reference(config.loss.reference or start, config.model, device)
    return Learner(policy, config, reference, clock)


def initial_model(config: Config, folder: Path, progress: Progress) -> str | Path:
    """Where the policy starts from."""
    if config.model.path is not None:
        return config.model.path
    return ensure_tiny_model(config, folder / TINY_MODEL, progress.note)


def open_engine(config: Config, source: str | Path, device: torch.device) -> RolloutEngine:
    """A rollout engine with weights of its own, loaded from ``source``."""
    tokenizer = load_tokenizer(source, config.model)
    if config.rollout.engine == "vllm":
        return VLLMEngine(source, tokenizer, config, device)
    model = load_model(source, config.model, device, "sdpa")
    return HFEngine(model, tokenizer, config.rollout.max_batch_sequences)
