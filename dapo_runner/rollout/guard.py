"""What `dapo serve` puts in front of vLLM: nothing without the key, and weights from one run at a time."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

CLAIM, RELEASE = "/dapo/claim", "/dapo/release"
RUN = "Dapo-Run"  # the header with a run's token
LEASE = 15.0  # seconds that a claim holds
RENEW = 4.0  # seconds after which a run renews its claims
# The paths that change weights, or the answers under way.
OWNED = {
    *("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
}


def model_sizes(text_config: Any) -> dict[str, Any]:
    """Return the numbers of a transformers configuration that two models with exchangeable weights share."""
    return {name: getattr(text_config, name, None) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}


class Ownership:
    """The run that a server belongs to, until it releases the server or has not renewed its claim for ``LEASE`` s.

    A claim has the ``token`` of a run, which its ranks share, its ``owner`` in words, and the ``model``'s sizes.
    """

    def __init__(self) -> None:
        self.token = self.owner = ""
        self.until = 0.0
        self.n_requests = 0  # of its run, under way
        self.n_claims = 0

    async def claim(self, claim: dict[str, Any], model: dict[str, Any]) -> str | None:
        """Give a server of ``model`` to the run of ``claim``, or return why not. Waits for the end of a killed run."""
        if claim["model"] != model:
            return f"model.path: must be a model of the server's size, {model}, got {claim['model']}"
        n_claims = self.n_claims
        while self._belongs_to_another(claim["token"]):
            if self.n_claims != n_claims:  # its run is alive
                return f"in use by {self.owner}. A server belongs to one run: give each its own, or end the other."
            await asyncio.sleep(0.05)
        self.token, self.owner, self.until = claim["token"], claim["owner"], time.monotonic() + LEASE
        self.n_claims += 1
        return None

    def refuse(self, path: str, token: str) -> str | None:
        """Return why a request may not be made, if so. One to ``RELEASE`` ends the claim."""
        if path not in OWNED | {RELEASE}:
            return None
        if self._belongs_to_another(token):
            return f"in use by {self.owner}"
        if token != self.token or time.monotonic() > self.until:
            return f"no run has claimed this server by POST {CLAIM}"
        if path == RELEASE:
            self.until = 0.0
        return None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the claim for as long as a request takes."""
        self.n_requests += 1
        try:
            yield
        finally:
            self.n_requests -= 1
            if self.until:  # else released
                self.until = time.monotonic() + LEASE

    def _belongs_to_another(self, token: str) -> bool:
        return (time.monotonic() < self.until or self.n_requests > 0) and token != self.token


class Guard:
    """ASGI middleware. Every path but /health requires the key, also for websockets and for a browser's preflight.

    vLLM's own key leaves open the paths that replace weights and call workers' methods.
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
        path, headers = scope["path"], dict(scope["headers"])
        token = headers.get(RUN.lower().encode(), b"").decode("latin-1")
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.wanted):
            await _answer(scope, send, 401, "Unauthorized")
        elif path == CLAIM:
            sizes = model_sizes(scope["app"].state.engine_client.model_config.hf_text_config)
            why = await self.ownership.claim(await _read_json(receive), sizes)
            await _answer(scope, send, 403 if why else 200, why)
        elif (why := self.ownership.refuse(path, token)) or path == RELEASE:
            await _answer(scope, send, 409 if why else 200, why)
        else:
            with self.ownership.kept() if path in OWNED else nullcontext():
                await self.app(scope, receive, send)


async def _read_json(receive: Any) -> Any:
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return json.loads(body)


async def _answer(scope: Any, send: Any, status: int, error: str | None) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    raw = json.dumps({"error": error} if error else {}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
