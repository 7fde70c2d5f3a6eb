"""The door of a server that `dapo serve` starts: no request without the key."""

from __future__ import annotations

import hmac
import json
import os
from typing import Any


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

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            await self.app(scope, receive, send)
        elif not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.wanted):
            await _answer(scope, send, 401, {"error": "Unauthorized"})
        else:
            await self.app(scope, receive, send)


async def _answer(scope: Any, send: Any, status: int, content: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    raw = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
