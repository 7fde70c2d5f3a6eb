"""A real `vllm serve` on a CPU, started by `dapo serve`: what it answers is what the engine in this process does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gloo_for_nccl
import pytest
import torch
from served import in_thread, wait_until
from test_vllm import CPU, change, load_learner, policy_logprobs, pytestmark, tiny, tiny_config
from transformers import AutoConfig

from dapo_runner.algorithms.learner import Learner
from dapo_runner.commands.serve import PROGRAM, server_arguments, server_environment
from dapo_runner.config import Config, dump_config
from dapo_runner.config.rollout import CorrectionConfig
from dapo_runner.engines import pool
from dapo_runner.engines.client import RefusedError, Server, ServerError, key_file, server_key
from dapo_runner.engines.engine import Note
from dapo_runner.engines.guard import CLAIM, OWNED, RELEASE, model_facts, server_limits
from dapo_runner.engines.server import TRANSFERS, ServerEngine
from dapo_runner.engines.vllm import VLLMEngine
from dapo_runner.http import run
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import Completion, Prompt, RolloutRequest, SamplingParams, make_requests

__all__ = ["pytestmark", "tiny"]


@pytest.fixture(scope="module", autouse=True)
def _keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    run = {"output_dir": str(tmp_path_factory.mktemp("runs")), "device": "cpu"}
    server = {"urls": [free_address()], "sync_timeout": 600.0}
    return tiny_config(tiny, run=run, rollout={"engine": "server", "server": server})


def with_rollout(config: Config, **values: Any) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=values)})


@pytest.fixture(scope="module")
def server(config: Config, python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Under way; the engine waits for it. It serves synchronous and asynchronous rollouts."""
    folder = tmp_path_factory.mktemp("serve")
    recipe = folder / "recipe.yaml"
    ahead = with_rollout(config, max_staleness=1, correction=CorrectionConfig(weights="token"))
    recipe.write_text(dump_config(ahead))
    with running([python, "-m", "dapo_runner", "serve", str(recipe)], folder / "log"):
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


def prompts() -> list[Prompt]:
    tokenizer = make_tokenizer()
    texts = ("1+1=", "123+45678=", "12+34=", "7", "12+34=" * 25)
    return [Prompt(text, tuple(tokenizer(text)["input_ids"]), text, "") for text in texts]


def assert_alike(found: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


Opener = Callable[..., ServerEngine]


def open_over(config: Config, note: Note = print) -> ServerEngine:
    return ServerEngine(str(config.model.path), make_tokenizer(), config, SINGLE_PROCESS, note)


@pytest.fixture
def open_engine(config: Config, server: None) -> Iterator[Opener]:
    """Return what opens engines over the server, which is let go for the next test."""
    opened: list[ServerEngine] = []

    def start(of: Config = config, note: Note = print) -> ServerEngine:
        opened.append(open_over(of, note))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()


def test_it_is_the_engine_of_this_process(config: Config, open_engine: Opener) -> None:
    """Tokens, log-probs, stop strings and greedy responses, before and after new weights; the version is checked."""
    asked, engine, learner = prompts(), open_engine(), load_learner(config)
    probe = SyncProbe(asked, config)
    inside = VLLMEngine(str(config.model.path), make_tokenizer(), config, CPU, SINGLE_PROCESS)
    sampling = SamplingParams(n=4, max_tokens=12, seed=3)
    varied: list[dict[str, Any]] = [{}, {"stop": ("2", "9")}, {"temperature": 0.0}, {"top_p": 0.7}, {}]
    each = [replace(sampling, **fields) for fields in varied]
    requests = list(map(RolloutRequest, range(5), asked, each))
    before = engine.generate(requests)
    assert_alike(before, inside.generate(requests))

    change(learner)
    with pytest.raises(OutOfSyncError):
        probe(engine, learner)
    for one in (engine, inside):
        one.update_weights(learner.policy.named_weights())
    assert probe(engine, learner)["gap"] < 1e-4
    after = engine.generate(requests)
    assert_alike(after, inside.generate(requests))
    assert [one.token_ids.tolist() for one in after[0]] != [one.token_ids.tolist() for one in before[0]]
    for one in after[-1]:  # longer than a block of the prefix cache
        torch.testing.assert_close(one.logprobs, policy_logprobs(learner, asked[-1], one), atol=1e-4, rtol=1e-4)

    (address,) = engine.pool.servers
    assert run(address.get("/weight_info")) == {"weight_version": engine.transfer.version}


def in_turn(config: Config) -> dict[int, Learner]:
    """The weights of twelve updates: those of the model's folder and others."""
    first, second = load_learner(config), load_learner(config)
    change(second)
    return {version: first if version % 2 else second for version in range(1, 13)}


def answers_across(
    engine: ServerEngine, config: Config, learner: Learner, asked: list[Prompt], sampling: SamplingParams
) -> list[tuple[Prompt, Completion]]:
    """Return those of a call in the midst of which new weights come."""
    before = read_metric(config, "request_success_total")
    found = in_thread(lambda: engine.generate(make_requests(asked, sampling)))
    wait_until(lambda: read_metric(config, "request_success_total") > before)
    engine.update_weights(learner.policy.named_weights())
    return [(one, answer) for one, group in zip(asked, found(), strict=True) for answer in group]


@pytest.mark.parametrize("partial", [True, False])
def test_weights_in_flight(partial: bool, config: Config, open_engine: Opener) -> None:
    """Every token has its log-prob under the weights that gave it. With ``partial`` responses go on, all before it
    computed anew; without they end before, also where more is queued at the server than runs there.
    """
    notes: list[str] = []
    engine = open_engine(with_rollout(config, max_staleness=1, partial=partial), note=notes.append)
    weights = in_turn(config)
    asked, sampling = prompts()[:4] * 60, SamplingParams(n=4, max_tokens=16, seed=4)
    assert 4 * len(asked) > config.rollout.max_batch_sequences
    for version in range(2, 13):  # on a busy machine no response may be under way in the moment of the swap
        pairs = answers_across(engine, config, weights[version], asked, sampling)
        assert len(pairs) == 4 * len(asked)
        spans = [tuple(span.version for span in answer.versions) for _, answer in pairs]
        expected = {(version - 1,), (version,)} | ({(version - 1, version)} if partial else set())
        assert set(spans) <= expected
        if set(spans) == expected:
            break
    assert set(spans) == expected
    for own in expected:
        chosen = [pair for pair, versions in zip(pairs, spans, strict=True) if versions == own]
        for one, answer in chosen[-6:]:
            start = 0
            for span in answer.versions:
                part = slice(start, start := start + span.length)
                wanted = policy_logprobs(weights[span.version], one, answer)[part]
                torch.testing.assert_close(answer.logprobs[part], wanted, atol=1e-4, rtol=1e-4)
    assert not notes


def read_metric(config: Config, metric: str) -> float:
    """A sum of the server's own metrics."""
    (url,) = config.rollout.server.urls
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {server_key(url, None)}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}{{"))


def test_what_is_not_needed_is_dropped(config: Config, open_engine: Opener) -> None:
    """A call that is closed leaves the server nothing to do, and it takes new weights right away."""
    notes: list[str] = []
    engine = open_engine(note=notes.append)
    asked, sampling = prompts()[:4] * 60, SamplingParams(n=1, max_tokens=160, seed=4)
    engine.generate(make_requests(asked[:1], replace(sampling, max_tokens=1)))
    notes.clear()  # of a server that was still starting
    n_before = read_metric(config, "request_success_total")
    call = engine.open_call(None, lambda: None, len(asked))
    for key, request in enumerate(make_requests(asked, sampling)):
        call.add(key, request)
    wait_until(lambda: read_metric(config, "num_requests_running") > 0)
    call.close()
    wait_until(lambda: not sum(read_metric(config, f"num_requests_{state}") for state in ("running", "waiting")))
    assert read_metric(config, "request_success_total") < n_before + len(asked)
    learner = in_turn(config)[2]
    engine.update_weights(learner.policy.named_weights())
    for answer in engine.generate(make_requests(asked[:1], replace(sampling, max_tokens=16)))[0]:
        torch.testing.assert_close(answer.logprobs, policy_logprobs(learner, asked[0], answer), atol=1e-4, rtol=1e-4)
    assert not notes


def test_the_guard_of_a_real_server(
    config: Config, server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It belongs to one run, with its model and limits, until that is killed. Without the key nothing is answered."""
    (url,), sizes = config.rollout.server.urls, AutoConfig.from_pretrained(config.model.path)
    own = Server(url, config.rollout.server, "another")
    wait_until(lambda: is_healthy(own))
    with pytest.raises(ServerError, match="409"):
        run(own.post("/collective_rpc", {"method": "check_health"}))
    facts = [model_facts(sizes, "float32", is_wide, batch_invariant=False) for is_wide in (False, True)]
    limits = server_limits(config.longest_sequence, config.rollout.max_batch_sequences, has_priorities=True)
    claims = [{"token": "another", "owner": "the other", "model": model, "limits": limits} for model in facts]
    with pytest.raises(RefusedError, match="float32_logits False, got True"):
        run(own.post(CLAIM, claims[0]))
    for name, limit in limits.items():
        with pytest.raises(RefusedError, match=name):
            run(own.post(CLAIM, claims[1] | {"limits": limits | {name: limit + 1}}))
    run(own.post(CLAIM, claims[1]))
    run(own.post("/collective_rpc", {"method": "check_health"}))
    with pytest.raises(ServerError, match="the other"):
        run(Server(url, config.rollout.server).post("/pause"))
    waited = open_over(config)  # for the end of the lease
    assert waited.generate(make_requests(prompts()[:1], SamplingParams(n=1, max_tokens=4)))
    file = next(waited.transfer.folder.glob("*.safetensors"))
    for path, reason in ((file, "checksum"), (tmp_path / "nowhere" / file.name, r"rollout\.server\.folder")):
        load = {"method": "load_weights_file", "args": [str(path), "1"]}
        with pytest.raises(ServerError, match=reason):
            run(waited.pool.servers[0].post("/collective_rpc", load))
    waited.close()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with_another_key = Server(url, config.rollout.server, "another")
    for path in (*OWNED, "/inference/v1/generate", "/metrics", "/openapi.json", "/nowhere"):
        with pytest.raises(ServerError, match="401"):
            run(with_another_key.post(path))


def is_healthy(server: Server) -> bool:
    with suppress(ServerError):
        return run(server.get("/health")) is None
    return False


def test_weights_by_nccl(config: Config, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo in NCCL's place: updates, another trainer between them, a server that is started anew."""
    monkeypatch.setitem(TRANSFERS, "nccl", gloo_for_nccl.Transfer)
    gloo_for_nccl.replace(monkeypatch.setattr)
    gloo_for_nccl.replace_streams(monkeypatch.setattr)
    monkeypatch.setattr(pool, "RENEW", 60.0)
    path, url = str(config.model.path), free_address()
    servers = config.rollout.server.model_copy(update={"urls": [url], "transfer": "nccl", "folder": tmp_path / "none"})
    config = with_rollout(config, server=servers)
    command = [python, "-m", PROGRAM, *server_arguments(config, path, CPU, url)]
    command.append("--worker-extension-cls=gloo_for_nccl.Extension")
    places = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**server_environment(config, url), gloo_for_nccl.SWITCH: "1", "PYTHONPATH": places}
    learner, probe = load_learner(config), SyncProbe(prompts(), config)
    with running(command, tmp_path / "log", **environment):
        engine = open_over(config)
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
        open_over(config).close()  # gives it the weights of the beginning
        assert probe(engine, learner)["gap"] < 1e-4
        assert run(server.get("/weight_info")) == {"weight_version": engine.transfer.version}
    with running(command, tmp_path / "log", **environment):
        assert probe(engine, learner)["gap"] < 1e-4
    assert not (tmp_path / "none").exists()
