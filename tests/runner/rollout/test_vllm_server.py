"""A real `vllm serve` on a CPU, started by `dapo serve`: what it answers is what the engine in this process does."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import pytest
import torch
from builders import make_config, save_model
from test_vllm import CPU, SHAPE, change, policy_logprobs

from dapo_runner.config import Config, ModelConfig, dump_config
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout.client import RolloutError, Server
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.tasks.tiny import make_model, make_tokenizer
from dapo_runner.types import Completion, Prompt, SamplingParams
from dapo_runner.update.learner import Learner

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]
KEY = "DAPO_TEST_KEY"


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = {"urls": [f"http://127.0.0.1:{port}"], "key_env": KEY, "back_within": 400.0}
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
    os.environ[KEY] = "s3cret"
    folder = tmp_path_factory.mktemp("serve")
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_config(config))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "dapo_runner", "serve", str(recipe)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    yield
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "s3cret" not in (folder / "log").read_text()


def prompts(config: Config) -> list[Prompt]:
    tokenizer = make_tokenizer()
    texts = ("1+1=", "123+45678=", "12+34=", "7", "12+34=" * 25)
    return [Prompt(text, tuple(tokenizer(text)["input_ids"]), text, "") for text in texts]


def assert_alike(found: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


def test_it_is_the_engine_of_this_process(config: Config, server: None) -> None:
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

    (address,) = engine.servers
    assert address.get("/weight_info") == {"weight_version": engine.transfer.version}
    engine.updates += 1  # as if it had taken them
    engine.settings = engine.settings.model_copy(update={"attempts": 1})
    with pytest.raises(RolloutError, match=rf"answer of weights {engine.run}:3, got one of {engine.run}:2"):
        engine.generate(asked[:1], sampling)


def test_weights_in_flight(config: Config, server: None) -> None:
    """Responses go on, and every token has its log-prob under the weights that gave it, all before it computed anew."""
    path = config.model.path
    assert path is not None
    rollout = config.rollout.model_copy(update={"ahead": 1})
    engine = ServerEngine(path, make_tokenizer(), config.model_copy(update={"rollout": rollout}))
    first, second = (Learner(load_policy(path, ModelConfig(path="x", dtype="float32"), CPU), config) for _ in range(2))
    change(second)
    weights = {1: first, 2: second, 3: first, 4: second, 5: first}
    asked, sampling = prompts(config)[:4] * 60, SamplingParams(n=4, max_tokens=16, seed=4)
    across: list[tuple[Prompt, Completion]] = []
    for version in range(2, 6):  # on a busy machine no response may be under way in the moment of the swap
        found: list[list[Completion]] = []
        thread = threading.Thread(target=lambda found=found: found.extend(engine.generate(asked, sampling)))
        thread.start()
        while not any(queue.answers for queue in engine.calls):
            time.sleep(0.01)
        engine.update_weights(weights[version].policy.named_weights())
        thread.join(60)
        pairs = [(one, answer) for one, group in zip(asked, found, strict=True) for answer in group]
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


def test_weights_and_prompts_want_the_key(config: Config, server: None) -> None:
    stranger = Server(config.rollout.server.urls[0], config.rollout.server.model_copy(update={"key_env": None}))
    stranger.check_health()
    for path in ("/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate"):
        with pytest.raises(RolloutError, match="HTTP 401"):
            stranger.post(path)
