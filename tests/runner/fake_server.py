"""`vllm serve` on a port of this machine, with a small engine behind it. It can be killed, and fail in other ways."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import torch
from transformers import AutoConfig

from dapo_runner.config import ModelConfig
from dapo_runner.engines.guard import CLAIM, RELEASE, RUN, Ownership, model_facts
from dapo_runner.engines.hf import HFEngine
from dapo_runner.engines.receiver import Receiver
from dapo_runner.policy.model import load_model
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import Completion, Prompt, RolloutRequest, SamplingParams

GENERATE, UPDATE = "/inference/v1/generate", "/collective_rpc"  # UPDATE: by file
Answer = tuple[int, Any] | Iterable[bytes]  # status and JSON, or the parts of a raw HTTP answer
Hook = Callable[[dict[str, Any]], Answer | None]


class FakeServer:
    """``hooks`` by path get a request's body and its query, and may answer in the place of the server."""

    def __init__(self, model: Path, engine: Callable[[], Any] | None = None) -> None:
        """Answer with the transformers engine of ``model``, or with what ``engine`` returns at every start."""
        self.config, self.dtype = AutoConfig.from_pretrained(model), "float32"
        self.limits: dict[str, int] = {}  # if they are not those of the claim
        if engine is None:
            # Once: transformers changes its classes while it loads, so that two threads must not at the same time.
            weights = load_model(model, ModelConfig(path="x", dtype="float32"), torch.device("cpu"), "sdpa")
            engine = lambda: HFEngine(deepcopy(weights), make_tokenizer(), 64)  # noqa: E731
        self._make_engine = engine
        self.hooks: dict[str, Hook] = {}
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []  # path, body, headers
        self.halfway: Callable[[], None] | None = None  # called in the midst of each answer to a prompt
        self._changed = threading.Condition()
        self._running, self._draining = 0, False  # answers under way, and whether a pause waits for them
        self._port = 0
        self._connections: set[socket.socket] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start with the weights of the model, as `dapo serve` does."""
        self.engine, self.ownership = self._make_engine(), Ownership()
        self.version, self.paused, self.updating = "default", False, False
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), _handler(self))
        self._http.daemon_threads = True
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
        self.alive = True

    def kill(self) -> None:
        """End in the midst of all requests."""
        if self.alive:
            self.alive = False
            self._http.shutdown()
            self._http.server_close()
            for connection in list(self._connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def seen(self, path: str) -> int:
        return sum(asked == path for asked, *_ in self.asked)

    def answer(self, path: str, body: dict[str, Any], token: str) -> Answer:
        if path in self.hooks and (found := self.hooks[path](body)) is not None:
            return found
        if path == CLAIM:
            facts = model_facts(self.config, self.dtype, body["model"]["float32_logits"], batch_invariant=False)
            reason = asyncio.run(self.ownership.claim(body, facts, body["limits"] | self.limits))
            return (403, {"error": reason}) if reason else (200, {})
        if (reason := self.ownership.refuse(path, token)) or path == RELEASE:
            return 409 if reason else 200, {"error": reason}
        if path == GENERATE:
            return 200, self.generate(body)
        with self._changed:
            return self._change(path, body)

    def _change(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/start_weight_update":
            if self.updating:
                return 500, {"error": "a weight update is already active"}
            self.updating = True
        elif path == UPDATE:
            worker: Any = SimpleNamespace(device=torch.device("meta"), reload_weights=self._reload)
            try:
                Receiver.load_weights_file(worker, *body["args"])
            except (OSError, ValueError) as error:
                return 500, {"error": str(error)}
        elif path == "/finish_weight_update":
            self.updating = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path in ("/pause", "/resume"):
            self.paused, self._draining = path == "/pause", body.get("mode") == "wait"
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._draining and self._running))
            self._draining = False
        return 200, {"weight_version": self.version, "is_paused": self.paused, "success": True}

    def _reload(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine.update_weights(weights_iterator)

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: not self.paused)
            self._running += 1
        try:
            return {"choices": self._choices(body["sampling_params"], tuple(body["token_ids"]))}
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _choices(self, asked: dict[str, Any], tokens: tuple[int, ...]) -> list[dict[str, Any]]:
        sampling = SamplingParams(asked["n"], asked["temperature"], max_tokens=asked["max_tokens"], seed=asked["seed"])
        if self.halfway is None:
            return [_choice(index, [part]) for index, part in enumerate(self._sample(tokens, sampling))]
        half = replace(sampling, max_tokens=sampling.max_tokens // 2)
        begun = [[part] for part in self._sample(tokens, half)]
        self.halfway()
        for index, parts in enumerate(begun):
            if (first := parts[0][0]).finish_reason == "length":
                longer = (*tokens, *first.token_ids.tolist())
                parts += self._sample(longer, replace(half, n=1, seed=half.seed + index + 1))
        return [_choice(index, parts) for index, parts in enumerate(begun)]

    def _sample(self, tokens: tuple[int, ...], sampling: SamplingParams) -> list[tuple[Completion, str]]:
        with self._changed:
            self._changed.wait_for(lambda: not self.paused or self._draining)
            (group,) = self.engine.generate([RolloutRequest(0, Prompt("", tokens, "", ""), sampling)])
            return [(one, self.version) for one in group]


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            server._connections.add(self.connection)

        def finish(self) -> None:
            server._connections.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            body: dict[str, Any] = dict(parse_qsl(query))
            with suppress(ValueError, OSError):  # killed meanwhile, or nobody waits for it any more
                body |= json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                server.asked.append((path, body, dict(self.headers)))
                for part in _encode(server.answer(path, body, self.headers.get(RUN, ""))):
                    self.wfile.write(part)

        do_POST = do_GET  # noqa: N815

    return Handler


def _encode(answer: Answer) -> Iterable[bytes]:
    if not isinstance(answer, tuple):
        return answer
    raw = json.dumps(answer[1]).encode()
    return [f"HTTP/1.0 {answer[0]} -\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw]


def _choice(index: int, parts: list[tuple[Completion, str]]) -> dict[str, Any]:
    """Return a response of ``parts``, each with the version of the weights that sampled it."""
    spans, start = [], 0
    for part, version in parts:
        spans.append({"version": version, "start": start, "end": start + part.length})
        start += part.length
    return {
        "index": index,
        "token_ids": [token for part, _ in parts for token in part.token_ids.tolist()],
        "logprobs": {"content": [{"logprob": value} for part, _ in parts for value in part.logprobs.tolist()]},
        "finish_reason": parts[-1][0].finish_reason,
        "weight_versions": spans,
    }
