"""Runs over servers that come and go, return stale, answer late, or are lost."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from fake_server import GENERATE, UPDATE, Answer
from served import Fleet
from small import events_of

from dapo_runner.config import Config, parse
from dapo_runner.engines.client import RolloutError
from dapo_runner.logging.progress import Progress
from dapo_runner.loop import train
from dapo_runner.rollout.probe import N_PROMPTS, OutOfSyncError


def losing(fleet: Fleet, ahead: int, n: int, **run: Any) -> dict[str, Any]:
    raw = fleet.recipe(ahead, n, **run)
    raw["optimizer"] |= {"lr": 1e-2}
    raw["sampler"] |= {"max_age": ahead + 1} if ahead else {}
    raw["rollout"]["server"] |= {"sync_timeout": 1.5}
    return raw


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_comes_back_stale_in_the_midst_of_a_step_trains_nothing(ahead: int, model_fleet: Fleet) -> None:
    """It reports the weights of now, and has those that it started with. The other server holds the prompts it has, and
    takes no more, until this one has answered some of the step. The run has no other end.
    """
    fleet, n_probed, works_again = model_fleet, itertools.count(1), threading.Event()

    def is_training(body: dict[str, Any]) -> bool:
        return body["sampling_params"]["n"] > 1

    def come_back_stale(body: dict[str, Any]) -> None:
        if not is_training(body) and next(n_probed) == 2 * N_PROMPTS + 1:  # in the probe after the second step
            fleet[1].kill()
            fleet[1].hooks[UPDATE] = lambda body: (200, {})
            fleet[1].hooks[GENERATE] = lambda body: works_again.set() if is_training(body) else None
            fleet[1].start()
            killed.set()
        if is_training(body) and killed.is_set():
            works_again.wait(120)

    fleet[0].hooks[GENERATE], killed = come_back_stale, threading.Event()
    raw = losing(fleet, ahead, 2, steps=10**6, save_every=0)
    raw["rollout"]["max_batch_sequences"] = raw["rollout"]["group_size"]  # a server has two prompts of four at a time
    raw["rollout"]["server"]["sync_timeout"] = 120
    with pytest.raises(OutOfSyncError, match=fleet[1].url):
        train(parse(raw, Config), Progress())
    assert works_again.is_set()
    assert ahead or all(event["train/rollout_gap"] < 1e-4 for event in events_of(fleet.folder / "small"))


@pytest.mark.parametrize("fails", ["killed", "probe"])
def test_losing_the_servers_loses_no_step(fails: str, model_fleet: Fleet) -> None:
    """Of an asynchronous run that has not saved yet, whatever of its only server fails after the fourth sync. Once the
    server is back, the run resumes.
    """
    fleet, server, count = model_fleet, model_fleet[0], itertools.count()

    def fail(body: dict[str, Any]) -> Answer | None:
        if next(count) < 5:
            return None
        if fails == "killed":
            server.kill()
        return 200, {}  # without having loaded the weights

    server.hooks["/resume" if fails == "killed" else UPDATE] = fail
    with pytest.raises(OutOfSyncError if fails == "probe" else RolloutError):
        train(parse(losing(fleet, 1, 1, steps=60, save_every=100), Config), Progress())
    folder = fleet.folder / "small"
    steps = [event["step"] for event in events_of(folder)]
    assert steps[-1] >= 4
    assert (folder / "checkpoints" / f"step_{steps[-1]:06d}").exists()
    if fails != "killed":
        return
    server.hooks.clear()
    server.start()
    resumed = events_of(train(parse(losing(fleet, 1, 1, steps=steps[-1] + 2, save_every=100), Config), Progress()))
    assert [step["step"] for step in resumed] == list(range(1, steps[-1] + 3))
    for step in resumed:
        assert step["batch/age_max"] <= 2
        assert 0 < step["train/rollout_ess"] <= 1
        assert step.get("sync/gap", 0) < 1e-4  # the step that failed has none
        assert step["train/tokens"] > 0
    assert max(step["batch/age_max"] for step in resumed) > 0
