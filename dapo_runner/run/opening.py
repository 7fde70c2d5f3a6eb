"""A run opened: built, or put back as its last checkpoint left it; and whether it is the same run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.checkpoint import BackgroundSaves, Checkpoint, Resumable, checkpoint_to_resume, load_checkpoint
from dapo_runner.config import Config, cautions
from dapo_runner.data.curriculum import make_curriculum
from dapo_runner.data.dataset import PromptCursor, load_data
from dapo_runner.early_stop import EarlyStop
from dapo_runner.folder import AnyConfig, Change, FolderLock, check_same_run, lock_folder, write_config
from dapo_runner.fork import rewarded_otherwise, start_fork
from dapo_runner.interrupt import StopRequest
from dapo_runner.logging.metrics import METRICS_FILE, read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog
from dapo_runner.logging.trackers import open_trackers
from dapo_runner.parallel.rollouts import complete
from dapo_runner.parallel.world import World, open_world
from dapo_runner.policy.lengths import check_lengths
from dapo_runner.policy.model import load_tokenizer, resolve_device
from dapo_runner.preflight.dry_run import describe_algorithm
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rewards.scoring import Scorer, unmatchable_answers
from dapo_runner.rollout.engine import open_engine
from dapo_runner.rollout.group_buffer import DynamicSampler
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.worker import Rollouts
from dapo_runner.run.parts import initial_model, open_learner, sampled_ahead
from dapo_runner.run.steps import Run, is_due
from dapo_runner.timing import StepClock

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a run happens. Every rank has one; rank 0 alone has the lock of the run's folder."""

    world: World
    device: torch.device
    progress: Progress
    clock: StepClock
    lock: FolderLock | None


def open_run(config: Config, progress: Progress) -> Run:
    """Build everything a run needs, or put it back as its last checkpoint left it. The run's folder is locked until the
    run is left.
    """
    resolve_objective(config)
    return open_in_place(config, progress, partial(_open_run, config))


def open_in_place(config: Config, progress: Progress, build: Callable[[Place], T]) -> T:
    """What ``build`` makes, with the ranks met, what it needs at hand and its folder locked."""
    world = open_world(config)
    world.run_or_raise_everywhere(lambda: check_needs(config, world.layout))
    device = world.device or resolve_device(config.run.device)
    shown = progress if world.is_main else Progress()
    lock = world.run_on_rank0(lambda: lock_folder(config.run_dir, shown.note))

    def on_phase(name: str) -> None:
        shown.phase(name)
        if world.watch is not None:
            world.watch.set_phase(name)

    try:
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        return build(Place(world, device, shown, StepClock(device, on_phase), lock))
    except BaseException as error:
        if lock is not None:
            lock.close()
        world.close(error)
        raise


def _open_run(config: Config, place: Place) -> Run:
    world, device, progress, clock = place.world, place.device, place.progress, place.clock
    folder = config.run_dir
    for part, choice in describe_algorithm(config).items():
        progress.note(f"{part}: {choice}")
    checkpoint, changes = world.broadcast_from_rank0(lambda: find_beginning(config, folder))
    done = checkpoint.step if checkpoint else 0
    is_new = done == config.run.forked_at
    keep_through = done - 1 if is_new else done
    source = (
        checkpoint.model if checkpoint else world.broadcast_from_rank0(lambda: initial_model(config, folder, progress))
    )
    world.run_or_raise_everywhere(lambda: check_lengths(config, source, download=True))
    dataset = world.run_or_raise_everywhere(lambda: load_data(config, load_tokenizer(source, config.model)))
    for note in (
        f"data: {dataset.report.describe()}",
        *cautions(config),
        unmatchable_answers(config.reward, dataset.train),
    ):
        if note is not None:
            progress.note(note)

    learner = open_learner(config, folder, checkpoint, device, progress, clock, world)
    curriculum = make_curriculum(config.sampler.curriculum, dataset.train)
    cursor = PromptCursor(dataset.train, config.run.seed, dataset.heldout, curriculum)
    fetch = list if world.is_single_process or config.rollout.max_staleness else partial(complete, world)
    sampler = DynamicSampler(
        cursor, config.sampler, progress.round, fetch, filter_on=config.filter_on, max_age=config.max_age
    )
    engine = world.run_or_raise_everywhere(lambda: open_engine(config, source, device, world, progress.note))
    is_resumed = checkpoint is not None and not is_new
    trackers = world.run_on_rank0(lambda: open_trackers(config, folder, keep_through + 1, progress.note, is_resumed))
    # Nothing that draws a random number comes after this: a resumed run must see the numbers the first one saw.
    seed_generators(config.run.seed)
    if checkpoint:
        changes += take_up(checkpoint, learner, sampler, progress)
        if is_new:
            _drop_left_over(sampler, folder, progress)
        progress.note(f"resuming after step {done} from {checkpoint.path}")
        if config.rollout.max_staleness:
            progress.note(
                f"{len(sampler.buffer)} groups that were sampled and had not trained are there, {sampler.in_flight} "
                "prompts that were in flight are asked again"
            )
    score = Scorer(config)
    if score.judge is not None:
        score.judge.known.open(folder, world.rank, world.size)

    def open_log() -> RunLog:
        assert trackers is not None  # on rank 0
        log = RunLog(
            folder,
            config.logging,
            trackers,
            first_step=done,
            keep_through=keep_through,
            tokenizer=learner.policy.tokenizer,
            note=progress.note,
        )
        if checkpoint:
            tell_changes(log, config, folder, changes, progress)
        return log

    log = world.run_on_rank0(open_log)
    early_stop = EarlyStop(config)
    sync_probe = SyncProbe(dataset.train, config)
    for event in world.broadcast_from_rank0(lambda: read_log(folder / METRICS_FILE)):
        early_stop.replay(event)
        if "sync/gap" in event:
            sync_probe.remember(event["sync/gap"])
    in_background = BackgroundSaves(world, config.parallel.timeout) if config.run.async_save else None
    progress.start(done, config.run.steps)
    clock.lap()  # what a run is made of was loaded before its first step
    ended = early_stop.reason is not None
    owes = world.broadcast_from_rank0(lambda: is_new or _missed_evaluation(config, folder, done, ended))
    stop = StopRequest(progress.note, config.run.grace)
    ahead = sampled_ahead(sampler, config) if config.rollout.max_staleness else None
    waiting = world if ahead is None or world.is_single_process else world.new_group(ahead.longest_step)
    rollouts = Rollouts(world, config, engine, score, learner.policy.tokenizer, clock, stop, done, waiting)
    return Run(
        world=world,
        config=config,
        folder=folder,
        dataset=dataset,
        learner=learner,
        engine=engine,
        rollouts=rollouts,
        sampler=ahead or sampler,
        sync_probe=sync_probe,
        score=score,
        log=log,
        progress=progress,
        clock=clock,
        lock=place.lock,
        stop=stop,
        early_stop=early_stop,
        first_step=done,
        trained=done,
        saved=done,
        in_background=in_background,
        owes_evaluation=bool(dataset.heldout) and owes,
    )


def _drop_left_over(sampler: DynamicSampler, folder: Path, progress: Progress) -> None:
    """Of a fork: the groups that its source left over, where those were sampled or rewarded otherwise."""
    if changed := rewarded_otherwise(folder):
        n_left_over = len(sampler.buffer) + len(sampler.waiting)
        progress.note(f"{n_left_over} groups left over are dropped: {', '.join(changed)} is another now")
        sampler.buffer, sampler.waiting = [], []


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def take_up(checkpoint: Checkpoint, learner: Learner, sampler: Resumable, progress: Progress) -> list[Change]:
    """Put everything back as the checkpoint has it. Returns what is otherwise about the ranks. Collective."""
    saved_on, size = load_checkpoint(checkpoint, learner, sampler), learner.world.size
    if saved_on == size:
        return []
    progress.note(
        f"step {checkpoint.step} is of {saved_on} ranks: weights, optimizer and groups are the same on {size}, what "
        "follows has other roundings"
    )
    return [Change("ranks", saved_on, size)]


def tell_changes(log: RunLog, config: AnyConfig, folder: Path, changes: list[Change], progress: Progress) -> None:
    log.changes(changes)
    write_config(config, folder)  # behind the log: what a kill comes between is told twice, not never
    for change in changes:
        progress.note(f"from step {log.first_step + 1} on {change}")


def find_beginning(config: AnyConfig, folder: Path) -> tuple[Checkpoint | None, list[Change]]:
    """What a folder's run goes on from, and what is set otherwise than before. Raises ConfigError, CheckpointError."""
    changes = check_same_run(config, folder)
    checkpoint = checkpoint_to_resume(folder / CHECKPOINTS)
    if checkpoint is None:
        write_config(config, folder)
        if isinstance(config, Config) and config.run.from_ is not None:
            return start_fork(config, folder), []
    return checkpoint, changes


def _missed_evaluation(config: Config, folder: Path, step: int, ended: bool) -> bool:
    """Whether the evaluation after a step that was saved is not in the log: it failed."""
    logged = {event["step"] for event in read_log(folder / METRICS_FILE) if event["kind"] == "eval"}
    return (ended or step == config.run.steps or is_due(config.run.eval_every, step)) and step not in logged
