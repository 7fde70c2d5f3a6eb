"""A real `vllm serve` on a CPU, started by `dapo serve`: what it answers is what the engine in this process does."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import gloo_for_nccl
import pytest
import torch
from builders import make_config, save_model
from test_vllm import CPU, SHAPE, change, policy_logprobs
from transformers import AutoConfig

from dapo_runner.algorithms.learner import Learner
from dapo_runner.commands.serve import PROGRAM, server_arguments, server_environment
from dapo_runner.config import Config, ModelConfig, dump_config
from dapo_runner.http import run
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout import nccl, pool
from dapo_runner.rollout import server as server_module
from dapo_runner.rollout.client import RolloutError, Server, ServerError, key_file, server_key
from dapo_runner.rollout.guard import RELEASE, model_facts
from dapo_runner.rollout.pool import ServerPool
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.run.tiny_model import make_model, make_tokenizer
from dapo_runner.types import CallOptions, Completion, Prompt, SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]


@pytest.fixture(scope="module", autouse=True)
def _keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    torch.manual_seed(7)
    tokenizer, folder = make_tokenizer(), tmp_path_factory.mktemp("tiny")
    model = make_model(SHAPE, tokenizer, max_positions=256)
    model.config.tie_word_embeddings = True  # where vLLM on a CPU needs help
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    server = {"urls": [free_address()], "sync_within": 600.0}
    return make_config(
        run={"output_dir": str(folder / "runs"), "device": "cpu"},
        model={"tiny": None, "path": str(save_model(model, tokenizer, folder)), "dtype": "float32"},
        rollout={
            "engine": "server",
            "server": server,
            "max_prompt_tokens": 160,
            "max_response_tokens": 16,
            "vllm": {"kv_cache_gib": 0.25},
        },
        reward={"overlong": {"cache_length": 4}},
    )


@pytest.fixture(scope="module")
def server(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Under way; the engine waits for it."""
    folder = tmp_path_factory.mktemp("serve")
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_config(config))
    with running([sys.executable, "-m", "dapo_runner", "serve", str(recipe)], folder / "log"):
        yield
    assert key_file(config.rollout.server.urls[0]).read_text() not in (folder / "log").read_text()


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[None]:
    with log.open("w") as told:
        process = subprocess.Popen(
            command, stdout=told, stderr=told, start_new_session=True, env=os.environ | environment
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def prompts(config: Config) -> list[Prompt]:
    tokenizer = make_tokenizer()
    texts = ("1+1=", "123+45678=", "12+34=", "7", "12+34=" * 25)
    return [Prompt(text, tuple(tokenizer(text)["input_ids"]), text, "") for text in texts]


def assert_alike(found: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


def test_it_is_the_engine_of_this_process(config: Config, server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probs, stop strings and greedy responses, before and after new weights; the version is checked."""
    asked, path = prompts(config), config.model.path
    assert path is not None
    inside = VLLMEngine(path, make_tokenizer(), config, CPU)
    engine = ServerEngine(path, make_tokenizer(), config)
    learner = Learner(load_policy(path, ModelConfig(path="x", dtype="float32"), CPU), config)
    probe = SyncProbe(asked, config)
    sampling = SamplingParams(n=4, max_tokens=12, seed=3)
    each = [
        sampling,
        replace(sampling, stop=("2", "9")),
        replace(sampling, temperature=0.0),
        replace(sampling, top_p=0.7),
        sampling,
    ]
    before = engine.generate(asked, each)
    assert_alike(before, inside.generate(asked, each))

    change(learner)
    with pytest.raises(OutOfSyncError):
        probe(engine, learner)
    for one in (engine, inside):
        one.update_weights(learner.policy.named_weights())
    assert probe(engine, learner)["gap"] < 1e-4
    after = engine.generate(asked, each)
    assert_alike(after, inside.generate(asked, each))
    assert [one.token_ids.tolist() for one in after[0]] != [one.token_ids.tolist() for one in before[0]]
    for one in after[-1]:  # longer than a block of the prefix cache
        torch.testing.assert_close(one.logprobs, policy_logprobs(learner, asked[-1], one), atol=1e-4, rtol=1e-4)

    (address,) = engine.pool.servers
    assert run(address.get("/weight_info")) == {"weight_version": engine.transfer.version}
    engine.updates += 1  # as if it had taken them
    monkeypatch.setattr(server_module, "ATTEMPTS", 1)
    with pytest.raises(RolloutError, match=rf"{engine.run}:2.*{engine.run}:3"):
        engine.generate(asked[:1], sampling)


@pytest.fixture(autouse=True)
def _engines_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the server go for the next test."""
    opened: list[ServerPool] = []
    deliver = ServerPool.deliver
    monkeypatch.setattr(ServerPool, "deliver", lambda own: (opened.append(own), deliver(own))[1])
    yield
    for own in opened:
        own.close()
        run(own.release())


def in_turn(config: Config) -> dict[int, Learner]:
    """The weights of the first updates: those of the model's folder and others."""
    path = config.model.path
    assert path is not None
    first, second = (Learner(load_policy(path, ModelConfig(path="x", dtype="float32"), CPU), config) for _ in range(2))
    change(second)
    return {1: first, 2: second, 3: first, 4: second, 5: first}


def open_ahead(config: Config, partial: bool, notes: list[str]) -> ServerEngine:
    assert config.model.path is not None
    rollout = config.rollout.model_copy(update={"max_staleness": 1, "partial": partial})
    ahead = config.model_copy(update={"rollout": rollout})
    return ServerEngine(config.model.path, make_tokenizer(), ahead, note=notes.append)


def answers_across(
    engine: ServerEngine, learner: Learner, asked: list[Prompt], sampling: SamplingParams
) -> list[tuple[Prompt, Completion]]:
    """Those of a call in the midst of which new weights come."""
    found: list[list[Completion]] = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(asked, sampling)))
    answered, check = threading.Event(), engine._checked
    engine._checked = lambda *answer: (answered.set(), check(*answer))[1]  # type: ignore[method-assign]
    thread.start()
    assert answered.wait(60)
    engine.update_weights(learner.policy.named_weights())
    thread.join(60)
    return [(one, answer) for one, group in zip(asked, found, strict=True) for answer in group]


def test_weights_in_flight(config: Config, server: None) -> None:
    """Responses go on, and every token has its log-prob under the weights that gave it, all before it computed anew."""
    engine, weights = open_ahead(config, True, []), in_turn(config)
    asked, sampling = prompts(config)[:4] * 60, SamplingParams(n=4, max_tokens=16, seed=4)
    across: list[tuple[Prompt, Completion]] = []
    for version in range(2, 6):  # on a busy machine no response may be under way in the moment of the swap
        pairs = answers_across(engine, weights[version], asked, sampling)
        assert {stretch.version for _, answer in pairs for stretch in answer.versions} == {version - 1, version}
        across = [(one, answer) for one, answer in pairs if len(answer.versions) == 2]
        if across:
            break
    assert across
    for one, answer in across[:12]:
        early, late = answer.versions
        assert (early.version, late.version) == (version - 1, version)
        for stretch, part in ((early, slice(0, early.length)), (late, slice(early.length, None))):
            wanted = policy_logprobs(weights[stretch.version], one, answer)[part]
            torch.testing.assert_close(answer.logprobs[part], wanted, atol=1e-4, rtol=1e-4)


def test_without_partial_responses_end_before_the_new_weights(config: Config, server: None) -> None:
    """Also where more is queued at the server than runs there: that waits, and none is dropped."""
    notes: list[str] = []
    engine, weights = open_ahead(config, False, notes), in_turn(config)
    asked, sampling = prompts(config)[:4] * 60, SamplingParams(n=4, max_tokens=16, seed=4)
    assert 4 * len(asked) > config.rollout.max_batch_sequences
    by_version: dict[int, list[tuple[Prompt, Completion]]] = {}
    for version in range(2, 6):
        pairs = answers_across(engine, weights[version], asked, sampling)
        assert len(pairs) == 4 * len(asked)
        assert all(len(answer.versions) == 1 for _, answer in pairs)
        by_version = {
            own: [pair for pair in pairs if pair[1].versions[0].version == own] for own in (version - 1, version)
        }
        assert sum(map(len, by_version.values())) == len(pairs)
        if all(by_version.values()):
            break
    assert all(by_version.values())
    for version, pairs in by_version.items():
        for one, answer in pairs[-6:]:
            wanted = policy_logprobs(weights[version], one, answer)
            torch.testing.assert_close(answer.logprobs, wanted, atol=1e-4, rtol=1e-4)
    assert not notes


def told_by(config: Config, metric: str) -> float:
    """A sum of the server's own metrics."""
    (url,) = config.rollout.server.urls
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {server_key(url, None)}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}{{"))


def test_what_is_not_needed_is_dropped(config: Config, server: None) -> None:
    """A quarter of the prompts is; the server works on none of the others then, and takes new weights right away."""
    path = config.model.path
    assert path is not None
    notes: list[str] = []
    batches = config.rollout.model_copy(update={"max_batch_sequences": 4000})  # all is queued at the server at once
    engine = ServerEngine(path, make_tokenizer(), config.model_copy(update={"rollout": batches}), note=notes.append)
    asked, sampling = prompts(config)[:4] * 60, SamplingParams(n=4, max_tokens=16, seed=4)

    def ask_for_more() -> None:
        found = engine.generate(asked, sampling, CallOptions(completion_fraction=1 / 4))
        assert sorted(map(len, found)) == [0] * 180 + [4] * 60

    for _ in range(4):  # on a busy machine it may have answered everything by the time it hears of it
        before = told_by(config, "request_success_total")
        ask_for_more()
        assert engine.generate(asked[:1], sampling)[0]
        until = time.monotonic() + 60
        while told_by(config, "num_requests_running") + told_by(config, "num_requests_waiting"):
            assert time.monotonic() < until
            time.sleep(0.1)
        if told_by(config, "request_success_total") - before < 4 * len(asked):
            break
    else:
        pytest.fail("the server answered every prompt")
    ask_for_more()
    learner = in_turn(config)[2]
    engine.update_weights(learner.policy.named_weights())
    for answer in engine.generate(asked[:1], sampling)[0]:
        assert [stretch.version for stretch in answer.versions] == [2]
        torch.testing.assert_close(answer.logprobs, policy_logprobs(learner, asked[0], answer), atol=1e-4, rtol=1e-4)
    assert not notes


def test_a_damaged_file_is_not_loaded(config: Config, server: None) -> None:
    assert config.model.path is not None
    engine = ServerEngine(config.model.path, make_tokenizer(), config)
    (address,), (path,) = engine.pool.servers, engine.transfer.folder.glob("*.safetensors")
    _, published = engine.transfer._published
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:])
    with pytest.raises(ServerError, match="checksum"):
        run(engine.transfer._load(address, published, is_halfway=False))
    path.write_bytes(whole)
    run(engine.transfer._load(address, published, is_halfway=True))


def wait_for(config: Config) -> Server:
    server = Server(config.rollout.server.urls[0], config.rollout.server)
    for _ in range(2000):
        try:
            run(server.get("/health"))
        except ServerError:
            time.sleep(0.2)
        else:
            break
    return server


def test_it_belongs_to_one_run(config: Config, server: None) -> None:
    """And to the next at once when the one that has it is killed."""
    assert config.model.path is not None
    program = "import json, sys, time; from dapo_runner.rollout.client import Server; "
    program += "from dapo_runner.rollout.guard import CLAIM; "
    program += "from dapo_runner.config.rollout import ServerConfig; one = Server(sys.argv[1], ServerConfig()); "
    program += "from dapo_runner.http import run\n"
    program += "while True: run(one.post(CLAIM, json.loads(sys.argv[2]))); print('claimed', flush=True); time.sleep(1)"
    sizes = AutoConfig.from_pretrained(config.model.path)
    model = model_facts(sizes, "float32", float32_logits=True, batch_invariant=False)
    claim = json.dumps({"token": "another", "owner": "the other", "model": model})
    (url,) = config.rollout.server.urls
    wait_for(config)
    with subprocess.Popen([sys.executable, "-c", program, url, claim], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(RolloutError, match="the other"):
            ServerEngine(config.model.path, make_tokenizer(), config)
        other.kill()
    assert ServerEngine(config.model.path, make_tokenizer(), config).generate(
        prompts(config)[:1], SamplingParams(n=1, max_tokens=4)
    )


def test_another_model_is_refused(config: Config, server: None, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    other = make_model(SHAPE.model_copy(update={"hidden_size": 2 * SHAPE.hidden_size}), tokenizer, max_positions=256)
    wait_for(config)
    with pytest.raises(RolloutError, match=r"model\.path"):
        ServerEngine(save_model(other, tokenizer, tmp_path), tokenizer, config)


def test_every_path_requires_the_key(
    config: Config, server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (url,) = config.rollout.server.urls
    own = wait_for(config)
    with pytest.raises(ServerError, match="no run has claimed"):
        run(own.post("/collective_rpc", {"method": "check_health"}))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    stranger = Server(url, config.rollout.server)
    run(stranger.get("/health"))
    paths = ["/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate", "/init_weight_transfer_engine"]
    for path in (*paths, "/metrics", "/openapi.json", "/nowhere"):
        with pytest.raises(ServerError, match="HTTP 401"):
            run(stranger.post(path))
    web_page = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    request = urllib.request.Request(f"{url}/collective_rpc", b'{"method": "sleep"}', web_page)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=60)


def test_weights_by_nccl(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo in NCCL's place: updates, another trainer between them, a server that is started anew."""
    monkeypatch.setattr(pool, "RENEW", 60.0)
    monkeypatch.setattr(nccl, "make_unique_id", gloo_for_nccl.make_unique_id)
    gloo_for_nccl.replace(monkeypatch.setattr)
    gloo_for_nccl.replace_streams(monkeypatch.setattr)
    path, url = config.model.path, free_address()
    assert path is not None
    servers = config.rollout.server.model_copy(update={"urls": [url], "transfer": "nccl", "folder": tmp_path / "none"})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": servers})})
    command = [sys.executable, "-m", PROGRAM, *server_arguments(config, path, CPU, url)]
    command.append("--worker-extension-cls=gloo_for_nccl.Extension")
    places = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**server_environment(config, url), gloo_for_nccl.SWITCH: "1", "PYTHONPATH": places}
    learner = Learner(load_policy(path, ModelConfig(path="x", dtype="float32"), CPU), config)
    probe = SyncProbe(prompts(config), config)
    with running(command, tmp_path / "log", **environment):
        engine = ServerEngine(path, make_tokenizer(), config)
        (server,) = engine.pool.servers
        groups = [engine.transfer._groups[server]]
        for _ in range(2):
            change(learner)
            with pytest.raises(OutOfSyncError):
                probe(engine, learner)
            engine.update_weights(learner.policy.named_weights())
            assert probe(engine, learner)["gap"] < 1e-4
            groups.append(engine.transfer._groups[server])
        assert len(set(groups)) == 1
        for request in ("/pause", "/start_weight_update"):  # as one that was killed has left it
            run(server.post(request))
        run(server.post(RELEASE))
        ServerEngine(path, make_tokenizer(), config).close()  # gives it the weights of the beginning
        assert probe(engine, learner)["gap"] < 1e-4
        assert run(server.get("/weight_info")) == {"weight_version": engine.transfer.version}
    with running(command, tmp_path / "log", **environment):
        assert probe(engine, learner)["gap"] < 1e-4
    assert not (tmp_path / "none").exists()
