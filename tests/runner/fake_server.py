"""What `vllm serve` says, said by a tiny model under the hf engine on a port of this machine; and it can be killed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl

import torch
from safetensors.torch import load_file

from dapo_runner.config import ModelConfig
from dapo_runner.policy.model import load_model
from dapo_runner.rollout.guard import CLAIM, RELEASE, RUN, Ownership, model_facts
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.transfer import checksum
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import Completion, Prompt, SamplingParams

GENERATE, UPDATE = "/inference/v1/generate", "/collective_rpc"  # by file
Hook = Callable[[dict[str, Any]], tuple[int, Any] | None]


class FakeServer:
    """``hooks`` by path are called with a request's body, or what stands behind its ``?``, before it is answered, and
    may answer in its place.
    """

    def __init__(self, model: Path) -> None:
        # Once: transformers changes its classes while it loads, so that two threads must not at the same time.
        self.weights = load_model(model, ModelConfig(path="x", dtype="float32"), torch.device("cpu"), "sdpa")
        self.dtype = "float32"  # that it states to a trainer
        self.hooks: dict[str, Hook] = {}
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []  # path, body, headers
        self.alive = False
        self.halfway: Callable[[], None] | None = None  # called in the midst of each answer
        self.queries: list[str] = []  # whole paths
        self._running, self._draining = 0, False  # answers under way, and whether a pause waits for them
        self._port = 0
        self._connections: set[socket.socket] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """With the weights of the folder, and of nobody's version."""
        self.engine = HFEngine(deepcopy(self.weights), make_tokenizer())
        self.version, self.paused, self.updating = "default", False, False
        self.ownership = Ownership()
        self._turn = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        self._http.daemon_threads = True
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
        self.alive = True

    def kill(self) -> None:
        """In the midst of whatever it does."""
        if not self.alive:
            return
        self.alive = False
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def seen(self, path: str) -> int:
        return sum(asked == path for asked, *_ in self.asked)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON."""
        if path in self.hooks and (said := self.hooks[path](body)) is not None:
            return said
        if not self.alive:
            return 503, {}
        if path == GENERATE:
            return 200, self.generate(body)
        if path == "/start_weight_update":
            if self.updating:
                return 500, {"error": "a weight update is already active"}
            self.updating = True
        elif path == UPDATE:
            file, expected = body["args"]
            if str(checksum(Path(file))) != expected:
                return 500, {"error": f"{file}: its checksum differs"}
            with self._turn:
                self.engine.update_weights(load_file(file).items())
        elif path == "/finish_weight_update":
            self.updating = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path in ("/pause", "/resume"):
            with self._turn:
                self.paused, self._draining = path == "/pause", body.get("mode") == "wait"
            while self._draining and self._running and self.alive:
                time.sleep(0.001)
            self._draining = False
        states = {"weight_version": self.version, "is_paused": self.paused, "success": True}
        return 200, states

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        while not self._admitted():
            time.sleep(0.001)
        try:
            return self._generate(body)
        finally:
            with self._turn:
                self._running -= 1

    def _admitted(self) -> bool:
        with self._turn:
            self._running += not self.paused
            return not self.paused

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        asked, tokens = body["sampling_params"], tuple(body["token_ids"])
        sampling = SamplingParams(asked["n"], asked["temperature"], max_tokens=asked["max_tokens"], seed=asked["seed"])
        if self.halfway is None:
            found, version = self._say(tokens, sampling)
            return {"choices": [_choice(index, [(one, version)]) for index, one in enumerate(found)]}
        half = replace(sampling, max_tokens=sampling.max_tokens // 2)
        found, version = self._say(tokens, half)
        self.halfway()
        choices = []
        for index, one in enumerate(found):
            parts = [(one, version)]
            if one.finish_reason == "length":
                begun = (*tokens, *one.token_ids.tolist())
                (rest,), later = self._say(begun, replace(half, n=1, seed=half.seed + index + 1))
                parts.append((rest, later))
            choices.append(_choice(index, parts))
        return {"choices": choices}

    def _say(self, tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[list[Completion], str]:
        while self.paused and not self._draining:
            time.sleep(0.001)
        with self._turn:
            return self.engine.generate([Prompt("", tokens, "", "")], sampling)[0], self.version

    def refuse(self, path: str, body: dict[str, Any], token: str) -> tuple[int, dict[str, str]] | None:
        """Return the status and body of the guard's answer, where that is not the server's."""
        if path == CLAIM:
            is_wide = body["model"]["float32_logits"]
            facts = model_facts(self.weights.config, self.dtype, is_wide, batch_invariant=False)
            why = asyncio.run(self.ownership.claim(body, facts))
            return (403, {"error": why}) if why else (200, {})
        why = self.ownership.refuse(path, token)
        return (409, {"error": why}) if why else (200, {}) if path == RELEASE else None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

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
                server.queries.append(self.path)
                if length := int(self.headers.get("Content-Length", 0)):
                    with suppress(ValueError):  # killed
                        body |= json.loads(self.rfile.read(length))
                server.asked.append((path, body, dict(self.headers)))
                hooked = path in (CLAIM, RELEASE) and path in server.hooks
                refused = None if hooked else server.refuse(path, body, self.headers.get(RUN, ""))
                status, said = refused or server.answer(path, body)
                raw = b"" if path == "/health" else json.dumps(said).encode()
                with suppress(OSError):  # nobody waits for it any more
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def _choice(index: int, parts: list[tuple[Completion, str]]) -> dict[str, Any]:
    """``parts`` of a response with the versions that gave them."""
    spans, start = [], 0
    for part, version in parts:
        spans.append({"version": version, "start": start, "end": start + part.length})
        start += part.length
    logprobs = [logprob for part, _ in parts for logprob in part.logprobs.tolist()]
    return {
        "index": index,
        "token_ids": [token for part, _ in parts for token in part.token_ids.tolist()],
        "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
        "finish_reason": parts[-1][0].finish_reason,
        "weight_versions": spans,
    }
