"""What is at the edges of the server engine: waits that are cut short, foreign answers, folders that others use."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config
from fake_server import GENERATE, UPDATE, FakeServer
from refusals import refused
from served import PROMPTS, SAMPLING, Fleet, lost, moved, spoiling, told, wait_until
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.commands import serve
from dapo_runner.config.rollout import ServerConfig
from dapo_runner.http import run
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import Policy
from dapo_runner.rollout import guard, pool, transfer
from dapo_runner.rollout.client import RolloutError, Server, ServerError
from dapo_runner.rollout.guard import RELEASE
from dapo_runner.rollout.transfer import FileTransfer
from dapo_runner.run.folder import lock_folder


@pytest.fixture
def server(fleet: Fleet) -> FakeServer:
    """The first of the fleet, whose engines are over it alone."""
    return fleet[0]


@contextmanager
def saying(raw: bytes, ends: bool = False, said: threading.Event | None = None, pause: float = 0.0) -> Iterator[Server]:
    """An address that answers each request so, and then hangs up, or says no more. ``said`` is set behind an answer;
    ``pause``: seconds between two bytes of it.
    """
    listener, open_ones = socket.create_server(("127.0.0.1", 0)), []

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed below
                return
            open_ones.append(connection)
            asked, length = connection.makefile("rb"), 0
            while (line := asked.readline().lower()).strip():
                length = int(line.partition(b":")[2]) if line.startswith(b"content-length:") else length
            asked.read(length)  # an answer in the midst of a question would break the pipe that it comes through
            with suppress(OSError):  # nobody waits for it any more
                for part in [raw] if not pause else [bytes([byte]) for byte in raw]:
                    connection.sendall(part)
                    time.sleep(pause)
            if said is not None:
                said.set()
            if ends:
                connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=answer, daemon=True).start()
    yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", ServerConfig())
    listener.shutdown(socket.SHUT_RDWR)
    for one in (listener, *open_ones):
        one.close()


@pytest.mark.parametrize("raw", [b"HTTP/1.1 200 OK\r\n" + 99 * b"X-A: b\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + 999 * b" "])
def test_an_answer_that_comes_byte_by_byte_is_late_like_another(raw: bytes) -> None:
    with saying(raw, pause=0.1) as server:
        began = time.monotonic()
        with pytest.raises(ServerError, match="1 s"):
            run(server.post("/pause", within=1.0))
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [(b"{}", "many", "ClientResponseError"), (b"[" * 10**5, "100000", "JSON"), (b"{}", "9", "of 9 bytes")],
)
def test_an_answer_that_is_none_is_the_servers_fault(body: bytes, length: str, message: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n".encode()
    with saying(head + body, ends=True) as server, pytest.raises(ServerError, match=message):
        run(server.post("/pause", within=5.0))


@pytest.mark.parametrize("said", [float("nan"), float("inf"), None, -9999.0])
def test_a_log_prob_that_is_none_is_one_that_is_not_known(fleet: Fleet, server: FakeServer, said: float | None) -> None:
    engine = fleet.open(1)
    server.hooks[GENERATE] = spoiling(
        server, lambda choice: choice["logprobs"]["content"][0].update(logprob=said), times=2
    )
    for other, spoiled in engine.generate(PROMPTS[:2], SAMPLING):
        assert spoiled.logprobs.isnan().tolist() == [True] + [False] * (spoiled.length - 1)
        assert other.logprobs.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_not_sent(
    value: float, fleet: Fleet, server: FakeServer, policy: Policy
) -> None:
    engine = fleet.open(1)
    name, tensor = list(policy.named_weights())[3]
    with torch.no_grad():
        tensor.flatten()[-1] = value
    with pytest.raises(RolloutError, match=f"^weights: {name} "):
        engine.update_weights(policy.named_weights())
    assert server.seen(UPDATE) == 1
    assert engine.generate(PROMPTS[:2], SAMPLING)


def test_weights_that_arrive_otherwise_than_they_left_are_not_taken(
    fleet: Fleet, server: FakeServer, policy: Policy
) -> None:
    engine, once = fleet.open(1), iter([True])

    def damage(body: dict[str, Any]) -> None:
        path = Path(body["args"][0])
        if next(once, False):
            whole = path.read_bytes()
            path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
            threading.Thread(target=lambda: (wait_until(lambda: lost(engine)), path.write_bytes(whole))).start()

    server.hooks[UPDATE] = damage
    engine.update_weights(policy.named_weights())
    assert any("checksum" in note for note in engine.notes)
    assert server.version == engine.transfer.version


def test_a_checksum_depends_on_the_order_of_bytes(tmp_path: Path) -> None:
    file, block = tmp_path / "weights", transfer.BLOCK
    whole = torch.arange(2 * block + 24, dtype=torch.int32).view(torch.uint8).numpy().tobytes()[: 2 * block + 3]
    words = [whole[at : at + 8] for at in (0, 8)]
    forms = {
        "whole": whole,
        "words": words[1] + words[0] + whole[16:],
        "blocks": whole[block : 2 * block] + whole[:block] + whole[2 * block :],
        "end": whole[:-2] + whole[-1:] + whole[-2:-1],
        "longer": whole + b"\0",
    }
    found = {}
    for name, data in forms.items():
        file.write_bytes(data)
        found[name] = transfer.checksum(file)
    assert len(set(found.values())) == len(forms), found
    file.write_bytes(whole)
    assert transfer.checksum(file) == found["whole"]


def test_a_call_that_begins_as_the_run_ends_ends_too(fleet: Fleet) -> None:
    engine = fleet.open(1)

    class Ending(set[Any]):
        def add(self, call: Any) -> None:
            engine.close()
            super().add(call)

    engine.calls = Ending()
    with pytest.raises(RolloutError, match="the run has ended"):
        engine.generate(PROMPTS, SAMPLING)
    assert not engine.calls


@pytest.mark.parametrize("ends", ["by close", "killed", "restarted"])
def test_a_server_belongs_to_one_run(
    ends: str, fleet: Fleet, server: FakeServer, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until that ends, however. A server that is started anew is claimed anew."""
    monkeypatch.setattr(guard, "LEASE", 2.0)
    monkeypatch.setattr(pool, "RENEW", 0.3)
    engine = fleet.open(1)
    wanted = told(engine.generate(PROMPTS[:2], SAMPLING))
    updates = server.seen(UPDATE)
    owner = re.escape(f"{make_config().run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})")
    if ends == "restarted":
        server.kill()
        server.start()
        engine.update_weights(policy.named_weights())
        updates = server.seen(UPDATE)
    began = time.monotonic()
    with pytest.raises(RolloutError, match=owner):
        fleet.open(1)
    assert time.monotonic() - began < 60
    assert server.seen(UPDATE) == updates
    assert told(engine.generate(PROMPTS[:2], SAMPLING)) == wanted
    with pytest.raises(ServerError, match=owner):
        run(Server(server.url, ServerConfig()).post("/pause"))
    if ends == "killed":
        engine.pool.close()  # and nobody renews the claim
    else:
        engine.close()
    beside = fleet.open(1)
    assert told(beside.generate(PROMPTS[:2], SAMPLING)) == wanted


def test_what_a_kill_has_left_is_cleared_away_and_nothing_else(fleet: Fleet, tmp_path: Path) -> None:
    alive = fleet.open(1, tmp_path / "weights")
    own = alive.transfer.folder
    killed, theirs = own.with_name(f"{own.name}x"), tmp_path / "theirs"
    shutil.copytree(own, killed)
    (killed / "1.unfinished").write_text("half of it")
    theirs.mkdir()
    (theirs / "model.safetensors").write_text("of years")
    for name in ("y", "lock"):  # by somebody who may write there too
        own.with_name(f"{own.name}{name}").symlink_to(theirs)
    own.with_name(own.name.rpartition("-")[0]).symlink_to(theirs)
    run(alive.pool.servers[0].post(RELEASE))
    engine = fleet.open(1, tmp_path / "weights")
    assert not killed.exists()
    assert (theirs / "model.safetensors").exists()
    assert own.stat().st_mode & 0o777 == 0o700
    assert all(list(one.transfer.folder.glob("*.safetensors")) for one in (alive, engine))


def test_what_a_killed_run_has_left_in_shared_memory_goes_with_the_next_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)
    killed, theirs = (tmp_path / f"dapo-{user}-0123-x" for user in (os.getuid(), os.getuid() + 1))
    for folder in (killed, theirs):
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "weights.safetensors").touch()
    alive = FileTransfer(make_config(run={"name": "another"}), SINGLE_PROCESS)
    FileTransfer(make_config(run={"name": "next"}), SINGLE_PROCESS)
    assert not killed.exists()
    assert theirs.exists()
    assert alive.folder.exists()


def test_no_room_for_the_weights_is_one_line(fleet: Fleet, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with refused("rollout.server.folder"):
            fleet.open(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("dapo-*/*safetensors"))


def test_a_dry_run_sees_that_weights_cannot_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    settings = ["rollout.engine=server", f"rollout.server.folder={tmp_path}/file/folder"]
    for command in ([], ["--dry-run"]):
        assert main(["train", str(write_recipe(tmp_path)), *settings, *command]) == 2
        assert "rollout.server.folder: expected a folder that can be written to" in capsys.readouterr().err


def test_servers_of_a_tiny_model_need_not_wait_for_the_trainer_to_make_it(tmp_path: Path) -> None:
    config = make_config(run={"output_dir": str(tmp_path)})
    lock = lock_folder(config.run_dir, print)  # as it has while it does
    folders = [Path(serve._model(config, server)) for server in (0, 1, 0)]
    assert folders[0] == folders[2] != folders[1]
    assert all((folder / "config.json").exists() for folder in folders)
    lock.close()
    with refused("model.path"):
        serve._model(make_config(model={"tiny": None, "path": str(tmp_path)}), 0)


def test_the_server_of_a_killed_run_is_free_once_its_last_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a request prolongs the claim. That is no sign of life: only claims are."""
    monkeypatch.setattr(guard, "LEASE", 0.05)
    ownership, model = guard.Ownership(), {"layers": 2}

    async def claims() -> list[str | None]:
        first = await ownership.claim({"token": "a", "owner": "a", "model": model}, model)
        with ownership.kept():
            second = asyncio.create_task(ownership.claim({"token": "b", "owner": "b", "model": model}, model))
            await asyncio.sleep(0.1)  # two leases
        return [first, await second]

    assert asyncio.run(claims()) == [None, None]
    assert ownership.token == "b"


def test_an_error_nobody_foresaw_loses_a_server_and_hangs_no_run(
    fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fleet.open(sync_within=1.0)

    async def send(*_: object) -> str:
        raise ValueError("unforeseen")

    monkeypatch.setattr(engine.pool.transfer, "send", send)
    with pytest.raises(RolloutError, match="unforeseen"):
        engine.update_weights(moved(policy).items())
