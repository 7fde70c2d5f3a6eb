"""Start a run, or resume it from its last checkpoint."""

from __future__ import annotations

import gc
import random
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import BackgroundSaves, keeping_generators, load_checkpoint
from dapo_runner.checkpoint.files import Checkpoint, checkpoint_to_resume, prune
from dapo_runner.config import Config, cautions
from dapo_runner.data.curriculum import make_curriculum
from dapo_runner.data.dataset import Dataset, PromptCursor, load_data, render, uses_chat_template
from dapo_runner.engines.engine import Note, engine_class
from dapo_runner.environments.template import CUT, TEMPLATE_ERRORS, special_ids
from dapo_runner.files import read_jsonl
from dapo_runner.interrupt import StopRequest
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog, log_changes
from dapo_runner.logging.trackers import Trackers
from dapo_runner.policy.lengths import check_lengths
from dapo_runner.policy.model import load_policy, load_tokenizer
from dapo_runner.preflight.dry_run import describe_algorithm
from dapo_runner.rewards.scoring import Scorer, unmatchable_answers
from dapo_runner.rollout.asynchronous import AsynchronousSampler
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.rollout.worker import RolloutWorker
from dapo_runner.run.context import RunContext, open_context
from dapo_runner.run.early_stop import EarlyStop
from dapo_runner.run.folder import TINY_MODEL, AnyConfig, Change, check_same_run, write_config
from dapo_runner.run.fork import drop_incompatible_groups, start_fork
from dapo_runner.run.frozen import check_frozen
from dapo_runner.run.steps import Run
from dapo_runner.run.training import is_due
from dapo_runner.tiny_model import ensure_tiny_model

MANY_PROMPTS = 100_000


class StartPoint(NamedTuple):
    """What a run starts from, and which settings differ from those in its folder.

    ``is_new``: no step was trained in the folder yet. A new run has a checkpoint only if it is a fork.
    """

    checkpoint: Checkpoint | None
    changes: list[Change]
    is_new: bool

    @property
    def last_completed_step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def keep_log_through(self) -> int:
        """The last step whose log lines are kept. Without a checkpoint, lines of an earlier attempt are removed."""
        return self.last_completed_step - self.is_new

    def owes_evaluation(self, config: Config, ended_early: bool = False) -> bool:
        """Return whether to evaluate before the first step: at a start, or if a due evaluation is not in the log."""
        step = self.last_completed_step
        logged = {event["step"] for event in read_jsonl(config.run_dir / METRICS_FILE) if event["kind"] == "eval"}
        is_last = ended_early or step == config.run.steps
        return step not in logged and (self.is_new or is_last or is_due(config.run.eval_every, step))


def open_run(config: Config, progress: Progress) -> Run:
    """Build the components of a run and load its last checkpoint, if any. Locks the folder until the run closes."""
    context = open_context(config, progress)
    with context.closed_on_error():
        for part, choice in describe_algorithm(config).items():
            context.progress.note(f"{part}: {choice}")
        run = _open_run(config, context)
        note_unstopped_end(config, run.worker.tokenizer, run.worker.engine.stop_ids, context.progress.note)
        return run


def note_unstopped_end(config: Config, tokenizer: Any, stop_ids: list[int], note: Note) -> None:
    """Note a special token that the chat template puts behind an answer, if no response ends there."""
    turns, options = [("user", "A text."), ("assistant", CUT)], config.data.chat_template_kwargs
    chat = uses_chat_template(tokenizer, config.data)
    with suppress(*TEMPLATE_ERRORS):  # some templates require other roles
        end = render(turns, tokenizer, chat, **options, add_generation_prompt=False).rpartition(CUT)[2].strip()
        ids = tokenizer(end, add_special_tokens=False)["input_ids"]
        ending = list(takewhile(special_ids(tokenizer).__contains__, ids))
        text = tokenizer.decode(ending)
        if ending and not {*ending} & {*stop_ids} and not any(stop in text for stop in config.rollout.stop):
            note(
                f"the chat template writes {text} behind an answer, which ends no response. Add it to rollout.stop, or "
                "to eos_token_id in the model's generation_config.json"
            )


def _open_run(config: Config, context: RunContext) -> Run:
    world, note, device = context.world, context.progress.note, context.device
    start = world.broadcast_from_rank0(lambda: find_start(config, config.run_dir))
    kind = engine_class(config)
    saved = None if kind.takes_adapters(config) else start.checkpoint
    source = world.broadcast_from_rank0(lambda: saved.model if saved else initial_model(config, context.progress))
    dataset = build_dataset(config, source, context)
    learner = build_learner(config, start.checkpoint, context)
    curriculum = make_curriculum(config.sampler, dataset.train)
    cursor = PromptCursor(dataset.train, config.run.seed, dataset.heldout, curriculum)
    sampler = DynamicSampler(cursor, GroupBuffer(config), context.progress.round)
    engine = world.run_or_raise_everywhere(lambda: kind.load(source, config, device, world, note))
    context.opened.callback(engine.close)
    # Nothing below draws a random number: a resumed run must see the same numbers as an uninterrupted one.
    start = load_start(start, learner, sampler, context)
    if engine.takes_adapters(config):
        engine.sync(learner.policy)
    if start.is_new and start.checkpoint:
        drop_incompatible_groups(sampler, config.run_dir, note)
    score = Scorer(config)
    if score.judge is not None:
        score.judge.known.open(config.run_dir, world.rank, world.size)
    stop = StopRequest(note, config.run.grace)
    tokenizer = learner.policy.tokenizer
    episodes = world.run_or_raise_everywhere(lambda: EpisodeRunner(config, tokenizer) if config.env else None)
    worker = RolloutWorker(engine, score, tokenizer, config.tree, episodes, world, context.clock, stop)
    log = open_log(config, start, context, tokenizer)
    early_stop, probe = _replay_log(config, SyncProbe(dataset.train, config), context)
    owed = world.broadcast_from_rank0(lambda: start.owes_evaluation(config, early_stop.reason is not None))
    return Run(
        context=context,
        config=config,
        dataset=dataset,
        learner=learner,
        worker=worker,
        sampler=AsynchronousSampler(sampler, config) if config.rollout.max_staleness else sampler,
        sync_probe=probe,
        log=log,
        stop=stop,
        early_stop=early_stop,
        background_saves=BackgroundSaves(world, config.parallel.timeout) if config.run.async_save else None,
        last_completed_step=start.last_completed_step,
        owes_evaluation=bool(dataset.heldout) and owed,
    )


def initial_model(config: Config, progress: Progress) -> str | Path:
    """Return the path or name of a new run's policy. Make the tiny model if the configuration asks for it."""
    if config.model.path is not None:
        return config.model.path
    return ensure_tiny_model(config, config.run_dir / TINY_MODEL, progress.note)


def build_dataset(config: Config, source: str | Path, context: RunContext) -> Dataset:
    """Load the prompts, tokenized for the model ``source``, and note cautions about them. Raises ConfigError."""
    world, note = context.world, context.progress.note
    dataset = world.run_or_raise_everywhere(lambda: load_data(config, load_tokenizer(source, config.model)))
    world.run_or_raise_everywhere(lambda: check_lengths(config, source, dataset.train + dataset.heldout, download=True))
    note(f"data: {dataset.report.describe()}")
    if len(dataset.train) >= MANY_PROMPTS:  # a full collection would take seconds to go through them
        gc.collect()
        gc.freeze()
    for caution in cautions(config):
        note(caution)
    if (unmatchable := unmatchable_answers(config, dataset.train, dataset.heldout)) is not None:
        note(unmatchable)
    return dataset


def build_learner(config: Config, checkpoint: Checkpoint | None, context: RunContext) -> Learner:
    """Load the policy, the reference and the critic that the configuration needs, and make the optimizers.

    With LoRA the base model is loaded, not that of the checkpoint, into which the adapters are merged.
    """
    world, device, progress = context.world, context.device, context.progress
    start = world.broadcast_from_rank0(lambda: initial_model(config, progress))
    source = start if checkpoint is None or config.model.lora is not None else checkpoint.model
    replay, seed = bool(config.loss.routing_replay), config.run.seed
    policy = load_policy(source, config.model, device, seed, world, replay)
    reference = critic = None
    if config.loads_reference:
        reference = load_policy(config.reference_path or start, config.model, device, world=world, role="reference")
    if config.critic is not None:
        critic = load_policy(config.critic.path or start, config.model, device, world=world, role="critic")
    world.run_on_rank0(lambda: check_frozen(config, Path(start), is_resumed=checkpoint is not None))
    return Learner(policy, config, reference, critic, context.clock)


def find_start(config: AnyConfig, folder: Path) -> StartPoint:
    """Find the checkpoint that a folder's run resumes from. Raises ConfigError, CheckpointError."""
    changes = check_same_run(config, folder, clears=True)
    checkpoint = checkpoint_to_resume(folder / CHECKPOINTS)
    prune(folder / CHECKPOINTS)  # unfinished ones; whole ones stay, also with a smaller run.keep
    forked_at = config.run.forked_at if isinstance(config, Config) else 0
    if checkpoint is None:
        write_config(config, folder)
        if isinstance(config, Config) and config.run.from_ is not None:
            checkpoint, changes = start_fork(config, folder), []
    return StartPoint(checkpoint, changes, checkpoint is None or checkpoint.step == forked_at)


def load_start(start: StartPoint, learner: Learner, sampler: Stateful, context: RunContext) -> StartPoint:
    """Seed the random generators and load the checkpoint, if any. Return ``start`` with its changes. Collective."""
    seed = learner.config.run.seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if start.checkpoint is None:
        return start
    note, size = context.progress.note, context.world.size
    saved_size = load_checkpoint(start.checkpoint, learner, sampler)
    verb, origin = ("forked", learner.config.run.from_) if start.is_new else ("resuming", start.checkpoint.path)
    note(f"{verb} after step {start.checkpoint.step} from {origin}")
    if isinstance(sampler, DynamicSampler):
        n_groups = len(sampler.buffer.groups) + len(sampler.buffer.waiting)
        note(f"{n_groups} groups are left over, {sampler.in_flight} prompts in flight are submitted again")
    if saved_size == size:
        return start
    note(f"ranks: {saved_size} → {size}. Weights, optimizer and groups are the same, rounding differs from here on")
    return start._replace(changes=[*start.changes, Change("ranks", saved_size, size)])


def open_log(config: AnyConfig, start: StartPoint, context: RunContext, tokenizer: object = None) -> RunLog | None:
    """Open the trackers and the log of a run on rank 0 and log which settings have changed."""

    def open_here() -> RunLog:
        done, kept, note = start.last_completed_step, start.keep_log_through, context.progress.note
        with keeping_generators():  # a tracker may draw random numbers
            trackers = Trackers(config, kept + 1, note, is_resumed=not start.is_new)
        log = RunLog(config, trackers, first_step=done, keep_through=kept, tokenizer=tokenizer)
        if (last := log.metrics.found_through) > done:
            note(f"the logs of steps {done + 1} to {last} are removed: no checkpoint has these steps")
        elif last < done and not start.is_new:
            note(f"{METRICS_FILE} ends at step {last}: it lacks the steps to {done}")
        if start.checkpoint is not None:
            log_changes(config.run_dir, done, start.changes)
            write_config(config, config.run_dir)  # after the log: a kill in between logs a change twice, loses none
            for change in start.changes:
                note(f"from step {done + 1} on {change}")
        return log

    return context.world.run_on_rank0(open_here)


def _replay_log(config: Config, probe: SyncProbe, context: RunContext) -> tuple[EarlyStop, SyncProbe]:
    early_stop = EarlyStop(config)
    for event in context.world.broadcast_from_rank0(lambda: read_jsonl(config.run_dir / METRICS_FILE)):
        early_stop.replay(event)
        if "sync/gap" in event:
            probe.remember(event["sync/gap"])
    return early_stop, probe
