"""Whatever ends a run after a step was trained, the step is saved first, and the run goes on as if nothing had
happened: an error in any phase, Ctrl-C, SIGTERM, an engine that is out of sync.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
import torch
from fake_server import UPDATE, FakeServer
from safetensors.torch import load_file
from small import AtPhase, Notes, config_in, events_of, steps_of

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.checkpoint import CheckpointError, find_checkpoints
from dapo_runner.config import Config, ConfigError
from dapo_runner.files import read_jsonl
from dapo_runner.interrupt import ONE_STOP, StepAbandonedError, StopRequest
from dapo_runner.logging import metrics
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.progress import RunConsole
from dapo_runner.logging.run_log import CHANGES_FILE, CHECKPOINTS
from dapo_runner.loop import train
from dapo_runner.rollout.group_buffer import SamplingExhaustedError
from dapo_runner.rollout.probe import OutOfSyncError
from dapo_runner.threads import in_thread

Ending = tuple[str, int, list[signal.Signals], int | None]  # phase, the how-manieth, signals, the step that is saved
CALLS = list[int]()


class LostError(Exception):
    """A server, a tracker or a disk is gone."""


def send(*signals: signal.Signals) -> None:
    """Send this process signals; without one, fail."""
    for number in signals:
        os.kill(os.getpid(), number)
    if not signals:
        raise LostError


def rare(folder: Path, start: Path, **sections: Any) -> Config:
    """Four steps, each of one round and two updates; the only checkpoint after the last of them."""
    run, sampler = {"save_every": 0} | sections.pop("run", {}), {"filter_groups": None} | sections.pop("sampler", {})
    return config_in(folder, start, run=run, sampler=sampler, **sections)


def saved_steps(folder: Path) -> list[int]:
    return [found.step for found in find_checkpoints(folder / "small" / CHECKPOINTS)]


def without_sync(run: Path) -> list[dict[str, Any]]:
    """The probe behind the last step before an error is not logged."""
    events = read_jsonl(run / "metrics.jsonl")
    return [{key: value for key, value in event.items() if not key.startswith("sync/")} for event in events]


@pytest.fixture(scope="module")
def whole(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(rare(tmp_path_factory.mktemp("whole"), start), Notes())


@pytest.mark.parametrize(
    "ending",
    [
        ("sync", 6, [], 2),  # three in a step, the last one sends the weights
        ("evaluate", 2, [], 2),
        ("rollout", 3, [], 2),
        ("optimizer", 9, [], 2),  # four in a step: the norm and AdamW of two updates
        ("probe", 4, 2 * [SIGINT], 3),
        ("pack", 5, 2 * [SIGINT], 2),  # two in a step
        ("optimizer", 7, 2 * [SIGINT], None),
        ("log", 2, 2 * [SIGINT], 2),
        ("forward_backward", 3, [SIGINT], 2),  # once: the step is finished
        ("rollout", 3, [SIGTERM], 3),
        ("optimizer", 7, 3 * [SIGTERM], 2),  # from torchrun and its parent
    ],
)
def test_a_run_that_ends_in_any_phase_goes_on(ending: Ending, whole: Path, start: Path, tmp_path: Path) -> None:
    phase, call, signals, saved = ending
    handlers = [signal.getsignal(number) for number in (SIGINT, SIGTERM)]
    notes = AtPhase(phase, call, lambda: send(*signals))
    with pytest.raises(KeyboardInterrupt if signals else LostError):
        train(rare(tmp_path, start), notes)
    assert [signal.getsignal(number) for number in (SIGINT, SIGTERM)] == handlers
    assert saved_steps(tmp_path) == ([] if saved is None else [saved])
    assert f"step {saved or 0}" in notes.lines[-1]  # the last one that is saved
    if saved is not None:
        assert [event["step"] for event in events_of(tmp_path / "small")] == list(range(1, saved + 1))
    if signals == [SIGINT]:  # a stop waits for no evaluation
        assert [event["step"] for event in events_of(tmp_path / "small", "eval")] == [0]
    run = train(rare(tmp_path, start), Notes())
    assert without_sync(run) == without_sync(whole)


@pytest.mark.parametrize(
    ("error", "is_written", "times", "saved"),
    [
        (KeyboardInterrupt, False, 1, [2]),
        (KeyboardInterrupt, True, 1, [2]),
        (OSError, False, 1, [2]),
        (OSError, False, 2, []),  # the disk is still full: the step is trained again
    ],
)
def test_a_saved_step_has_one_line(
    error: type[BaseException],
    is_written: bool,
    times: int,
    saved: list[int],
    whole: Path,
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append, failures = metrics.append_jsonl, iter(range(times))

    def fail(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
        fails = path.name == METRICS_FILE and (rows[0]["step"], rows[0]["kind"]) == (2, "step")
        fails = fails and next(failures, None) is not None
        if is_written or not fails:
            append(path, rows, **options)
        if fails:
            raise error

    monkeypatch.setattr(metrics, "append_jsonl", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
        train(rare(tmp_path, start), Notes())
    assert saved_steps(tmp_path) == saved
    again = train(rare(tmp_path, start), Notes())
    assert (again / METRICS_FILE).read_bytes() == (whole / METRICS_FILE).read_bytes()


def noisy(prompts: Any, completions: list[Any], rows: Any) -> list[float]:
    """A reward that draws from a generator of the run."""
    return [float(len(one.text) % 2) + random.random() for one in completions]


def test_an_evaluation_changes_no_later_step(start: Path, tmp_path: Path) -> None:
    def config(name: str) -> Config:
        return rare(tmp_path, start, run={"name": name, "save_every": 2}, reward={"kind": "test_failures:noisy"})

    whole = train(config("whole"), Notes())
    with pytest.raises(KeyboardInterrupt):
        train(config("lost"), AtPhase("rollout", 2, lambda: send(SIGINT)))  # saved without the evaluation
    for phase in ("rollout", "save"):  # the first time right after the evaluation, which no checkpoint is behind
        with pytest.raises(LostError):
            train(config("lost"), AtPhase(phase, 1, send))
    again = train(config("lost"), Notes())
    assert (again / METRICS_FILE).read_bytes() == (whole / METRICS_FILE).read_bytes()


def test_an_error_in_an_update_names_the_last_checkpoint(start: Path, tmp_path: Path) -> None:
    with pytest.raises(LostError):
        train(rare(tmp_path, start, run={"save_every": 2}), notes := AtPhase("optimizer", 15, send))
    assert saved_steps(tmp_path) == [2]
    assert "step 2" in notes.lines[-1]


@pytest.mark.parametrize(
    "ending",
    [
        ("sync", 9, [], 3),
        ("probe", 4, 2 * [SIGINT], 3),
        ("pack", 5, [], 2),
        ("wait", 3, 2 * [SIGINT], 2),
    ],
)
def test_nothing_sampled_is_lost(ending: Ending, tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    """Groups that were taken and not trained on wait for the next start."""
    phase, call, signals, saved = ending
    ahead = {"max_staleness": 1, "correction": {"weights": "token"}}
    config = on_servers(tmp_path, model_folder, servers, sampler={"max_age": 2}, rollout=ahead)
    with pytest.raises(KeyboardInterrupt if signals else LostError):
        train(config, AtPhase(phase, call, lambda: send(*signals)))
    assert saved_steps(tmp_path) == [saved]
    steps = events_of(train(config, notes := Notes()))
    assert [(step["step"], step["batch/groups"]) for step in steps[-4:]] == [(n, 4) for n in (1, 2, 3, 4)]
    (left_over,) = (int(line.split()[0]) for line in notes.lines if line[0].isdigit())
    assert left_over >= 4 * (saved == 2)


def on_servers(folder: Path, model: Path, servers: list[FakeServer], **sections: Any) -> Config:
    named = {"urls": [server.url for server in servers], "folder": str(folder)}
    rollout = {"engine": "server", "server": named, "max_response_tokens": 6} | sections.pop("rollout", {})
    return rare(folder, model, rollout=rollout, **sections)


def test_an_engine_out_of_sync_is_found_out(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    """By the probe at once, with the step saved; without it by the rollout gap of the steps that follow."""
    for server in servers:
        server.hooks[UPDATE] = lambda body: (200, {})
    fast = {"lr": 5e-3, "warmup_steps": 0}
    with pytest.raises(OutOfSyncError):
        train(on_servers(tmp_path, model_folder, servers, optimizer=fast), Notes())
    assert saved_steps(tmp_path) == [1]
    unprobed = {"probe": False}
    run = train(on_servers(tmp_path / "unprobed", model_folder, servers, optimizer=fast, rollout=unprobed), Notes())
    first, *_, last = events_of(run)
    assert first["train/rollout_gap"] < 1e-3
    assert last["train/rollout_gap"] > 1e-2
    assert "sync/gap" not in first


def test_a_mismatch_above_the_limit_warns(tmp_path: Path, start: Path) -> None:
    """float32 rounds differently when it decodes, so its KL is not 0."""
    notes, limit = Notes(), {"max_mismatch_kl": 1e-30}
    kl = steps_of(train(rare(tmp_path / "warned", start, rollout=limit), notes), "train/rollout_k3")
    above = sum(value > 1e-30 for value in kl)
    assert above == sum("rollout.max_mismatch_kl" in line for line in notes.lines) > 0


def constant(prompts: Any, completions: list[Any], rows: Any) -> list[float]:
    return [0.1] * len(completions)


@pytest.mark.parametrize(
    ("kind", "pairs"), [("integer", {}), ("test_failures:constant", {}), ("test_failures:constant", {"preference": {}})]
)
def test_a_first_step_without_a_gradient_is_noted_once(
    kind: str, pairs: dict[str, Any], tmp_path: Path, start: Path
) -> None:
    """Without a length penalty, equal rewards leave advantages of exactly 0, and no pairs."""
    reward = {"kind": kind, "overlong": {"soft_punishment": False}}
    run = train(rare(tmp_path, start, run={"steps": 2}, reward=reward, **pairs), notes := Notes())
    norms = steps_of(run, "train/updates" if pairs else "train/grad_norm")
    assert (norms == [0, 0]) == (kind != "integer")
    assert sum("train/grad_norm" in line for line in notes.lines) == (norms[0] == 0)


@pytest.mark.parametrize(("phase", "call", "evaluated"), [("rollout", 3, [0, 2]), ("evaluate", 2, [0])])
def test_what_would_end_too_late_is_abandoned(
    phase: str, call: int, evaluated: list[int], whole: Path, tmp_path: Path, start: Path
) -> None:
    """The signal is first answered with a promise to save the step; another line takes it back."""
    late, notes = rare(tmp_path, start, run={"grace": 1e-9}), AtPhase(phase, call, lambda: send(SIGTERM))
    with pytest.raises(StepAbandonedError) as caught:
        train(late, notes)
    assert saved_steps(tmp_path) == [2]
    assert [event["step"] for event in events_of(tmp_path / "small", "eval")] == evaluated
    (abandoned,) = [line for line in notes.lines if str(caught.value) in line]
    assert "step 2 " in abandoned
    assert [line for line in notes.lines if "step 2 " in line and line != abandoned]  # it is saved
    assert without_sync(train(late, Notes())) == without_sync(whole)


def flaky(prompts: Any, completions: list[Any], rows: Any) -> list[float]:
    """A reward that fails in its first call, and that is terminated in step 2 and catches what it can."""
    CALLS.append(0)
    if len(CALLS) == 1:
        raise LostError("no reward today")
    with suppress(Exception):
        if len(CALLS) == 7:
            send(SIGTERM)
    return [float(len(one.text) % 2) for one in completions]


class Unreachable:
    """A game that sometimes has no server."""

    def reset(self, row: Any) -> None:
        CALLS.append(0)
        if len(CALLS) > 1:
            raise LostError("no server today")

    def step(self, text: str) -> tuple[None, float, bool]:
        return None, 1.0, True


def test_a_reward_that_fails_is_warned_of_and_none_can_catch_the_end_of_its_step(tmp_path: Path, start: Path) -> None:
    CALLS.clear()
    reward = {"kind": "test_failures:flaky", "calls": {"retries": 0, "max_failed": 0.5}}
    late = rare(tmp_path, start, run={"grace": 1e-9, "eval_every": 0}, data={"eval_size": 0}, reward=reward)
    with pytest.raises(StepAbandonedError):
        train(late, notes := Notes())
    assert saved_steps(tmp_path) == [1]
    assert [line for line in notes.lines if "no reward today" in line]


def test_a_step_that_lacks_groups_tells_which_rewards_failed(tmp_path: Path, start: Path) -> None:
    CALLS.clear()
    reward = {"kind": "test_failures:flaky", "calls": {"retries": 0, "max_failed": 0.5}}
    sampler, run = {"max_rounds": 1, "on_exhausted": "error"}, {"eval_every": 0}
    with pytest.raises(SamplingExhaustedError):
        train(rare(tmp_path, start, run=run, data={"eval_size": 0}, reward=reward, sampler=sampler), notes := Notes())
    assert [line[:6] for line in notes.lines if "no reward today" in line] == ["1 of 4"]


def test_a_step_that_lacks_groups_tells_why_episodes_failed(tmp_path: Path, start: Path) -> None:
    CALLS.clear()
    env = {"kind": "test_failures:Unreachable", "max_failed": 0.99}
    sampler, run = {"max_rounds": 1, "on_exhausted": "error"}, {"eval_every": 0}
    with pytest.raises(SamplingExhaustedError):
        train(rare(tmp_path, start, run=run, data={"eval_size": 0}, env=env, sampler=sampler), notes := Notes())
    assert [line for line in notes.lines if "no server today" in line]


def test_a_complete_checkpoint_is_written_once(tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, and a second one while the old checkpoint is removed."""
    rmtree, written = shutil.rmtree, []

    def interrupted(path: Path, **options: Any) -> None:
        if path.name == "step_000001.unfinished" and not written:
            written.append(path.with_name("step_000002").stat().st_mtime_ns)
            send(SIGINT, SIGINT)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(rare(tmp_path, start, run={"save_every": 1, "keep": 1}), Notes())
    (newest,) = find_checkpoints(tmp_path / "small" / CHECKPOINTS)
    assert [newest.path.stat().st_mtime_ns] == written


def test_a_failed_background_save_is_made_up_for(tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, failed = os.fsync, []

    def fail_once(file: int) -> None:
        if not failed and threading.current_thread() is not threading.main_thread():
            failed.append(file)
            raise OSError(errno.ENOSPC, "no space left")
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(LostError):
        train(rare(tmp_path, start, run={"async_save": True, "save_every": 2}), AtPhase("sync", 9, send))
    assert failed
    assert saved_steps(tmp_path) == [3]


def test_a_stop_is_reported_when_its_step_is_saved(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is written in the background, which takes a while here."""
    fsync, saved = os.fsync, list[list[int]]()

    def late(file: int) -> None:
        time.sleep(0.1 * (threading.current_thread() is not threading.main_thread()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", late)
    notes = AtPhase("forward_backward", 3, lambda: send(SIGINT))
    monkeypatch.setattr(notes, "note", lambda text: saved.append(saved_steps(tmp_path)))
    with pytest.raises(KeyboardInterrupt):
        train(rare(tmp_path, start, run={"async_save": True}), notes)
    assert saved[-1] == [2]  # when the last line was printed


def test_a_start_that_fails_releases_the_servers(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    config = on_servers(tmp_path, model_folder, servers)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / METRICS_FILE).write_text("no line of JSON\n")
    with pytest.raises(ConfigError):
        train(config, Notes())
    assert all(server.seen("/dapo/release") == 1 for server in servers)


def test_only_sigterm_abandons_a_step_and_only_where_it_may() -> None:
    for number, grace in ((SIGINT, 1e-9), (SIGTERM, 1e6)):
        with StopRequest(grace=grace) as stop:
            stop.expect_step(1000.0)
            with stop.abandoning():
                send(number)
            assert stop.requested
    with StopRequest(grace=1e-9) as stop:
        stop.expect_step(1000.0)
        with suppress(ValueError), stop.abandoning():
            raise ValueError
        send(SIGTERM)
        assert stop.is_late
        with pytest.raises(StepAbandonedError), stop.abandoning():
            pass


def test_a_bare_except_does_not_keep_a_step_that_is_abandoned() -> None:
    with StopRequest(grace=1e-9) as stop:
        stop.expect_step(1000.0)
        with pytest.raises(StepAbandonedError), stop.abandoning(), suppress(BaseException):
            send(SIGTERM)


@pytest.mark.parametrize("call", [lambda work: work(), lambda work: in_thread(work).result()])
def test_a_process_that_a_reward_forks_ends_at_sigterm_and_goes_on_after_ctrl_c(call: Callable[..., Any]) -> None:
    def exit_codes() -> list[int | None]:
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        sleep = fork.Process(target=lambda: (begun.set(), time.sleep(60)))
        children = [sleep, fork.Process(target=partial(send, SIGINT))]
        for child in children:
            child.start()
        assert begun.wait(20)
        sleep.terminate()
        for child in children:
            child.join(20)
            child.kill()
        return [child.exitcode for child in children]

    with StopRequest() as stop:
        assert call(exit_codes) == [-SIGTERM, 0]
    assert not stop.requested
    assert call(exit_codes)[0] == -SIGTERM


def test_a_signal_during_a_write_to_a_full_pipe_is_a_request() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1024))
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as full, StopRequest(lambda text: print(text, file=full, flush=True)) as stop:

        def interrupt() -> None:
            time.sleep(0.2)  # the main thread is in `print` by then
            send(SIGINT)
            while os.read(reading, 1 << 16):
                pass

        read = in_thread(interrupt)
        print("step 1", file=full, flush=True)
        assert stop.requested
    read.result()
    os.close(reading)


def test_a_step_is_finished_though_ctrl_c_ends_the_reader_of_the_output_too() -> None:
    """`dapo train | tee log`: both get the signal."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed, redirect_stdout(closed):  # rich opens /dev/null in place of stdout
        with StopRequest(RunConsole(file=closed).print) as stop:
            send(SIGINT)
        assert stop.requested


def test_sigterm_from_two_senders_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd sends it to torchrun, which passes it on, and to its ranks. Ctrl-C and a later one count."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for number, seconds in ((SIGINT, 0.0), (SIGTERM, ONE_STOP)):
        with StopRequest() as stop:
            send(SIGTERM, SIGTERM, SIGTERM)
            assert stop.requested
            now += seconds
            with pytest.raises(KeyboardInterrupt):
                send(number)


def test_weights_that_are_not_finite_are_not_saved(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update of a step can leave them behind, with a finite loss and gradient."""

    def break_weights(learner: Learner) -> None:
        next(learner.policy.model.parameters()).detach().fill_(torch.inf)

    train(rare(tmp_path, start, run={"steps": 2, "keep": 1}), Notes())
    monkeypatch.setattr(Learner, "move_reference", break_weights)  # after the updates
    with pytest.raises(OutOfSyncError):
        train(rare(tmp_path, start, run={"keep": 1}), notes := Notes())
    assert saved_steps(tmp_path) == [2]
    assert re.search("step 3 .*weights are not finite.*step_000002", notes.lines[-1])


def test_a_nonfinite_update_is_kept(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error advises a lower optimizer.lr; the same folder used to refuse it."""
    updated, update = list[MiniBatch](), Learner.update

    def update_of_broken_weights(learner: Learner, mini: MiniBatch, step: int) -> dict[str, float]:
        updated.append(mini)
        next(learner.policy.model.parameters()).detach().fill_(float("nan"))
        return update(learner, mini, step)

    warm = {"warmup_steps": 0}
    train(rare(tmp_path, start, run={"steps": 2}, optimizer=warm), Notes())
    monkeypatch.setattr(Learner, "update", update_of_broken_weights)
    with pytest.raises(NonFiniteUpdateError, match=r"optimizer\.lr") as caught:
        train(rare(tmp_path, start, optimizer=warm), Notes())
    monkeypatch.setattr(Learner, "update", update)
    (kept,) = (tmp_path / "small" / "nonfinite").iterdir()
    assert str(kept.parent) in str(caught.value)
    assert kept.stat().st_mode == (kept.parents[1] / "metrics.jsonl").stat().st_mode
    stored, batches = load_file(kept), updated[-1].micro_batches
    wanted = {f"{n}.{name}": tensor for n, batch in enumerate(batches) for name, tensor in batch.tensors().items()}
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in stored.items())
    assert saved_steps(tmp_path) == [2]
    run = train(rare(tmp_path, start, optimizer=warm | {"lr": 1e-4}), Notes())
    assert steps_of(run, "train/lr") == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])
    assert (2, "optimizer.lr") in [(event["step"], event["key"]) for event in read_jsonl(run / CHANGES_FILE)]
