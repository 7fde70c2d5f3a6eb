"""The door of a server that `dapo serve` starts: nothing without the key, and weights from one run at a time."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import os
import time
from typing import Any

CLAIM = "/dapo/claim"
RUN = "Dapo-Run"  # the header with a run's token
GRACE = 2.0  # seconds that a claim waits for the end of another, as of a killed run that is started again
SIGN = 30  # seconds between the signs of life to a run; after some of them, TCP knows that its machine is gone
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
# What changes weights, or the answers under way.
OWNED = frozenset(
    f"/{name}"
    for name in (
        *("pause", "resume", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    )
)


def sizes(text_config: Any) -> dict[str, Any]:
    """Return those numbers of a transformers configuration that two models with exchangeable weights share."""
    return {name: getattr(text_config, name, None) for name in SIZES}


class Ownership:
    """The run that a server belongs to: the one whose claim came first, until the last of its claims has ended.

    A claim has the ``token`` of a run, which its ranks share, its ``owner`` in words, and the ``model``'s ``sizes``.
    """

    def __init__(self) -> None:
        self.token = self.owner = ""
        self.claims = 0

    def take(self, claim: dict[str, Any], model: dict[str, Any]) -> str | None:
        """Give a server of ``model`` to the run of ``claim``, or say why not."""
        if claim["model"] != model:
            return f"model.path: must be a model of the server's size, {model}, got {claim['model']}"
        if self.claims and self.token != claim["token"]:
            return f"in use by {self.owner}. A server belongs to one run: give each its own, or end the other."
        self.token, self.owner, self.claims = claim["token"], claim["owner"], self.claims + 1
        return None

    def leave(self) -> None:
        """End a claim."""
        self.claims -= 1

    def refuse(self, path: str, token: str) -> str | None:
        """Say why a request may not be made, if so."""
        if path not in OWNED or (self.claims and token == self.token):
            return None
        return f"in use by {self.owner}" if self.claims else f"no run has claimed this server by POST {CLAIM}"


class Guard:
    """ASGI middleware. Every path but /health requires the key, also for websockets and for a browser's preflight.

    vLLM's own key leaves open all that is not under /v1, /v2, /inference and /cohere, the paths that replace weights
    and call workers' methods among them.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        if not (key := os.environ.get("VLLM_API_KEY")):
            raise RuntimeError("VLLM_API_KEY: must hold the server's key. Start the server by `dapo serve`.")
        self.wanted = f"Bearer {key}".encode()
        self.ownership = Ownership()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.wanted):
            await _answer(scope, send, 401, {"error": "Unauthorized"})
        elif scope["path"] == CLAIM:
            await self._hold(scope["app"].state, receive, send)
        elif why := self.ownership.refuse(scope["path"], headers.get(RUN.lower().encode(), b"").decode("latin-1")):
            await _answer(scope, send, 409, {"error": why})
        else:
            await self.app(scope, receive, send)

    async def _hold(self, state: Any, receive: Any, send: Any) -> None:
        """Answer a claim for as long as the other end is there: the kernel closes the connection of a killed process.
        ``state`` is vLLM's of the application.
        """
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        claim, model = json.loads(body), sizes(state.engine_client.model_config.hf_text_config)
        until = time.monotonic() + GRACE
        while why := self.ownership.take(claim, model):
            if time.monotonic() > until:
                await _answer({"type": "http"}, send, 403, {"error": why})
                return
            await asyncio.sleep(0.1)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for second in itertools.count():
                if second % SIGN == 0:
                    await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                try:
                    message = await asyncio.wait_for(receive(), 1.0)
                except asyncio.TimeoutError:
                    if not state.server.should_exit:  # or it would wait for this request to be answered
                        continue
                    await send({"type": "http.response.body"})
                return
        finally:
            self.ownership.leave()


async def _answer(scope: Any, send: Any, status: int, content: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    raw = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
