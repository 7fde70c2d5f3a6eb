"""Weights that go to servers by NCCL, with files in its place: who waits for whom, and what a failure leaves."""

from __future__ import annotations

import importlib.util
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config
from fake_nccl import ABORTED, MEET, MET, UPDATE, FileGroup, appears, join
from fake_server import FakeServer
from served import PROMPTS, SAMPLING, Fleet, moved, server_config, told

from dapo_runner.commands.serve import server_arguments
from dapo_runner.config import ConfigError
from dapo_runner.http import run
from dapo_runner.parallel.world import Layout, World
from dapo_runner.policy.model import Policy
from dapo_runner.preflight.memory import SENT, ModelShape, memory_estimate, model_shape
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rollout import nccl
from dapo_runner.rollout.client import RolloutError, ServerError
from dapo_runner.rollout.guard import CLAIM
from dapo_runner.rollout.server import ServerEngine


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are."""
    monkeypatch.setattr(nccl, "Group", FileGroup)
    monkeypatch.setattr(nccl, "make_unique_id", lambda: secrets.token_hex(64).encode())
    monkeypatch.setattr(FileGroup, "folder", tmp_path_factory.mktemp("groups"), raising=False)
    return FileGroup.folder


def open_nccl(fleet: Fleet, n: int = 2, **settings: Any) -> ServerEngine:
    for server in fleet.servers[:n]:
        join(server, FileGroup.folder)
    return fleet.open(n, transfer="nccl", **settings)


def restart(server: FakeServer) -> None:
    server.kill()
    server.start()


def test_weights_arrive_and_rest(fleet: Fleet, tmp_path: Path, policy: Policy) -> None:
    """One group for many updates; a server that is back is given what was published, though the policy has moved on."""
    by_file = fleet.open(2, tmp_path / "weights")
    by_file.update_weights(moved(policy).items())
    wanted = told(by_file.generate(PROMPTS, SAMPLING))
    by_file.close()
    engine = open_nccl(fleet)
    engine.update_weights(policy.named_weights())
    with torch.no_grad():
        for name, x in moved(policy).items():
            policy.model.get_parameter(name).copy_(x)
    engine.update_weights(policy.named_weights())
    assert [server.seen(MEET) for server in fleet.servers] == [1, 1]
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    fleet[1].kill()
    with pytest.raises(RolloutError, match=r"^weights: \S+ "):
        engine.update_weights((name, x / 0) for name, x in policy.named_weights())
    engine.update_weights(policy.named_weights())
    with torch.no_grad():
        for x in policy.model.parameters():
            x.zero_()
    fleet[1].start()
    fleet[1].paused = fleet[1].updating = True  # and as a trainer that was killed has left it
    fleet[0].kill()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert [server.seen(MEET) for server in fleet.servers] == [1, 2]
    assert fleet[1].version == engine.transfer.version
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("path", [MEET, UPDATE])
def test_a_server_that_takes_no_part_is_left_out(path: str, fleet: Fleet, groups: Path, policy: Policy) -> None:
    engine = open_nccl(fleet, sync_within=4.0)
    restart(fleet[0])
    fleet[0].hooks[path] = fleet.hang
    engine.update_weights(moved(policy).items())
    assert any(" within 4 s" in note for note in engine.notes)
    assert len(list(groups.glob(f"*/{ABORTED}"))) >= (1 if path == MEET else 2)
    late = [place for place in groups.iterdir() if not (place / MET).exists()]
    assert len(late) == (path == MEET)
    for place in late:  # its other end comes once it was given up
        (place / MET).touch()
        assert appears(place / ABORTED)
    fleet.over.set()
    join(fleet[0], FileGroup.folder)
    fleet[1].kill()
    assert engine.generate(PROMPTS, SAMPLING)
    assert fleet[0].version == engine.transfer.version


def test_a_server_that_dies_half_way_meets_anew(fleet: Fleet, policy: Policy) -> None:
    engine, back = open_nccl(fleet), threading.Event()

    def die(_: dict[str, Any]) -> tuple[int, Any]:
        restart(fleet[0])
        join(fleet[0], FileGroup.folder)
        back.set()
        return 503, {}

    fleet[0].hooks[UPDATE] = die
    engine.update_weights(moved(policy).items())
    assert back.wait(30)
    assert fleet[1].version == engine.transfer.version
    assert fleet[0].version == "default"
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    fleet[1].kill()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert fleet[0].seen(MEET) == 2


def test_what_fails_on_the_trainers_side_is_said_at_once(
    fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what never ends there has a deadline too."""

    def fail(*_: Any) -> None:
        raise RuntimeError("NCCL error: unhandled cuda error")

    began = time.monotonic()
    for broken in ("send", "join"):
        with monkeypatch.context() as broke:
            broke.setattr(FileGroup, broken, fail)
            with pytest.raises(RolloutError, match=r"NCCL on this side: RuntimeError: NCCL error: unhandled"):
                open_nccl(fleet, sync_within=3.0)
    assert time.monotonic() - began < 60
    send = FileGroup.send

    def never_end(group: FileGroup, tensors: Any) -> None:
        send(group, tensors)
        fleet.over.wait(60)

    engine = open_nccl(fleet, sync_within=3.0)
    monkeypatch.setattr(FileGroup, "send", never_end)
    with pytest.raises(RolloutError, match="within 3 s"):
        engine.update_weights(policy.named_weights())


def test_rank_0_sends_and_the_others_wait_for_it(fleet: Fleet, policy: Policy) -> None:
    """A server that is back is nobody's until it has been sent the weights; the others pause and change nothing."""
    engine = open_nccl(fleet, 1)
    engine.update_weights(policy.named_weights())
    other = nccl.NCCLTransfer(server_config(fleet.model, fleet.servers, fleet.folder), World(1, Layout(2)))
    other._published = (engine.transfer.version, None)
    (address,) = engine.pool.servers
    assert run(other.send(address)) == engine.transfer.version
    restart(fleet[0])
    paused = fleet[0].seen("/pause")
    with pytest.raises(ServerError, match=r"\w+:2 .* default"):
        run(other.send(address))
    assert fleet[0].seen("/pause") == paused
    run(address.post(CLAIM, engine.pool._claim))
    run(engine.transfer.send(address))
    assert run(other.send(address)) == engine.transfer.version


def test_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Any] = {"engine": "server", "server": {"transfer": "nccl", "folder": "/dev/null/nowhere"}}
    config, by_file = make_config(rollout=raw), make_config(rollout={"engine": "server"})
    flags = server_arguments(config, tmp_path, torch.device("cuda"), config.rollout.server.urls[0])
    assert '--weight-transfer-config={"backend": "nccl"}' in flags
    assert any("worker-extension" in flag for flag in flags)  # the guard reads the dtypes of the head
    for there, message in ((None, "nccl requires vLLM"), (True, "nccl requires a CUDA GPU, got cpu")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda *_, there=there: there)
        with pytest.raises(ConfigError, match=f"^rollout.server.transfer: {message}"):
            check_needs(config)
    shape = model_shape(config.model)
    assert isinstance(shape, ModelShape)
    assert memory_estimate(config, shape) == {**memory_estimate(by_file, shape), SENT: shape.parameters * 2}
