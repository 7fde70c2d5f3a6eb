"""Server engines over fake servers, and what their tests ask them."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import make_config
from fake_server import GENERATE, FakeServer, Hook
from small import small_recipe

from dapo_runner import threads
from dapo_runner.config import Config
from dapo_runner.engines.client import Server
from dapo_runner.engines.server import ServerEngine
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import Policy
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import Completion, Prompt, RolloutRequest, SamplingParams, make_requests

SAMPLING = SamplingParams(n=2, max_tokens=6, seed=5)
PROMPTS = [Prompt(str(i), (3 + i % 9, 4, 5 + i % 7), "", "") for i in range(24)]
REQUESTS = make_requests(PROMPTS, SAMPLING)


class HashEngine:
    """Tokens and log-probs are a hash of the weights, the prompt and the seed. Nothing is computed."""

    def __init__(self) -> None:
        self.weights = 0

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parts = [name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in weights]
        self.weights = zlib.crc32(b"".join(sorted(parts)))

    def generate(self, requests: list[RolloutRequest]) -> list[list[Completion]]:
        return [[self._respond(one.prompt, one.sampling, n) for n in range(one.sampling.n)] for one in requests]

    def _respond(self, prompt: Prompt, sampling: SamplingParams, sample: int) -> Completion:
        dice = random.Random(f"{self.weights}:{prompt.token_ids}:{sampling.seed}:{sample}")
        length = dice.randint(1, 2 * sampling.max_tokens)
        n = min(length, sampling.max_tokens)
        tokens, logprobs = [dice.randrange(3, 12) for _ in range(n)], [-dice.random() for _ in range(n)]
        return Completion(torch.tensor(tokens), torch.tensor(logprobs), "stop" if length == n else "length", "")


class Fleet:
    """Servers, and engines and runs over them."""

    def __init__(self, model: Path, servers: list[FakeServer], folder: Path) -> None:
        self.model, self.servers, self.folder = model, servers, folder
        self.over = threading.Event()  # the test is
        self.engines: list[ServerEngine] = []

    def close(self) -> None:
        self.over.set()
        for engine in self.engines:
            engine.close()
        for server in self.servers:
            server.kill()

    def __getitem__(self, index: int) -> FakeServer:
        return self.servers[index]

    def rollout(self, n: int, ahead: int, folder: Path | None = None, **server: Any) -> dict[str, Any]:
        """Return the settings of an engine over the first ``n`` servers, ``ahead`` steps asynchronous."""
        urls = [server.url for server in self.servers[:n]]
        return {
            "engine": "server",
            "server": {"urls": urls, "folder": str(folder or self.folder), **server},
            "max_staleness": ahead,
            "correction": {"weights": "token" if ahead else None},
        }

    def config(
        self,
        n: int = 2,
        folder: Path | None = None,
        ahead: int = 0,
        partial: bool = True,
        dtype: str = "float32",
        **server: Any,
    ) -> Config:
        return make_config(
            model={"tiny": None, "path": str(self.model), "dtype": dtype},
            rollout=self.rollout(n, ahead, folder, **server) | {"max_batch_sequences": 8, "partial": partial},
            evaluation={"k": 8},
        )

    def open(self, *over: Any, **settings: Any) -> ServerEngine:
        notes = list[str]()
        engine = ServerEngine(
            self.model, make_tokenizer(), self.config(*over, **settings), SINGLE_PROCESS, notes.append
        )
        engine.notes = notes
        self.engines.append(engine)
        return engine

    def hook(self, hook: Hook, path: str = GENERATE) -> None:
        for server in self.servers:
            server.hooks[path] = hook

    def hang(self, body: dict[str, Any]) -> None:
        """A hook that answers when the test is over."""
        self.over.wait(300)

    def recipe(self, ahead: int = 0, n: int = 2, **run: Any) -> dict[str, Any]:
        """Return a small run over the first ``n`` servers, ``ahead`` steps asynchronous."""
        raw = small_recipe(**{"output_dir": str(self.folder), "eval_every": 0} | run)
        raw["model"] = {"dtype": "float32", "path": str(self.model)}
        raw["sampler"] |= {"filter_groups": None} | ({"max_age": ahead} if ahead else {})
        raw["rollout"] |= self.rollout(n, ahead) | {"max_response_tokens": 6}
        return raw


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Call in another thread. Return what waits for its result."""
    return partial(threads.in_thread(call).result, 120)


def is_trial(body: dict[str, Any]) -> bool:
    """Return whether a prompt is the one that a server has to answer before it is used again."""
    return body["sampling_params"]["max_tokens"] == 1


def lost(engine: ServerEngine) -> list[Server]:
    return [server for server in engine.pool.servers if server.error is not None]


def responses(groups: Iterable[list[Completion]]) -> list[list[tuple[list[int], list[float]]]]:
    return [[(one.token_ids.tolist(), one.logprobs.tolist()) for one in group] for group in groups]


def moved(policy: Policy, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """Return the weights of a policy after a large update."""
    generator = torch.Generator().manual_seed(3)
    named = {name: tensor.clone() for name, tensor in policy.named_weights()}
    return {name: x + scale * x.std() * torch.randn(x.shape, generator=generator) for name, x in named.items()}
