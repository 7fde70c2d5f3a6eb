"""Weights on their way to servers: files and their folders, and NCCL with a socket in its place."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import file_size_limit, make_config
from fake_nccl import MEET, UPDATE, SocketGroup, SocketTransfer, join
from fake_server import UPDATE as FILE_UPDATE
from fake_server import FakeServer
from refusals import naming, refused
from served import REQUESTS, Fleet, lost, moved, responses, wait_until
from small import Dapo, write_recipe

from dapo_runner.engines.client import RolloutError, ServerError
from dapo_runner.engines.guard import CLAIM, RELEASE
from dapo_runner.engines.receiver import Receiver
from dapo_runner.engines.server import TRANSFERS, ServerEngine
from dapo_runner.engines.transfer import BLOCK, SHARED_MEMORY, FileTransfer, checksum
from dapo_runner.http import run
from dapo_runner.parallel.world import SINGLE_PROCESS, Layout, World
from dapo_runner.policy.model import Policy
from dapo_runner.preflight.memory import SENT, memory_estimate, model_shape
from dapo_runner.preflight.needs import check_needs

FEW = REQUESTS[:4]


def test_a_damaged_file_is_not_loaded(fleet: Fleet, policy: Policy) -> None:
    engine, first = fleet.open(1), iter([True])

    def damage(body: dict[str, Any]) -> None:
        path = Path(body["args"][0])
        if next(first, False):
            whole = path.read_bytes()
            path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
            threading.Thread(target=lambda: (wait_until(lambda: lost(engine)), path.write_bytes(whole))).start()

    fleet[0].hooks[FILE_UPDATE] = damage
    engine.update_weights(policy.named_weights())
    assert "checksum" in engine.notes[0]
    assert fleet[0].version == engine.transfer.version


def test_a_server_that_does_not_see_the_trainers_folder_names_the_setting(fleet: Fleet, policy: Policy) -> None:
    engine, hidden = fleet.open(1), iter([True])

    def hide(body: dict[str, Any]) -> None:
        if next(hidden, False):
            body["args"][0] = f"/nowhere{body['args'][0]}"

    fleet[0].hooks[FILE_UPDATE] = hide
    engine.update_weights(policy.named_weights())
    assert re.search(naming("rollout.server.folder"), engine.notes[0])
    worker, path = Receiver(), engine.transfer.folder / "replaced by a newer version"
    with pytest.raises(FileNotFoundError, match=path.name):
        worker.load_weights_file(str(path), "1")


def test_a_checksum_depends_on_the_order_of_bytes(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    whole = torch.arange(BLOCK // 2 + 1, dtype=torch.int32).view(torch.uint8).numpy().tobytes()[:-1]
    words, blocks = whole[8:16] + whole[:8] + whole[16:], whole[BLOCK : 2 * BLOCK] + whole[:BLOCK] + whole[2 * BLOCK :]
    found = []
    for data in (whole, words, blocks, whole[:-2] + whole[-1:] + whole[-2:-1], whole + b"\0", whole):
        file.write_bytes(data)
        found.append(checksum(file))
    assert len(set(found[:-1])) == 5
    assert found[-1] == found[0]


def test_what_a_kill_has_left_is_cleared_away_and_nothing_else(fleet: Fleet, tmp_path: Path) -> None:
    alive = fleet.open(1, tmp_path / "weights")
    own = alive.transfer.folder
    killed, theirs = own.with_name(f"{own.name}x"), tmp_path / "theirs"
    shutil.copytree(own, killed)
    (killed / "1.unfinished").write_text("half of it")
    theirs.mkdir()
    (theirs / "model.safetensors").write_text("of years")
    foreign = Path(shutil.copytree(own, own.with_name(f"{own.name}z")))
    if os.getuid() == 0:
        os.chown(foreign, 12345, -1)
    for name in ("y", "lock"):  # by somebody who may write there too
        own.with_name(f"{own.name}{name}").symlink_to(theirs)
    own.with_name(own.name.rpartition("-")[0]).symlink_to(theirs)
    run(alive.pool.servers[0].post(RELEASE))
    engine = fleet.open(1, tmp_path / "weights")
    assert not killed.exists()
    assert foreign.exists() == (os.getuid() == 0)
    assert (theirs / "model.safetensors").exists()
    assert own.stat().st_mode & 0o777 == 0o700
    assert all(list(one.transfer.folder.glob("*.safetensors")) for one in (alive, engine))


def test_what_a_killed_run_of_any_name_has_left_in_shared_memory_goes_with_the_next() -> None:
    name = f"{secrets.token_hex(4)}-x"
    killed, theirs = (SHARED_MEMORY / f"dapo-{user}-{name}" for user in (os.getuid(), os.getuid() + 1))
    try:
        for folder in (killed, theirs):
            folder.mkdir()
            (folder / "lock").touch()
        alive = FileTransfer(make_config(run={"name": "another"}), SINGLE_PROCESS)
        later = FileTransfer(make_config(run={"name": "next"}), SINGLE_PROCESS)
        assert not killed.exists()
        assert theirs.exists()
        assert alive.folder.exists()
        alive.close()
        later.close()
    finally:
        shutil.rmtree(theirs)


def test_no_room_for_the_weights_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    with file_size_limit() as limit, refused("rollout.server.folder"):
        limit(1000)
        fleet.open(1)
    assert not list(tmp_path.glob("dapo-*/*safetensors"))


@pytest.mark.parametrize("command", [[], ["--dry-run"]])
def test_a_folder_that_cannot_be_written_to_is_refused(command: list[str], tmp_path: Path, dapo: Dapo) -> None:
    (tmp_path / "file").touch()
    settings = ["rollout.engine=server", f"rollout.server.folder={tmp_path}/file/folder", *command]
    dapo.refuses("rollout.server.folder", "train", write_recipe(tmp_path), *settings)


@pytest.fixture
def by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFERS, "nccl", SocketTransfer)


def open_nccl(fleet: Fleet, n: int = 2, **settings: Any) -> ServerEngine:
    for server in fleet.servers[:n]:
        join(server)
    return fleet.open(n, transfer="nccl", **settings)


def restart(server: FakeServer) -> None:
    server.kill()
    server.start()


@pytest.mark.usefixtures("by_nccl")
def test_weights_arrive_by_nccl_and_rest(fleet: Fleet, tmp_path: Path, policy: Policy) -> None:
    """One group for many updates. A server that is back gets what was published, though the policy has moved on."""
    by_file = fleet.open(2, tmp_path / "weights")
    by_file.update_weights(moved(policy).items())
    wanted = responses(by_file.generate(FEW))
    by_file.close()
    engine = open_nccl(fleet)
    engine.update_weights(policy.named_weights())
    with torch.no_grad():
        for name, x in moved(policy).items():
            policy.model.get_parameter(name).copy_(x)
    engine.update_weights(policy.named_weights())
    assert [server.seen(MEET) for server in fleet.servers] == [1, 1]
    assert responses(engine.generate(FEW)) == wanted
    fleet[1].kill()
    with pytest.raises(RolloutError, match="weights"):
        engine.update_weights((name, x / 0) for name, x in policy.named_weights())
    engine.update_weights(policy.named_weights())
    with torch.no_grad():
        for x in policy.model.parameters():
            x.zero_()
    fleet[1].start()
    fleet[1].paused = fleet[1].updating = True  # as a trainer that was killed has left it
    fleet[0].kill()
    assert responses(engine.generate(FEW)) == wanted
    assert [server.seen(MEET) for server in fleet.servers] == [1, 2]
    assert fleet[1].version == engine.transfer.version
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.usefixtures("by_nccl")
@pytest.mark.parametrize("path", [MEET, UPDATE])
def test_a_server_that_takes_no_part_is_left_out(path: str, fleet: Fleet, policy: Policy) -> None:
    engine, held = open_nccl(fleet, sync_timeout=2.0), list[dict[str, Any]]()
    answer = fleet[0].hooks[path]
    restart(fleet[0])

    def hang(body: dict[str, Any]) -> None:
        fleet[0].hooks["/health"] = fleet.hang  # so that only the failure itself can end the group
        held.append(body)
        fleet.hang(body)

    fleet[0].hooks[path] = hang
    engine.update_weights(moved(policy).items())
    assert "2 s" in "".join(engine.notes)
    group = fleet[0].engine.group if path == UPDATE else answer(held[0]) and fleet[0].engine.group  # it is late
    with pytest.raises(EOFError):  # the trainer's end is gone
        [group.recv() for _ in range(100)]
    fleet.over.set()
    del fleet[0].hooks["/health"]
    join(fleet[0])
    fleet[1].kill()
    assert engine.generate(FEW)
    assert fleet[0].version == engine.transfer.version


@pytest.mark.parametrize(("broken", "shown"), [("join", "cuda error"), ("send", "cuda error"), ("end", "1 s")])
def test_what_fails_on_the_trainers_side_ends_the_wait(
    broken: str, shown: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group(SocketGroup):
        def join(self, unique_id: bytes, size: int) -> None:
            if broken == "join":
                raise RuntimeError("cuda error")
            super().join(unique_id, size)

        def send(self, tensors: Any) -> None:
            if broken == "send":
                raise RuntimeError("cuda error")
            super().send(tensors)
            fleet.over.wait(300)

    class Transfer(SocketTransfer):
        group_class = Group

    monkeypatch.setitem(TRANSFERS, "nccl", Transfer)
    with pytest.raises(RolloutError, match=shown):
        open_nccl(fleet, sync_timeout=1.0)


@pytest.mark.usefixtures("by_nccl")
def test_rank_0_sends_and_the_others_wait_for_it(fleet: Fleet, policy: Policy) -> None:
    """A server that is back is nobody's until it has been sent the weights. The others pause and change nothing."""
    engine = open_nccl(fleet, 1)
    engine.update_weights(policy.named_weights())
    other = SocketTransfer(fleet.config(), World(1, Layout(2)))
    other._published = (engine.transfer.version, None)
    (address,) = engine.pool.servers
    assert run(other.send(address)) == engine.transfer.version
    restart(fleet[0])
    paused = fleet[0].seen("/pause")
    with pytest.raises(ServerError, match="default"):
        run(other.send(address))
    assert fleet[0].seen("/pause") == paused
    run(address.post(CLAIM, engine.pool._claim))
    run(engine.transfer.send(address))
    assert run(other.send(address)) == engine.transfer.version


def test_nccl_requires_vllm_and_a_gpu_and_memory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = {"transfer": "nccl", "folder": "/dev/null/nowhere"}  # the folder is not used
    config, by_file = (make_config(rollout={"engine": "server", "server": own}) for own in (server, {}))
    for _ in range(2):
        with refused("rollout.server.transfer"):
            check_needs(config)
        (tmp_path / "vllm.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    shape = model_shape(config.model)
    assert memory_estimate(config, shape) == {**memory_estimate(by_file, shape), SENT: shape.parameters * 2}
