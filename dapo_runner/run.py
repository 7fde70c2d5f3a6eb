"""What a run is made of: built, or put back as its last checkpoint left it; and whether it is the same run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from dapo_runner.checkpoint import (
    BackgroundSaves,
    Checkpoint,
    Resumable,
    checkpoint_to_resume,
    load_checkpoint,
    moment,
    save_checkpoint,
)
from dapo_runner.config import Config, cautions
from dapo_runner.early_stop import EarlyStop
from dapo_runner.evaluate import evaluate
from dapo_runner.folder import TINY_MODEL, AnyConfig, Change, FolderLock, check_same_run, lock_folder, write_config
from dapo_runner.fork import rewarded_otherwise, start_fork
from dapo_runner.interrupt import StepGivenUpError, StopRequest
from dapo_runner.parallel.rollouts import answer, complete
from dapo_runner.parallel.world import ALONE, World, open_world
from dapo_runner.policy.model import (
    load_critic,
    load_model,
    load_policy,
    load_reference,
    load_tokenizer,
    resolve_device,
)
from dapo_runner.preflight.algorithm import algorithm
from dapo_runner.preflight.needs import check_needs
from dapo_runner.records.metrics import METRICS_FILE, batch_metrics, prefixed, read_log, sampling_metrics
from dapo_runner.records.postmortem import save_batch
from dapo_runner.records.progress import Progress, SilentProgress
from dapo_runner.records.run_log import CHECKPOINTS, RunLog
from dapo_runner.records.speed import peak_flops, peak_memory, speed_figures, training_flops
from dapo_runner.records.trackers import open_trackers
from dapo_runner.rewards.scoring import ScoreGroups, Scorer, never_right
from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.segments import GenerateEach, grow_trees, joined, value_chains
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.sampling.ahead import AheadSampler
from dapo_runner.sampling.curriculum import make_curriculum
from dapo_runner.sampling.data import Dataset, PromptCursor, load_data
from dapo_runner.sampling.sampler import DynamicSampler, SampledStep
from dapo_runner.tasks.tiny import ensure_tiny_model
from dapo_runner.timing import OTHER, StepClock
from dapo_runner.types import Completion, Group, Prompt, SamplingParams, Sequence
from dapo_runner.update.advantage import make_sequences
from dapo_runner.update.learner import Learner, MiniBatch, NonFiniteUpdateError, resolve_objective, uses_reference
from dapo_runner.update.learners import make_learner
from dapo_runner.update.pairs import pair_figures, pair_sequences
from dapo_runner.update.segments import segment_figures, tree_segments

T = TypeVar("T")

NONFINITE = "nonfinite"


@dataclass
class Run:
    """A run under way: what the loop works with, and where it writes. Every rank has one; rank 0 writes."""

    world: World
    config: Config
    folder: Path
    dataset: Dataset
    learner: Learner
    engine: RolloutEngine
    sampler: DynamicSampler | AheadSampler
    sync_probe: SyncProbe
    score: Scorer
    log: RunLog | None  # on rank 0 alone, as the lock
    progress: Progress
    clock: StepClock
    lock: FolderLock | None
    stop: StopRequest
    early_stop: EarlyStop
    first_step: int  # the last one behind it
    saved: int  # the last one that is safe on the disk
    in_background: BackgroundSaves | None  # with run.async_save
    owes_evaluation: bool  # of the policy it begins with, or because that failed
    stopping: bool = False  # after the step under way
    last_step_took: float = 0.0  # seconds
    speed: dict[str, float] = field(default_factory=dict)  # of the step under way, once it has trained

    def __enter__(self) -> Run:
        self.stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.__exit__(kind, error, trace)
        if error is None:
            self.finish_saving()
        elif isinstance(error, Exception):
            try:
                self.finish_saving()
            except Exception as failure:  # what stopped the run is what is raised
                self.progress.note(f"what was being saved is lost: {failure}")
        if isinstance(self.sampler, AheadSampler) and isinstance(self.engine, ServerEngine):
            self.engine.close()
            self.sampler.close()
        self.progress.close()
        for held in (self.score, self.log, self.lock):
            if held is not None:
                held.close()

        self.world.leave(error)

    def is_last(self, step: int) -> bool:
        return step == self.config.run.steps or self.early_stop.reason is not None

    def asked_to_stop(self) -> bool:
        """Whether a signal has come, on any rank."""
        self.stopping = self.world.any(self.stop.requested)
        return self.stopping

    def sample(self, step: int) -> SampledStep:
        """The groups of a step. Where that fails, the steps before it are saved: as they were before it began, or with
        what was sampled ahead since.
        """
        self.stop.step_takes(self.last_step_took)
        if isinstance(self.sampler, AheadSampler):
            with self.saving_first(step - 1, partial(moment, self.sampler)), self.timed("wait"), self.stop.giving_up():
                return self.sampler.next(self.generate_ahead)
        before = moment(self.sampler)
        with self.saving_first(step - 1, lambda: before):
            sampled = self.sampler.next(self.generate_groups)
            return sampled if self.config.advantage.segments is None else self.value_segments(sampled, step)

    @contextmanager
    def saving_first(self, step: int, then: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """An engine or a reward function that fails takes no step with it that was done before: ``step`` is saved,
        with what ``then`` says as the moment to go on from.
        """
        try:
            yield
        except Exception:
            try:
                self.finish_saving()
                if step > self.saved:
                    self.save(step, then())
                    self.finish_saving()
                    self.progress.note(f"step {step} is saved; what follows stopped the run after it")
            except Exception as error:  # what stopped the run is what is raised
                self.progress.note(f"step {step} could not be saved: {error}")
            raise

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return self.clock.phase(phase)

    def generate_groups(self, prompts: list[Prompt], round_number: int) -> list[Group]:
        """In the order of the prompts, less those that a reward failed on and was allowed to."""
        with self.timed(OTHER if self.world.alone else "wait"):
            self.give_up_if_late()
            sampling = rollout_sampling(self.config, round_number)
            return self.answer(prompts, sampling, self.score, self.rollout_phase, self.respond)

    def generate_ahead(self, prompts: list[Prompt], round_number: int) -> list[Group]:
        """The same beside the training, in threads of an ``AheadSampler``: clock and signals are the other's. Of two
        rounds under way the earlier goes before.
        """
        sampling = replace(rollout_sampling(self.config, round_number), priority=round_number)
        groups = self.answer(prompts, sampling, self.score)
        return [replace(group, step=self.first_step + group.oldest_version) for group in groups]

    def give_up_if_late(self) -> None:
        """Before an engine is asked. Raises StepGivenUpError."""
        if self.world.any(self.stop.late):
            raise StepGivenUpError("this step would not end before the process is killed")

    def respond(self, prompts: SequenceOf[Prompt], each: SequenceOf[SamplingParams]) -> list[list[Completion]]:
        """Responses to this rank's share of the prompts of a step."""
        tree = self.config.tree
        if tree is None:
            return self.engine.generate(prompts, each)
        return grow_trees(self.engine.generate, self.learner.policy.tokenizer, prompts, each, tree)

    def value_segments(self, sampled: SampledStep, step: int) -> SampledStep:
        """The groups of a step with the segments of their responses: `advantage.segments`."""
        advantage, groups, continued = self.config.advantage, sampled.groups, 0
        assert advantage.segments is not None
        assert isinstance(self.sampler, DynamicSampler)
        if advantage.segments.kind == "tree":
            groups = [tree_segments(group, advantage.segments, advantage.eps) for group in groups]
            counts = {"tokens": sampled.stats.generated, **segment_figures(groups)}
            if advantage.segments.per_step is not None:
                groups, of_waiting = self.sampler.spread(groups, advantage.segments.per_step)
                counts |= of_waiting
        else:
            with self.timed("segments" if self.world.alone else "wait"):
                self.give_up_if_late()
                sampling = rollout_sampling(self.config, f"segments:{step}")
                groups, counts = value_chains(groups, advantage.segments, sampling, self.answer_continued)
            continued = int(counts["tokens"])
            counts |= segment_figures(groups)
        return replace(sampled, groups=groups, segments=counts, continued=continued)

    def answer_continued(self, prefixes: SequenceOf[Prompt], each: list[SamplingParams]) -> list[Group]:
        """Scored groups of whole responses that begin with the prefixes."""
        tokenizer = self.learner.policy.tokenizer

        def score(share: SequenceOf[Prompt], continuations: SequenceOf[SequenceOf[Completion]]) -> list[Group]:
            pairs = zip(share, continuations, strict=True)
            return self.score(share, [[joined(prefix, end, tokenizer) for end in ends] for prefix, ends in pairs])

        return self.answer(prefixes, each, score, lambda _: self.rollout_phase("segments"))

    @contextmanager
    def rollout_phase(self, name: str) -> Iterator[None]:
        """Given up in its midst only by an engine of one rank: in a larger one the others would wait for it."""
        alone = self.world.layout.rollout_tensor == 1
        with self.timed(name), self.stop.giving_up() if alone else nullcontext():
            yield

    def answer(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | list[SamplingParams],
        score: ScoreGroups,
        timed: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        respond: GenerateEach | None = None,
    ) -> list[Group]:
        """A scored group for each prompt that was answered; the ranks' engines share them, and of the ranks of an
        engine one scores. ``respond`` is by default the engine's ``generate``.
        """

        def work(share: list[Prompt], each: list[SamplingParams]) -> list[Group]:
            with timed("rollout"):
                completions = (respond or self.engine.generate)(share, each)
            if not self.world.leads_engine:
                return []
            answered = [(prompt, found) for prompt, found in zip(share, completions, strict=True) if found]
            with timed("score"):
                return score([prompt for prompt, _ in answered], [found for _, found in answered])

        return answer(self.world, prompts, sampling, work)

    def release_engine(self) -> None:
        """The policy is about to train and wants the memory."""
        with self.timed("sync"):
            self.engine.release()
            if not self.config.rollout.ahead:
                self.score.release()

    def training_records(self, groups: list[Group], step: int) -> list[Sequence]:
        """Of every sample of a step, in order."""
        with self.timed("pack"):
            if self.config.preference is not None:
                return pair_sequences(groups, self.config.preference, step)
            return make_sequences(groups, self.config.advantage, step)

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """One update; where its loss or gradient is not finite, the batch is kept."""
        try:
            return self.learner.update(mini, step - 1)
        except NonFiniteUpdateError as error:
            rank = "" if self.world.alone else f"_rank_{self.world.rank}"
            path = self.folder / NONFINITE / f"step_{step:06d}{rank}.safetensors"
            save_batch(path, mini.micro_batches, str(error))
            where = path if self.world.alone else f"{path.parent}/step_{step:06d}_rank_*, of each rank its own"
            raise NonFiniteUpdateError(f"{error}. The batch is in {where}", mini) from error

    def sync(self) -> dict[str, float]:
        """Hand the policy's weights to what follows it, and see that the engine took them. Raises OutOfSyncError."""
        with self.timed("sync"):
            self.learner.follow()
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
            self.speed = speed_of(self.learner, self.clock, sequences)
            self.world.first(lambda: self._log_step(step, sampled, sequences, trained, in_sync))
        self.early_stop.count(step, sampled.generated)

    def _log_step(
        self,
        step: int,
        sampled: SampledStep,
        sequences: list[Sequence],
        trained: dict[str, float],
        in_sync: dict[str, float],
    ) -> None:
        assert self.log is not None
        figures = (
            sampling_metrics(sampled.stats, self.config.sampler.filter_on, self.config.sampler.oversample > 1)
            | {"sampling/tokens": sampled.generated}
            | batch_metrics(sampled.groups, step)
            | prefixed("segments", sampled.segments)
            | prefixed("train", trained | pair_figures(sampled.groups, self.config.preference))
            | prefixed("sync", in_sync)
        )
        if isinstance(self.sampler, AheadSampler):
            figures |= prefixed("ahead", self.sampler.figures(sampled.groups))
        news = self.log.step(step, figures, sampled.groups, sequences, self.learner.token_values)
        self.progress.step(step, figures, self.clock.so_far(), self.speed)
        for note in (news, sampled.shortfall, sampled.caution):
            if note is not None:
                self.progress.note(note)

    def save(self, step: int, then: dict[str, Any] | None = None) -> None:
        """With run.async_save the checkpoint is only on its way when this returns, unless it is the last."""
        with self.timed("save"):
            folder, keep = self.folder / CHECKPOINTS, self.config.run.keep
            if self.in_background is None:
                save_checkpoint(folder, step, self.learner, self.sampler, keep, then)
                self.saved = step
                return
            self.finish_saving()
            self.in_background.start(folder, step, self.learner, self.sampler, keep, then)
            if self.stopping or step == self.config.run.steps:
                self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is on its way. Raises CheckpointError where it could not be written."""
        done = self.in_background.finish() if self.in_background is not None else None
        if done is not None:
            self.saved = done.step

    def end_step(self, step: int) -> None:
        """After all of a step, its evaluation and its checkpoint included: where its time went. A kill before it loses
        no more than that line.
        """
        seconds = self.clock.lap()
        self.last_step_took = sum(seconds.values())
        counts = self.world.gather(self.score.counts())
        calls = {name: sum(part[name] for part in counts) for name in counts[0]}
        self.world.first(lambda: self._log_seconds(step, seconds, calls))
        self.speed = {}

    def _log_seconds(self, step: int, seconds: dict[str, float], calls: dict[str, int]) -> None:
        assert self.log is not None
        self.log.seconds(step, seconds, self.speed, calls)

    def _log_evaluation(self, step: int, metrics: dict[str, float], groups: list[Group]) -> str | None:
        assert self.log is not None
        return self.log.evaluation(step, metrics, groups)

    def evaluate(self, step: int) -> None:
        if not self.dataset.heldout:
            return
        before = moment(self.sampler)
        with self.saving_first(step, lambda: before), self.timed("evaluate"):
            unshaped = Scorer(self.config, shaped=False)

            def answer_all(prompts: SequenceOf[Prompt], sampling: SamplingParams) -> list[Group]:
                return complete(self.world, self.answer(prompts, sampling, unshaped))

            result = evaluate(answer_all, self.dataset.heldout, self.config)
            # Rank 0 decides what the answers amount to: a comparison of two may run into its deadline.
            metrics = self.world.first(lambda: result.metrics)
            news = self.world.first(lambda: self._log_evaluation(step, prefixed("eval", metrics), result.groups))
        self.early_stop.observe(step, prefixed("eval", metrics))
        self.progress.evaluation(step, metrics)
        if news is not None:
            self.progress.note(news)


def rollout_sampling(config: Config, round_name: int | str) -> SamplingParams:
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
        seed=random.Random(f"{config.run.seed}:{round_name}").getrandbits(31),
        sampling_mask=rollout.sampling_mask,
        needed=1 / config.sampler.oversample,
    )


def speed_of(learner: Learner, clock: StepClock, sequences: list[Sequence]) -> dict[str, float]:
    """Of the step under way, once it has trained on ``sequences``. Collective."""
    policy = learner.policy
    lengths = [sequence.length - 1 for sequence in sequences if sequence.mask[1:].any()]  # the rest is not packed
    flops, peak = training_flops(policy.model, lengths), peak_flops(policy.device)
    memory = max(learner.world.gather(peak_memory(policy.device)))
    figures = speed_figures(flops, sum(lengths), clock.so_far(), learner.world.size, peak)
    return figures | {"memory_gib": memory}


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
    world.together(lambda: check_needs(config, world.layout))
    device = world.device or resolve_device(config.run.device)
    shown = progress if world.is_main else SilentProgress()
    lock = world.on_first(lambda: lock_folder(config.run_dir, shown.note))

    def on_phase(name: str) -> None:
        shown.phase(name)
        if world.watch is not None:
            world.watch.at(name)

    try:
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        return build(Place(world, device, shown, StepClock(device, on_phase), lock))
    except BaseException as error:
        if lock is not None:
            lock.close()
        world.leave(error)
        raise


def _open_run(config: Config, place: Place) -> Run:
    world, device, progress, clock = place.world, place.device, place.progress, place.clock
    folder = config.run_dir
    for part, choice in algorithm(config).items():
        progress.note(f"{part}: {choice}")
    checkpoint, changes = world.first(lambda: find_beginning(config, folder))
    done = checkpoint.step if checkpoint else 0
    is_new = done == config.run.forked_at
    keep_through = done - 1 if is_new else done
    source = checkpoint.model if checkpoint else world.first(lambda: initial_model(config, folder, progress))
    dataset = world.together(lambda: load_data(config, load_tokenizer(source, config.model)))
    for note in (f"data: {dataset.report.describe()}", *cautions(config), never_right(config.reward, dataset.train)):
        if note is not None:
            progress.note(note)

    learner = open_learner(config, folder, checkpoint, device, progress, clock, world)
    curriculum = make_curriculum(config.sampler.curriculum, dataset.train)
    cursor = PromptCursor(dataset.train, config.run.seed, dataset.heldout, curriculum)
    fetch = list if world.alone else partial(complete, world)
    sampler = DynamicSampler(cursor, config.sampler, progress.round, fetch)
    engine = world.together(lambda: open_engine(config, source, device, world, progress.note))
    trackers = world.on_first(lambda: open_trackers(config, folder, keep_through + 1)) or []
    # Nothing that draws a random number comes after this: a resumed run must see the numbers the first one saw.
    seed_generators(config.run.seed)
    if checkpoint:
        changes += take_up(checkpoint, learner, sampler, progress)
        if is_new and (changed := rewarded_otherwise(folder)):
            n_left_over = len(sampler.buffer) + len(sampler.waiting)
            progress.note(f"{n_left_over} groups left over are dropped: {', '.join(changed)} is another now")
            sampler.buffer, sampler.waiting = [], []
        progress.note(f"resuming after step {done} from {checkpoint.path}")
        if config.rollout.ahead:
            progress.note(
                f"{len(sampler.buffer)} groups that were sampled and had not trained are there, {sampler.in_flight} "
                "prompts that were in flight are asked again"
            )
    # The clock is that of the thread that trains, beside which an `AheadSampler` has answers scored.
    score = Scorer(config, timed=None if config.rollout.ahead else clock.phase, note=progress.note)
    if score.judge is not None:
        score.judge.known.keep(folder, world.rank, world.size)

    def open_log() -> RunLog:
        tokenizer = learner.policy.tokenizer
        log = RunLog(folder, config.logging, trackers, first_step=done, keep_through=keep_through, tokenizer=tokenizer)
        if checkpoint:
            tell_changes(log, config, folder, changes, progress)
        return log

    log = world.on_first(open_log)
    early_stop = EarlyStop(config)
    for event in world.first(lambda: read_log(folder / METRICS_FILE)):
        early_stop.replay(event)
    in_background = None
    if config.run.async_save and world.alone:
        progress.note(
            "run.async_save: one process that torchrun did not start writes its checkpoints before it goes on"
        )
    elif config.run.async_save:
        in_background = BackgroundSaves(world, config.parallel.timeout)
    progress.start(done, config.run.steps)
    clock.lap()  # what a run is made of was loaded before its first step
    ended = early_stop.reason is not None
    owes = world.first(lambda: is_new or _missed_evaluation(config, folder, done, ended))
    return Run(
        world=world,
        config=config,
        folder=folder,
        dataset=dataset,
        learner=learner,
        engine=engine,
        sampler=sampled_ahead(sampler, config) if config.rollout.ahead else sampler,
        sync_probe=SyncProbe(dataset.train, config),
        score=score,
        log=log,
        progress=progress,
        clock=clock,
        lock=place.lock,
        stop=StopRequest(progress.note, config.run.grace),
        early_stop=early_stop,
        first_step=done,
        saved=done,
        in_background=in_background,
        owes_evaluation=bool(dataset.heldout) and owes,
    )


def sampled_ahead(sampler: DynamicSampler, config: Config) -> AheadSampler:
    rollout = config.rollout
    rounds = 2 if rollout.partial else 1
    return AheadSampler(sampler, rollout.ahead, config.run.steps, rollout.server.round_within, rounds)


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


def is_due(every: int, step: int) -> bool:
    """Whether what is done ``every`` so many steps comes after this one."""
    return every > 0 and step % every == 0


def _missed_evaluation(config: Config, folder: Path, step: int, ended: bool) -> bool:
    """Whether the evaluation after a step that was saved is not in the log: it failed."""
    logged = {event["step"] for event in read_log(folder / METRICS_FILE) if event["kind"] == "eval"}
    return (ended or step == config.run.steps or is_due(config.run.eval_every, step)) and step not in logged


def open_learner(
    config: Config,
    folder: Path,
    checkpoint: Checkpoint | None,
    device: torch.device,
    progress: Progress,
    clock: StepClock,
    world: World,
) -> Learner:
    """The policy, where the loss or the reward has a reference that one, where there are values the critic, and the
    optimizers.

    Adapters are put on the model that training started from: what a checkpoint holds has them merged in.
    """
    start = world.first(lambda: initial_model(config, folder, progress))
    source = start if checkpoint is None or config.model.lora is not None else checkpoint.model
    shared = config.critic is not None and config.critic.share_trunk
    replay, seed = config.loss.routing_replay, config.run.seed
    policy = load_policy(source, config.model, device, seed, world, replay, "both" if shared else "tokens")
    own_reference = config.model.lora is not None and config.loss.reference is None
    reference, critic = None, policy if shared else None
    if uses_reference(config) and not own_reference:
        reference = load_reference(config.loss.reference or start, config.model, device, world)
    if config.critic is not None and not shared:
        critic = load_critic(config.critic.path or start, config.model, device, world)
    return make_learner(policy, config, reference, clock, critic)


def initial_model(config: Config, folder: Path, progress: Progress) -> str | Path:
    """Where the policy starts from."""
    if config.model.path is not None:
        return config.model.path
    return ensure_tiny_model(config, folder / TINY_MODEL, progress.note)


def open_engine(
    config: Config,
    source: str | Path,
    device: torch.device,
    world: World = ALONE,
    note: Callable[[str], None] = lambda _: None,
) -> RolloutEngine:
    """A rollout engine with weights of its own, loaded from ``source``. ``note`` is told what befalls its servers."""
    tokenizer = load_tokenizer(source, config.model)
    if config.rollout.engine == "server":
        return ServerEngine(source, tokenizer, config, world, note)
    if config.rollout.engine == "vllm":
        return VLLMEngine(source, tokenizer, config, device, world)
    model = load_model(source, config.model, device, "sdpa")
    return HFEngine(model, tokenizer, config.rollout.max_batch_sequences)
