"""A server answers nobody without its key, which `dapo serve` makes and the trainer finds."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import FakeServer
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.commands import serve
from dapo_runner.config import ConfigError
from dapo_runner.config.rollout import ServerConfig
from dapo_runner.http import run
from dapo_runner.rollout.client import Server, ServerError


@pytest.fixture(autouse=True)
def _no_keys_of_the_users(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))


Started = Callable[..., tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return the arguments and the environment of the server that `dapo serve` becomes with some settings."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def execve(_: str, command: list[str], environment: dict[str, str]) -> None:
        found.append((command, environment))
        raise SystemExit

    monkeypatch.setattr(serve.VLLMEngine, "check", lambda config: None)
    monkeypatch.setattr(os, "execve", execve)
    recipe = str(write_recipe(tmp_path))

    def start(*settings: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(SystemExit):
            main(["serve", recipe, "rollout.engine=server", *settings])
        return found.pop()

    return start


def test_a_server_and_its_trainer_have_a_key_without_being_told(
    model_folder: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(model_folder) as server:
        trainer = Server(server.url, ServerConfig())
        run(trainer.get("/weight_info"))  # of a server that nobody has started by `dapo serve`
        server.kill()
        command, environment = started(f"rollout.server.urls=[{server.url}]")
        server.start()
        key = environment["VLLM_API_KEY"]
        assert len(key) > 30
        assert "--middleware=dapo_runner.rollout.guard.Guard" in command
        said = capsys.readouterr().out
        assert key not in said + str(command)
        (path,) = (Path(line.removeprefix("key: ")) for line in said.splitlines() if line.startswith("key: "))
        assert path.stat().st_mode & 0o777 == 0o600
        run(trainer.get("/weight_info"))
        keys = [headers.get("Authorization") for *_, headers in server.asked]
        assert keys == [None, f"Bearer {key}"]
        server.kill()
        assert started(f"rollout.server.urls=[{server.url}]")[1]["VLLM_API_KEY"] == key  # what was copied holds
        assert started("rollout.server.urls=[http://localhost:1234]")[1]["VLLM_API_KEY"] != key
        server.start()
        server.hooks["/sleep"] = lambda body: (401, {"error": f"Bearer {key} is none"})
        with pytest.raises(ServerError, match=str(path)) as raised:
            run(trainer.post("/sleep"))
        assert key not in str(raised.value)
        path.chmod(0o640)
        with pytest.raises(ConfigError, match=r"^rollout.server.key_env: "):
            run(trainer.get("/weight_info"))


def test_a_port_in_use_is_refused_before_the_model_is_loaded(
    model_folder: Path, started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path))
    with FakeServer(model_folder) as server:
        assert main(["serve", recipe, "rollout.engine=server", f"rollout.server.urls=[{server.url}]"]) == 2
        assert f"rollout.server.urls: {server.url}" in capsys.readouterr().err
        server.kill()
        assert started(f"rollout.server.urls=[{server.url}]")


def test_what_a_server_starts_as(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    command, environment = started("rollout.server.key_env=MY_KEY")
    assert f"--model={tmp_path}/runs/small/served-0" in command
    assert environment["VLLM_NO_USAGE_STATS"] == "1"  # vLLM would tell its makers
    assert "s3cret" not in str(command) + capsys.readouterr().out


def said_by_guard(monkeypatch: pytest.MonkeyPatch, path: str, kind: str = "http", **headers: str) -> list[Any]:
    """Return what is sent for a request; "in" where the application was reached."""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    from dapo_runner.rollout.guard import Guard

    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("in")

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "method": "POST", "headers": given}
    asyncio.run(Guard(app)(scope, None, send))
    return sent


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weights", "/v1/models", "/", "//health"])
def test_a_stranger_gets_nowhere(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    web_page = {"origin": "http://evil.example", "content_type": "text/plain"}
    for headers in ({}, web_page, {"authorization": "Bearer "}, {"authorization": "Bearer s3cre"}):
        assert said_by_guard(monkeypatch, path, **headers)[0] == 401
    assert said_by_guard(monkeypatch, path, "websocket") == ["websocket.close"]
    with_key = said_by_guard(monkeypatch, path, authorization="Bearer s3cret")
    assert with_key[0] == (
        409 if path in ("/collective_rpc", "/update_weights") else "in"
    )  # nobody has claimed the server
    assert said_by_guard(monkeypatch, "/health") == ["in"]


@pytest.mark.parametrize(
    ("dtype", "heads", "variable", "fits"),
    [
        ("torch.float16", [["torch.float32"], ["torch.float32"]], "1", True),
        ("torch.bfloat16", [["torch.float32"]], "1", False),
        ("torch.float16", [["torch.float32"], ["torch.float16"]], "1", False),
        ("torch.float16", [[]], "1", False),
        ("torch.float16", [["torch.float32"]], "0", False),
    ],
)
def test_a_server_with_other_numerics_is_refused(
    dtype: str, heads: list[list[str]], variable: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``heads``: what the modules of each worker compute in, whatever the configuration asked for."""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    from dapo_runner.rollout.guard import CLAIM, Guard, model_facts
    from dapo_runner.rollout.receiver import Receiver

    sizes, sent = SimpleNamespace(vocab_size=5, hidden_size=4, num_hidden_layers=1), list[Any]()

    async def collective_rpc(method: str) -> list[list[str]]:
        assert callable(getattr(Receiver, method))
        return heads

    model = SimpleNamespace(hf_text_config=sizes, dtype=dtype, head_dtype="torch.float32")
    state = SimpleNamespace(engine_client=SimpleNamespace(model_config=model, collective_rpc=collective_rpc))
    facts = model_facts(sizes, "float16", float32_logits=True, batch_invariant=True)
    claim = {"token": "a", "owner": "a", "model": facts}

    async def receive() -> dict[str, Any]:
        return {"body": json.dumps(claim).encode()}

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    headers = [(b"authorization", b"Bearer s3cret")]
    scope = {"type": "http", "path": CLAIM, "method": "POST", "headers": headers, "app": SimpleNamespace(state=state)}
    asyncio.run(Guard(None)(scope, receive, send))
    assert sent[0] == (200 if fits else 403)


def test_no_server_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_runner.rollout.guard import Guard

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        Guard(None)
