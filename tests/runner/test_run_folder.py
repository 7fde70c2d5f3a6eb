"""Files that stay whole, a run's folder, what may change in it, and runs that start from another one's checkpoint."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from builders import file_size_limit
from forks import CONTEXT
from golden_runs import result_of
from refusals import refused
from safetensors.torch import load_file, save_file
from small import AtPhase, Dapo, Notes, config_in, events_of, steps_of, write_recipe

from dapo_runner.checkpoint import CheckpointError, find_checkpoints
from dapo_runner.config import Config, ConfigError, dump_config, load_config
from dapo_runner.config.reading import CONFIG_FILE
from dapo_runner.files import append_jsonl, atomic_write, drop_incomplete_line, lock_file, read_jsonl, to_jsonl
from dapo_runner.logging.metrics import METRICS_FILE, before_and_after
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHANGES_FILE, CHECKPOINTS
from dapo_runner.logging.trackers import STATE_FILE
from dapo_runner.logging.versions import this_version
from dapo_runner.loop import train
from dapo_runner.parallel.world import World
from dapo_runner.run.folder import (
    LOCK_FILE,
    check_same_run,
    lock_folder,
    read_config,
    write_config,
)
from dapo_runner.run.fork import find_origin
from dapo_runner.run.start import open_run

Sections = dict[str, dict[str, Any]]
Fork = Callable[..., Config]
OLD_VERSION = "dapo-kernels 0.0.1, commit 0123456789ab"
LONG = {"steps": 6, "keep": 9}


def test_lines_round_trip_and_an_incomplete_one_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows, synced = tmp_path / "rows.jsonl", [{"a": 1}, {"b": "caf\ud800é"}], list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    append_jsonl(path, rows[:1])
    assert synced == []
    append_jsonl(path, rows[1:], sync=True)
    assert len(synced) == 1
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"c"')
    assert read_jsonl(path) == rows
    drop_incomplete_line(path)
    assert path.read_bytes() == whole
    with file_size_limit() as limit:  # a full disk
        limit(len(whole) + 9)
        with pytest.raises(OSError, match=r"rows\.jsonl"):
            append_jsonl(path, [{"b": "x" * 99}])
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"no\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3"):
        read_jsonl(path)


def test_a_replaced_file_is_on_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut may leave an empty file."""
    synced, path = list[tuple[int, bool]](), tmp_path / "config.yaml"
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_size, path.exists())))
    atomic_write(path, "text")
    assert synced == [(4, False)]


def test_a_lock_is_exclusive_until_it_is_closed(tmp_path: Path) -> None:
    with lock_file(tmp_path / "lock"), pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    lock_file(tmp_path / "lock").close()


def test_a_file_system_without_locks_gets_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    notes = list[str]()
    lock_folder(tmp_path / "run", notes.append).close()
    assert [str(tmp_path / "run" / LOCK_FILE) in note for note in notes] == [True]
    with pytest.raises(OSError, match="no locks"):
        lock_file(tmp_path / "lock")


def test_a_lock_file_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def forbidden(path: Path, mode: str = "r", **options: Any) -> Any:
        if path.name == LOCK_FILE:
            raise PermissionError(errno.EACCES, "denied", str(path))
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", forbidden)
    with refused("run.name", parts=[str(tmp_path / LOCK_FILE)]):
        lock_folder(tmp_path, pytest.fail)


def hold(folder: Path, pipe: Connection) -> None:
    lock = lock_folder(folder, print)
    child = os.fork()  # as the workers of a plug-in's multiprocessing.Pool
    if child:
        pipe.send(child)
    time.sleep(600)
    lock.close()


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """Another process that has the folder's lock and is killed in the end; a child of it lives on."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold, args=(folder, theirs))
    process.start()
    theirs.close()  # else nothing would end the wait for a process that has failed
    child = ours.recv()
    try:
        assert process.pid is not None
        yield process.pid
        process.kill()
        process.join()
        lock_folder(folder, print).close()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_second_process_in_a_runs_folder_may_only_read(start: Path, tmp_path: Path, dapo: Dapo) -> None:
    """It used to train beside the first: every step stood twice in the metrics, and both ended with 0."""
    recipe = write_recipe(tmp_path, start, steps=1)
    folder = train(load_config(recipe), Notes())
    before = (folder / "metrics.jsonl").read_bytes()
    with holder(folder) as pid:
        dapo.refuses(f"run.name: process {pid} on {socket.gethostname()}", "train", recipe, "run.steps=2")
        assert (folder / "metrics.jsonl").read_bytes() == before
        for command in (["eval", folder], ["show", folder], ["train", recipe, "--dry-run"]):
            dapo(*command)
        (folder / LOCK_FILE).write_text("")  # the owner has not written its name yet
        dapo.refuses("run.name", "train", recipe)
    for complete in (False, True):
        assert train(load_config(recipe, ["run.steps=2"]), notes := Notes()) == folder
        assert any("run.steps (sft: run.epochs)" in line for line in notes.lines) == complete


def test_an_attempt_that_failed_leaves_no_lock_and_does_not_bind_the_next(start: Path, tmp_path: Path) -> None:
    with refused("data.template"):  # of the tiny model's vocabulary
        train(config_in(tmp_path, data={"template": "What is {question}?"}), Notes())
    assert train(config_in(tmp_path, start, run={"steps": 1}), Notes()) == tmp_path / "small"


def test_a_folder_with_an_empty_log_holds_no_run(tmp_path: Path) -> None:
    folder, other = tmp_path / "small", config_in(tmp_path, algorithm="grpo")
    folder.mkdir()
    write_config(config_in(tmp_path), folder)
    (folder / METRICS_FILE).touch()
    (folder / STATE_FILE).touch()
    assert check_same_run(other, folder)
    assert (folder / STATE_FILE).exists()  # another process may be in its first step here
    check_same_run(other, folder, clears=True)
    assert not (folder / STATE_FILE).exists()
    checkpoint = folder / CHECKPOINTS / "step_000001"
    checkpoint.mkdir(parents=True)  # of a run that has lost its log
    with refused("run.name"):
        check_same_run(other, folder, clears=True)
    checkpoint.rmdir()
    (folder / METRICS_FILE).write_text("{}\n")
    with refused("run.name"):
        check_same_run(other, folder)


def test_a_config_of_another_version_is_refused_with_that_version(tmp_path: Path) -> None:
    """A mistake in an override, or in a file of this version, is not put down to a version."""
    path = tmp_path / CONFIG_FILE
    write_config(config_in(tmp_path), tmp_path)
    written, now = path.read_text(), this_version()
    assert written.count(now) == 1
    with refused("evaluation.k") as caught:
        read_config(tmp_path, Config, ["evaluation.k=none"])
    assert str(path) not in str(caught.value)
    for text in (written, written.replace(now, OLD_VERSION), written.partition("\n")[2]):  # the last has no such line
        path.write_text(f"{text}gone: 1\n")
        with refused("gone", parts=[str(path)]) as caught:
            read_config(tmp_path, Config)
        assert (OLD_VERSION in str(caught.value), now in str(caught.value)) == (OLD_VERSION in text, False)


@pytest.fixture(scope="module")
def source(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, each with a checkpoint."""
    return train(config_in(tmp_path_factory.mktemp("runs"), start, run=LONG), Notes())


@pytest.fixture
def fork(source: Path, start: Path, tmp_path: Path) -> Fork:
    """The configuration of a fork."""

    def config(step: int = 4, origin: Path = source, **sections: dict[str, Any]) -> Config:
        run = LONG | {"name": "fork", "from": f"{origin}@{step}"} | sections.pop("run", {})
        return config_in(tmp_path, start, run=run, **sections)

    return config


def copy_through(source: Path, folder: Path, step: int) -> Path:
    """The run as it was after ``step``."""
    run = Path(shutil.copytree(source, folder / source.name))
    for checkpoint in find_checkpoints(run / CHECKPOINTS):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    return run


def started_by(version: str, run: Path) -> None:
    """Write that another version of the package has started the run."""
    path = run / CONFIG_FILE
    path.write_text(path.read_text().replace(this_version(), version))


def steps_after(run: Path, step: int) -> list[dict[str, Any]]:
    return [event for event in events_of(run) if event["step"] > step]


def changes_of(run: Path) -> dict[str, tuple[Any, Any]]:
    return {event["key"]: (event["before"], event["after"]) for event in events_of(run, "change", CHANGES_FILE)}


def test_what_may_change_does_and_is_written_down_with_its_step(source: Path, start: Path, tmp_path: Path) -> None:
    run = copy_through(source, tmp_path, 2)
    started_by(OLD_VERSION, run)
    sections: Sections = {"optimizer": {"lr": 1e-4}, "rollout": {"max_batch_sequences": 8}}
    changed = config_in(tmp_path, start, run={"steps": 3, "keep": 9, "eval_every": 1}, **sections)
    for n_new in (1, 0):  # the second time nothing is new
        assert train(changed, notes := Notes()) == run
        assert sum("step 3 " in line and "optimizer.lr: " in line for line in notes.lines) == n_new
        assert sum("step 3 " in line and OLD_VERSION in line for line in notes.lines) == n_new
        assert sum("steps 3 to 6 are removed" in line for line in notes.lines) == n_new
        assert {event["step"] for event in read_jsonl(run / CHANGES_FILE)} == {2}
        assert changes_of(run) == {
            "optimizer.lr": (1e-3, 1e-4),
            "rollout.max_batch_sequences": (256, 8),
            "run.eval_every": (2, 1),
            "run.output_dir": (str(source.parent), str(tmp_path)),
            "run.steps": (6, 3),
            "version": (OLD_VERSION, this_version()),
        }
    assert steps_of(run, "train/lr") == [5e-4, 1e-3, 1e-4]
    assert load_config(run / "config.yaml").optimizer.lr == 1e-4
    atomic_write(run / METRICS_FILE, to_jsonl(event for event in read_jsonl(run / METRICS_FILE) if event["step"] < 3))
    train(changed, notes := Notes())
    assert sum("ends at step 2: " in line for line in notes.lines) == 1
    (run / "config.yaml").write_text("")
    with refused("model", parts=["config.yaml"]):
        train(changed, Notes())


@pytest.mark.parametrize(
    ("sections", "change"),
    [
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature: 1.0 → 0.7"),
        ({"optimizer": {"weight_decay": 0.5, "lr": 1e-5}}, ": optimizer.weight_decay: 0.1 → 0.5. "),
        ({"sampler": {"curriculum": {"rest": 2}}}, "sampler.curriculum.rest: None → "),
    ],
)
def test_anything_else_is_refused(sections: Sections, change: str, source: Path, start: Path, tmp_path: Path) -> None:
    """A fork is advised only where there is a checkpoint."""
    copy_through(source, tmp_path, 0)
    for folder, advice in ((source.parent, f"run.from={source}@"), (tmp_path, "run.name")):
        with refused("run.name", parts=[change, advice]) as caught:
            train(config_in(folder, start, **sections), Notes())
    assert "run.from" not in str(caught.value)


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}])
def test_a_reference_or_a_base_with_other_weights_is_refused(lora: dict[str, Any], start: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(start, tmp_path / "model"))

    def config(steps: int) -> Config:
        loss = {"overrides": {"kl_coef": 0.1}} if not lora else {}
        return config_in(tmp_path, model, run={"steps": steps}, loss=loss, model={"path": str(model), **lora})

    train(config(1), Notes())
    (weights,) = model.glob("*.safetensors")
    before = load_file(weights)
    save_file({name: tensor * 1.01 for name, tensor in before.items()}, weights, {"format": "pt"})
    with refused("model.path", parts=[str(model)]):
        train(config(2), Notes())
    save_file(before, weights, {"format": "pt"})
    save_file(before, weights.with_name("consolidated.safetensors"))  # which transformers does not load
    values = (model / "config.json").read_text()
    (model / "config.json").write_text(values.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    fork = config(2).run.model_copy(update={"name": "fork", "from_": f"{config(1).run_dir}@1"})
    for changed in (config(2), config(2).model_copy(update={"run": fork})):
        with refused("model.path", parts=["frozen_models.json"]):
            train(changed, Notes())
    (model / "config.json").write_text(values)
    assert len(steps_of(train(config(2), Notes()), "train/loss")) == 2
    if not lora:  # a fork may name another reference
        other = shutil.copytree(start, tmp_path / "other")
        loss, run = {"overrides": {"kl_coef": 0.1}, "reference": str(other)}, fork.model_dump(by_alias=True)
        train(config_in(tmp_path, model, run=run, loss=loss), Notes())


def test_a_fork_goes_on_as_its_run_did(source: Path, fork: Fork, tmp_path: Path) -> None:
    """Also when what it came from is gone, and it is stopped and started again."""
    origin = copy_through(source, tmp_path / "source", 6)
    run = train(fork(origin=origin, run={"steps": 5}), Notes())
    assert run == tmp_path / "fork"
    shutil.rmtree(origin)
    assert train(fork(origin=origin), Notes()) == run
    assert steps_after(run, 4) == steps_after(source, 4)
    assert all(result_of(run)[part] == result_of(source)[part] for part in ("weights", "optimizer"))
    assert list(before_and_after(run)) == ["before (step 4)", "after (step 6)"]  # where it starts from
    assert [event["kind"] for event in read_jsonl(run / "timings.jsonl")] == ["start", "step", "step"]
    first, *changes = read_jsonl(run / CHANGES_FILE)
    assert first == {"step": 4, "kind": "fork", "from": str(origin / CHECKPOINTS / "step_000004")}
    assert [event["key"] for event in changes] == ["run.steps", "run.steps"]


def test_a_fork_of_a_read_only_run_has_the_modes_of_new_files(source: Path, fork: Fork, tmp_path: Path) -> None:
    """Else a killed copy could not be removed, and the fork could not start again."""
    origin = copy_through(source, tmp_path / "source", 6)
    (origin / "model").mkdir()
    (origin / "model" / "weights").touch()
    found = [origin, *origin.rglob("*")]
    for path in found:
        path.chmod(path.stat().st_mode & ~0o222)
    run = train(fork(origin=origin, run={"steps": 5}), Notes())
    for path in found:
        path.chmod(path.stat().st_mode | 0o200)
    assert [path for path in run.rglob("*") if not path.stat().st_mode & 0o200] == []
    assert (run / "model" / "weights").is_file()


def test_a_fork_has_the_settings_at_its_checkpoint(source: Path, start: Path, fork: Fork, tmp_path: Path) -> None:
    """Not with those that its run went on with. The version is logged like a setting."""
    run = copy_through(source, tmp_path, 4)
    started_by(OLD_VERSION, run)
    for lr, steps in ((1e-4, 5), (1e-5, 6)):
        train(config_in(tmp_path, start, run=LONG | {"steps": steps}, optimizer={"lr": lr}), Notes())
    changed: Sections = {"optimizer": {"lr": 1e-5}, "loss": {"overrides": {"clip_high": 0.3}}}
    changed |= {"rollout": {"temperature": 0.9}}
    set_in_fork = {"loss.overrides.clip_high": (None, 0.3), "rollout.temperature": (1.0, 0.9)}
    upgrade = {"version": (OLD_VERSION, this_version())}
    for step, before, others in ((4, 1e-3, upgrade), (5, 1e-4, {"run.steps": (5, 6)})):
        other = train(fork(step, run, run={"name": f"at{step}"}, **changed), Notes())
        assert changes_of(other) == {"optimizer.lr": (before, 1e-5), **set_in_fork, **others}
        assert [event["train/lr"] for event in steps_after(other, 0)] == [1e-5] * (6 - step)
        with open_run(fork(step, run, run={"name": f"at{step}"}, **changed), Notes()) as resumed:  # its own groups
            assert len(resumed.sampler.buffer.groups) == steps_of(other, "sampling/carried_out")[-1] > 0


def test_a_fork_that_saved_nothing_begins_again(source: Path, fork: Fork, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    config = fork(run={"save_every": 0})
    with pytest.raises(KeyboardInterrupt):
        train(config, AtPhase("optimizer", 7, interrupt))  # in an update of its second step
    assert steps_after(tmp_path / "fork", 4)
    run = train(config, Notes())
    assert steps_after(run, 4) == steps_after(source, 4)
    assert [event["step"] for event in events_of(run, "eval")] == [4, 6]
    assert list(changes_of(run)) == ["run.save_every"]


def test_a_fork_that_never_began_does_not_bind_the_next(source: Path, fork: Fork, tmp_path: Path) -> None:
    long: Sections = {"rollout": {"max_response_tokens": 99}, "optimizer": {"token_budget": 128}}
    with refused("rollout.max_response_tokens"):  # more than the model has positions for
        train(fork(5, **long), Notes())
    assert find_checkpoints(tmp_path / "fork" / CHECKPOINTS)
    assert steps_after(train(fork(3), Notes()), 3) == steps_after(source, 3)


@pytest.mark.parametrize(
    ("sections", "key", "part"),
    [
        ({"run": {"from": "small"}}, "run.from", "RUN@STEP"),
        ({"run": {"from": "nowhere@3"}}, "run.from", "config.yaml"),
        ({"run": {"from": "SOURCE@9"}}, "run.from", "1, 2, 3, 4, 5, 6"),
        ({"run": {"steps": 4}}, "run.steps", "run.from"),
        ({"run": {"seed": 7}}, "run.from", "run.seed: 0 → 7"),
        ({"advantage": {"kind": "gae"}, "critic": {"warmup_steps": 4}}, "critic.warmup_steps", "4 steps of run.from"),
        ({"data": {"template": "{question} ="}}, "run.from", "step_000004/model"),
        ({"model": {"dtype": "bfloat16"}}, "run.from", "model.dtype"),
    ],
)
def test_what_cannot_be_forked_is_refused(sections: Sections, key: str, part: str, source: Path, fork: Fork) -> None:
    if "from" in sections.get("run", {}):
        sections = {"run": {"from": sections["run"]["from"].replace("SOURCE", str(source))}}
    with refused(key, parts=[part]):
        train(fork(**sections), Notes())


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_a_fork_may_add_a_critic(warmup_steps: int, fork: Fork) -> None:
    config = fork(advantage={"kind": "gae"}, critic={"warmup_steps": warmup_steps})
    assert "critic.warmup_steps" in {change.key for change in find_origin(config)[1]}


MOVING: Sections = {"loss": {"reference_ema": 0.9, "overrides": {"kl_coef": 0.1}}}
CRITIC: Sections = {"advantage": {"kind": "gae"}, "critic": {"clip": 0.2}}


@pytest.mark.parametrize(
    ("key", "origin", "another", "free"),
    [
        (
            "loss.reference",
            MOVING,
            {"reference": "another"},
            {"loss": MOVING["loss"] | {"reference": "another", "reference_ema": None}},
        ),
        ("critic.path", CRITIC, {"path": "another"}, {}),
    ],
)
def test_a_model_that_the_checkpoint_holds_cannot_be_another(
    key: str, origin: Sections, another: Any, free: Any, source: Path, start: Path, fork: Fork, tmp_path: Path
) -> None:
    """It was read over the one named, without a word. A fork without it may name what it likes."""
    run, (section, _, _) = copy_through(source, tmp_path, 4), key.partition(".")
    (run / "config.yaml").write_text(dump_config(config_in(tmp_path, start, run=LONG, **origin)))
    with refused("run.from", parts=[f"{key}: "]):
        find_origin(fork(origin=run, **origin | {section: origin[section] | another}))
    assert find_origin(fork(origin=run, **free))


def test_many_prompts_are_left_out_of_collections(fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_runner.run.start.MANY_PROMPTS", 1)
    n_frozen = gc.get_freeze_count()
    with open_run(fork(), Notes()):
        assert gc.get_freeze_count() > n_frozen


def test_a_damaged_checkpoint_is_not_forked(source: Path, fork: Fork, tmp_path: Path) -> None:
    origin = copy_through(source, tmp_path / "source", 6)
    (spoiled,) = (origin / CHECKPOINTS / "step_000004" / "optimizer").iterdir()
    spoiled.write_bytes(spoiled.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=rf"step_000004 .*optimizer/{spoiled.name}"):
        train(fork(origin=origin), Notes())
    assert not list((tmp_path / "fork" / CHECKPOINTS).glob("step_*"))


def test_a_dry_run_checks_a_fork(source: Path, start: Path, tmp_path: Path, dapo: Dapo) -> None:
    command = ["train", write_recipe(tmp_path, start, **LONG), f"run.from={source}@5", "--dry-run"]
    dapo(*command)
    assert not (tmp_path / "runs").exists()
    dapo(*command, "run.seed=3", code=2)


SAMPLING = {"stop": ["9"], "max_response_tokens": 12, "temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.1}


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"optimizer": {"lr": 1e-4}}, set()),
        ({"rollout": SAMPLING}, {f"rollout.{name}" for name in SAMPLING}),
        ({"rollout": {"top_k": 5, "sampling_mask": True}}, {"rollout.top_k", "rollout.sampling_mask"}),
        ({"reward": {"correct": 2.0}}, {"reward.correct"}),
        ({"sampler": {"filter_groups": "reward"}}, {"sampler.filter_groups"}),
        ({"advantage": {"segments": {"kind": "tree", "per_step": 2}}}, {"advantage.segments.kind"}),
    ],
)
def test_left_over_groups_of_a_fork(change: Sections, keys: set[str], source: Path, fork: Fork) -> None:
    """They were sampled and rewarded with the old settings: a step would mix two."""
    step, n = next((event["step"], n) for event in events_of(source) if (n := event["sampling/carried_out"]))
    for _ in range(2):  # again where the first attempt got no further
        with open_run(fork(step, **change), notes := Notes()) as run:
            assert len(run.sampler.buffer.groups) == (0 if keys else n)
            assert run.sampler.buffer.waiting == []
        assert f"forked after step {step} from {source}@{step}" in notes.lines
        assert all(any(line.startswith(f"{key}: ") for line in notes.lines) for key in keys)
        words = [set(line.replace(",", "").split()) for line in notes.lines if line.startswith(f"{n} ")]
        assert any("dropped" in each and keys <= each for each in words) == bool(keys)


def test_machines_with_another_command_do_not_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write_recipe(tmp_path))
    monkeypatch.setattr(World, "all_gather_object", lambda world, item: [item, item.replace("lr: ", "lr: 1")])
    with pytest.raises(ConfigError, match="the same command"), open_run(config, Progress()):
        pass
