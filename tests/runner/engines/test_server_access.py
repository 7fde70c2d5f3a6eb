"""`dapo serve`: what it starts, the key without which a server answers nobody, and the one run that it belongs to.

And settings that no server could serve; the others are in the table of `tests/runner/config/test_config.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_config
from fake_server import UPDATE, FakeServer
from refusals import naming, refused
from served import REQUESTS, Fleet, responses, wait_until
from small import write_recipe
from transformers import LlamaConfig

from dapo_runner.cli import main
from dapo_runner.commands.serve import _check_free, _model, server_arguments
from dapo_runner.config import ConfigError, load_config
from dapo_runner.config.rollout import ServerConfig
from dapo_runner.engines import guard, pool
from dapo_runner.engines.client import RolloutError, Server, ServerError, key_file
from dapo_runner.engines.guard import CLAIM, OWNED, RELEASE, Guard, Ownership, model_facts, server_limits
from dapo_runner.engines.receiver import Receiver
from dapo_runner.http import run
from dapo_runner.parallel.world import Layout
from dapo_runner.policy.model import Policy
from dapo_runner.preflight.needs import check_needs
from dapo_runner.run.folder import lock_folder
from dapo_runner.tiny_model import ensure_tiny_model

ROOT = Path(__file__).parents[3]
Started = Callable[..., tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return the arguments and the environment of the server that `dapo serve` becomes with some settings."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def execve(_: str, command: list[str], environment: dict[str, str]) -> None:
        found.append((command, environment))
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    recipe = str(write_recipe(tmp_path))

    def start(*settings: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(SystemExit):
            main(["serve", recipe, "rollout.engine=server", *settings])
        return found.pop()

    return start


def test_a_server_and_its_trainer_share_a_key_without_a_setting(
    fleet: Fleet,
    started: Started,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, urls = fleet[0], f"rollout.server.urls=[{fleet[0].url}]"
    trainer = Server(server.url, ServerConfig())
    run(trainer.get("/weight_info"))  # of a server that `dapo serve` has not started
    assert main(["serve", str(tmp_path / "small.yaml"), "rollout.engine=server", urls]) == 2  # its port is in use
    assert server.url in capsys.readouterr().err
    server.kill()
    command, environment = started(urls)
    server.start()
    key, output = environment["VLLM_API_KEY"], capsys.readouterr().out
    assert len(key) > 30
    assert key not in output + str(command)
    (path,) = (Path(line.removeprefix("key: ")) for line in output.splitlines() if line.startswith("key: "))
    assert path.stat().st_mode & 0o777 == 0o600
    run(trainer.get("/weight_info"))
    assert [headers.get("Authorization") for *_, headers in server.asked] == [None, f"Bearer {key}"]
    server.kill()
    assert started(urls)[1]["VLLM_API_KEY"] == key  # a copy of it on another machine remains valid
    assert started("rollout.server.urls=[http://localhost:1234]")[1]["VLLM_API_KEY"] != key
    server.start()
    server.hooks["/sleep"] = lambda body: (401, {"error": f"Bearer {key} is none"})
    with pytest.raises(ServerError, match=str(path)) as caught:
        run(trainer.post("/sleep"))
    assert key not in str(caught.value)
    for spoil in (lambda: path.chmod(0o640), lambda: path.chmod(0o600) or path.write_bytes(b"\xe9")):
        spoil()
        run(trainer.get("/weight_info"))  # it has read the key
        with refused("rollout.server.key_env"):
            run(Server(server.url, ServerConfig()).get("/weight_info"))
    path.write_text("key")
    with monkeypatch.context() as patch, refused("rollout.server.key_env", parts=["4004004"]):
        patch.setattr(os, "getuid", lambda: 4004004)
        run(Server(server.url, ServerConfig()).get("/weight_info"))
    path.parent.rename(tmp_path / "keys")
    path.parent.touch()
    assert main(["serve", str(tmp_path / "small.yaml"), "rollout.engine=server"]) == 2
    assert "rollout.server.key_env: " in capsys.readouterr().err


def test_a_user_without_a_home_folder_needs_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4004004)  # not in /etc/passwd
    with refused("rollout.server.key_env"):
        key_file("http://localhost:8000")


def test_what_a_server_is_started_with(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [
        "rollout.server.key_env=MY_KEY",
        "rollout.server.tensor=2",
        "model.dtype=float32",
        f"run.seed={2**32 + 5}",
    ]
    monkeypatch.setenv("MY_KEY", "s3cret")
    command, environment = started(*settings)
    flags = ["--host=127.0.0.1", "--port=8000", "--dtype=float32", "--tensor-parallel-size=2", "--seed=5"]
    assert {f"--model={tmp_path}/runs/small/served-0", "--logprobs-mode=processed_logprobs", *flags} <= {*command}
    assert environment["VLLM_NO_USAGE_STATS"] == "1"  # vLLM would tell its makers
    assert (environment["VLLM_SERVER_DEV_MODE"], environment["VLLM_API_KEY"]) == ("1", "s3cret")
    assert "s3cret" not in str(command)
    raw = {"engine": "server", "server": {"transfer": "nccl", "urls": ["https://far.example"]}, "max_staleness": 1}
    config = make_config(rollout=raw | {"correction": {"weights": "token"}})
    flags = server_arguments(config, tmp_path, torch.device("cuda"), config.rollout.server.urls[0])
    assert {'--weight-transfer-config={"backend": "nccl"}', "--scheduling-policy=priority"} <= {*flags}
    assert {"--host=far.example", "--port=443"} <= {*flags}
    assert main(["serve", str(tmp_path / "small.yaml"), "rollout.engine=server", "--server=1"]) == 2


def test_servers_of_a_tiny_model_need_not_wait_for_the_trainer_to_make_it(tmp_path: Path) -> None:
    config = make_config(run={"output_dir": str(tmp_path)}, data={"template": "{question}="})
    lock = lock_folder(config.run_dir, print)  # as the trainer has while it does
    folders = [Path(_model(config, server)) for server in (0, 1, 0)]
    assert folders[0] == folders[2] != folders[1]
    for config_file, weights in ((folder / "config.json", folder / "model.safetensors") for folder in folders):
        assert config_file.stat().st_mode == weights.stat().st_mode
    lock.close()
    with refused("model.path"):
        _model(make_config(model={"tiny": None, "path": str(tmp_path)}), 0)
    with refused("data.template"):  # as the trainer does
        _model(make_config(run={"output_dir": str(tmp_path)}), 0)


def test_a_server_refuses_sequences_that_are_too_long_for_its_model(tmp_path: Path) -> None:
    """vLLM does not, with the environment that it is given."""
    LlamaConfig(max_position_embeddings=8).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with refused("rollout.max_response_tokens"):
        _model(make_config(model={"tiny": None, "path": str(tmp_path)}), 0)


@pytest.mark.parametrize("recipe", ["tiny", "calculator"])
def test_a_server_that_makes_a_tiny_model_makes_that_of_the_trainer(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # of the function that shows the calls of tools
    settings = [f"run.output_dir={tmp_path}", "model.tiny.warmup.steps=0", "model.tiny.warmup.stop_at=null"]
    config = load_config(ROOT / f"recipes/{recipe}.yaml", settings)
    folders = Path(_model(config, 0)), ensure_tiny_model(config, tmp_path / "model", print)
    for name in ("config.json", "tokenizer.json"):
        assert len({(folder / name).read_text() for folder in folders}) == 1


def through_guard(
    path: str, kind: str = "http", body: Any = None, app: Any = None, method: str = "POST", **headers: str
) -> list[Any]:
    """Return what is sent for a request: its status, or "in" where it reaches vLLM."""
    sent: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        sent.append("in")

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    async def receive() -> dict[str, Any]:
        return {"body": json.dumps(body).encode()}

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "method": method, "headers": given, "app": app}
    asyncio.run(Guard(vllm)(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", [*sorted(OWNED), CLAIM, "/v1/models", "/", "//health"])
def test_a_stranger_gets_nowhere(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    web_page = {"origin": "http://evil.example", "content_type": "text/plain"}
    for headers in ({}, web_page, {"authorization": "Bearer "}, {"authorization": "Bearer s3cre"}):
        for method in ("POST", "OPTIONS"):
            assert through_guard(path, method=method, **headers)[0] == 401
    assert through_guard(path, "websocket") == ["websocket.close"]
    if path != CLAIM:
        with_key = through_guard(path, authorization="Bearer s3cret")
        assert with_key[0] == (409 if path in OWNED else "in")  # nobody has claimed the server
    assert through_guard("/health") == ["in"]
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        Guard(None)


def test_what_changes_weights_or_calls_workers_is_owned() -> None:
    assert {"/collective_rpc", "/init_weight_transfer_engine", "/update_weights", "/pause"} <= OWNED


@pytest.mark.parametrize(
    ("dtype", "heads", "variable", "limits", "fits"),
    [
        ("torch.float16", [["torch.float32"], ["torch.float32"]], "1", (96, 8, "priority"), True),
        ("torch.float16", [["torch.float32"]], "1", (97, 9, "priority"), True),
        ("torch.bfloat16", [["torch.float32"]], "1", (96, 8, "priority"), False),
        ("torch.float16", [["torch.float32"], ["torch.float16"]], "1", (96, 8, "priority"), False),
        ("torch.float16", [[]], "1", (96, 8, "priority"), False),
        ("torch.float16", [["torch.float32"]], "0", (96, 8, "priority"), False),
        ("torch.float16", [["torch.float32"]], "1", (95, 8, "priority"), False),
        ("torch.float16", [["torch.float32"]], "1", (96, 7, "priority"), False),
        ("torch.float16", [["torch.float32"]], "1", (96, 8, "fcfs"), False),
    ],
)
def test_a_server_with_other_numerics_or_lower_limits_is_refused(
    dtype: str, heads: list[list[str]], variable: str, limits: Any, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``heads``: what the modules of each worker compute in, whatever the configuration asked for."""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    sizes = SimpleNamespace(vocab_size=5, hidden_size=4, num_hidden_layers=1)

    async def collective_rpc(method: str) -> list[list[str]]:
        assert callable(getattr(Receiver, method))
        return heads

    length, n_sequences, policy = limits
    model = SimpleNamespace(hf_text_config=sizes, dtype=dtype, head_dtype="torch.float32", max_model_len=length)
    scheduler = SimpleNamespace(max_num_seqs=n_sequences, policy=policy)
    vllm_config = SimpleNamespace(scheduler_config=scheduler)
    client = SimpleNamespace(model_config=model, vllm_config=vllm_config, collective_rpc=collective_rpc)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    facts = model_facts(sizes, "float16", float32_logits=True, batch_invariant=True)
    claim = {"token": "a", "owner": "a", "model": facts, "limits": server_limits(96, 8, has_priorities=True)}
    sent = through_guard(CLAIM, body=claim, app=app, authorization="Bearer s3cret")
    assert sent[0] == (200 if fits else 403)


SERVED = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("sizes", "unlike"),
    [
        (SERVED, []),
        ({name: size for name, size in SERVED.items() if name != "intermediate_size"}, []),
        (SERVED | {"num_key_value_heads": 1}, []),  # the server's configuration leaves it out
        *((SERVED | {name: size + 1}, [name]) for name, size in SERVED.items()),
        (SERVED | {"vocab_size": 6, "hidden_size": 8}, ["hidden_size", "vocab_size"]),
    ],
)
def test_a_model_of_other_sizes_is_refused_and_these_named(sizes: dict[str, int], unlike: list[str]) -> None:
    own, served = (model_facts(SimpleNamespace(**each), "float32", True, False) for each in (sizes, SERVED))
    asked = {"token": "a", "owner": "a", "model": own, "limits": {}}
    reason = asyncio.run(Ownership().claim(asked, served, {}))
    assert sorted(name for name in own if re.search(naming(name), reason or "")) == unlike
    assert all(f"{name} {sizes[name]}, got {SERVED[name]}" in str(reason) for name in unlike)


@pytest.mark.parametrize("ends", ["by close", "killed", "restarted"])
def test_a_server_belongs_to_one_run(ends: str, fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the run ends, however. A server that is started anew is claimed anew."""
    server: FakeServer = fleet[0]
    monkeypatch.setattr(guard, "LEASE", 2.0)
    monkeypatch.setattr(pool, "RENEW", 0.3)
    engine = fleet.open(1)
    wanted = responses(engine.generate(REQUESTS[:2]))
    if ends == "restarted":
        server.kill()
        server.start()
        engine.update_weights(policy.named_weights())
    updates = server.seen(UPDATE)
    owner = re.escape(f"{make_config().run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})")
    with pytest.raises(RolloutError, match=owner):
        fleet.open(1)
    assert server.seen(UPDATE) == updates
    assert responses(engine.generate(REQUESTS[:2])) == wanted
    with pytest.raises(ServerError, match=owner):
        run(Server(server.url, ServerConfig()).post("/pause"))
    if ends == "killed":
        engine.pool.close()  # and nobody renews the claim
        wait_until(lambda: time.monotonic() > server.ownership.until - 1.0)
    else:
        engine.close()
    assert responses(fleet.open(1).generate(REQUESTS[:2])) == wanted


async def claim(ownership: Ownership, name: str) -> str | None:
    return await ownership.claim({"token": name, "owner": name, "model": {}, "limits": {}}, {}, {})


def test_a_request_that_ends_after_its_run_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a request prolongs the claim. That is no sign of life: only claims are."""
    monkeypatch.setattr(guard, "LEASE", 0.05)
    ownership = Ownership()

    async def claims() -> list[str | None]:
        first = await claim(ownership, "a")
        with ownership.kept():
            second = asyncio.create_task(claim(ownership, "b"))
            await asyncio.sleep(0.1)  # two leases
            assert ownership.token == "a"
        return [first, await second]

    assert asyncio.run(claims()) == [None, None]
    assert ownership.token == "b"


def test_a_start_that_is_gone_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the lease of a killed run, and its claim is granted although nobody is there any more."""
    monkeypatch.setattr(guard, "LEASE", 0.2)
    ownership = Ownership()

    async def claims() -> list[str | None]:
        killed = await claim(ownership, "a")
        return [killed, *await asyncio.gather(claim(ownership, "gone"), claim(ownership, "next"))]

    assert asyncio.run(claims()) == [None, None, None]
    assert ownership.token == "next"


def test_a_late_request_of_the_last_owner_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have been silent for longer than the lease between a claim and the request."""
    monkeypatch.setattr(guard, "LEASE", 0.0)
    ownership = Ownership()
    assert ownership.refuse("/pause", "")
    asyncio.run(claim(ownership, "a"))
    assert ownership.refuse("/pause", "a") is None
    assert ownership.refuse("/pause", "b")
    assert ownership.refuse(RELEASE, "a") is None
    assert ownership.refuse("/pause", "a")


NO_ADDRESSES = ["localhost:8000", "http://a:99999", "http://a:0", "http://a b:1", "http://a..b:1", "http://a:1#b"]
NO_ADDRESSES += ["http://[::1", "http://[x]:1", "http://[:::]:1", "http://[1.2.3.4]:1", "http://me:s3cret@a:1"]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused(url: str) -> None:
    with refused("rollout.server.urls") as caught:
        make_config(rollout={"engine": "server", "server": {"urls": [url]}})
    assert ("key_env" if "s3cret" in url else url) in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_addresses_that_are_some(tmp_path: Path) -> None:
    config = make_config(rollout={"server": {"urls": ["http://[::1]:8000", "https://a.example/"]}})
    hosts = [server_arguments(config, tmp_path, torch.device("cpu"), url) for url in config.rollout.server.urls]
    assert ["--host=::1" in hosts[0], "--host=a.example" in hosts[1]] == [True, True]
    for url in ("http://localhost.example:1", "http://localhost-2", "https://localhost"):
        assert ServerConfig(urls=[url]).urls == [url]
    found = ServerConfig(urls=["http://localhost:1", "http://LOCALHOST/", "http://localhost:2/"]).urls
    assert found == ["http://127.0.0.1:1", "http://127.0.0.1/", "http://127.0.0.1:2/"]
    with refused("urls", ValueError):
        ServerConfig(urls=["http://localhost:8000", "http://127.0.0.1:8000"])


def test_an_address_is_free_if_vllm_can_listen_there(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the IPv4 address of a name, even if its first address is one of IPv6."""

    def resolve(host: str, port: int, family: int = 0, type: int = 0) -> list[Any]:
        found = {socket.AF_INET6: ("::1", port, 0, 0), socket.AF_INET: ("127.0.0.1", port)}
        return [(kind, type, 6, "", address) for kind, address in found.items() if family in (0, kind)]

    url = fleet[0].url.replace("127.0.0.1", "gpu-host")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with refused("rollout.server.urls"):
        _check_free(url)
    fleet[0].kill()
    _check_free(url)
    with refused("rollout.server.urls"):  # there a proxy listens, and what follows it speaks plain HTTP
        _check_free(url.replace("http:", "https:"))


AHEAD = {"max_staleness": 1, "correction": {"weights": "token"}}


@pytest.mark.parametrize(
    ("rollout", "sections", "key"),
    [
        ({"engine": "hf", **AHEAD}, {}, "rollout.max_staleness"),
        ({"max_staleness": 1}, {}, "rollout.max_staleness"),
        ({"temperature": 2.5}, {}, "rollout.temperature"),
        ({}, {"parallel": {"gpus": 2, "rollout_tensor": 2}}, "parallel.rollout_tensor"),
    ],
)
def test_settings_that_no_server_could_serve(rollout: dict[str, Any], sections: dict[str, Any], key: str) -> None:
    with refused(key):
        make_config(rollout={"engine": "server", **rollout}, **sections)


def test_other_ranks_wait_for_as_long_as_servers_may_drain() -> None:
    def least_timeout(layout: Layout, **sections: Any) -> list[str]:
        with pytest.raises(ConfigError) as raised:  # data.template, if nothing else
            check_needs(make_config(rollout={"engine": "server", "partial": False, **AHEAD}, **sections), layout)
        return re.findall(r"^parallel\.timeout: \D*(\d+)", str(raised.value), re.MULTILINE)

    assert least_timeout(Layout(2, 2)) == ["4800"]
    assert least_timeout(Layout()) + least_timeout(Layout(2, 2), parallel={"timeout": 4800.0}) == []
