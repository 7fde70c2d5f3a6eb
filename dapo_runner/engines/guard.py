"""Middleware of `dapo serve` in front of vLLM: require the key, and accept weights from one run at a time."""

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
LEASE = 15.0  # seconds that a claim lasts
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
SIZES += ["num_key_value_heads"]
# The paths that change weights or affect requests in progress.
OWNED = {
    *("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
}


def model_facts(text_config: Any, dtype: str, float32_logits: bool, batch_invariant: bool) -> dict[str, Any]:
    """Return facts that server and trainer must agree on: model sizes from a transformers configuration, numerics."""
    sizes = {name: size for name in SIZES if (size := getattr(text_config, name, None)) is not None}
    return sizes | {"dtype": dtype, "float32_logits": float32_logits, "batch_invariant": batch_invariant}


def server_limits(max_model_len: int, max_num_seqs: int, has_priorities: bool) -> dict[str, int]:
    """Return limits of vLLM that `dapo serve` sets. The server's must be at least those of the run's recipe."""
    return {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "priorities": int(has_priorities)}


async def _served_facts(client: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Return facts and limits of vLLM's engine ``client``. The workers report in which dtypes they compute logits."""
    model, heads = client.model_config, await client.collective_rpc("head_dtypes")
    is_wide = {dtype for worker in heads for dtype in worker} == {"torch.float32"}
    is_invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    facts = model_facts(model.hf_text_config, str(model.dtype).removeprefix("torch."), is_wide, is_invariant)
    scheduler = client.vllm_config.scheduler_config
    return facts, server_limits(model.max_model_len, scheduler.max_num_seqs, scheduler.policy == "priority")


class Ownership:
    """The run that owns a server, until it releases the server or does not renew its claim for LEASE seconds.

    A claim has the ``token`` of a run, shared by its ranks, its ``owner`` as text, its ``model_facts`` and ``limits``.
    """

    def __init__(self) -> None:
        self.token, self.owner, self.until = "", "", 0.0
        self.n_requests = 0  # of the owner, in progress
        self.n_renewals = 0

    async def claim(self, claim: dict[str, Any], model: dict[str, Any], limits: dict[str, int]) -> str | None:
        """Assign a server of these facts to the run of ``claim``, or return why not. Waits for a killed run's lease."""
        pairs = [(name, value, model.get(name, value)) for name, value in claim["model"].items()]
        if differences := [f"{name} {value}, got {served}" for name, value, served in pairs if served != value]:
            return f"model: expected {'; '.join(differences)}. Restart the server with this recipe."
        if any(limits[name] < needed for name, needed in claim["limits"].items()):
            return f"limits: expected at least {claim['limits']}, got {limits}. Restart the server with this recipe."
        n_renewals = self.n_renewals
        while self._belongs_to_another(claim["token"]):
            if self.n_renewals != n_renewals:  # the owner is alive
                return f"in use by {self.owner}. A server belongs to one run: give each its own, or end the other."
            await asyncio.sleep(0.05)
        self.n_renewals += claim["token"] == self.token
        self.token, self.owner, self.until = claim["token"], claim["owner"], time.monotonic() + LEASE
        return None

    def refuse(self, path: str, token: str) -> str | None:
        """Return why a request is refused, or None. A request to ``RELEASE`` ends the claim."""
        if path not in OWNED | {RELEASE}:
            return None
        if self._belongs_to_another(token):
            return f"in use by {self.owner}"
        if not token or token != self.token:  # the last owner is accepted also after its lease, until another claims
            return f"no run has claimed this server by POST {CLAIM}"
        if path == RELEASE:
            self.token, self.until = "", 0.0
        return None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the claim while a request is in progress."""
        self.n_requests += 1
        try:
            yield
        finally:
            self.n_requests -= 1
            if self.until:  # else it was released
                self.until = time.monotonic() + LEASE

    def _belongs_to_another(self, token: str) -> bool:
        return (time.monotonic() < self.until or self.n_requests > 0) and token != self.token


class Guard:
    """ASGI middleware. Every path but /health requires the key, also for websockets and CORS preflight requests.

    vLLM's own key does not protect the paths that replace weights and call methods of workers.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        if not (key := os.environ.get("VLLM_API_KEY")):
            raise RuntimeError("VLLM_API_KEY: must contain the server's key. Start the server with `dapo serve`.")
        self.wanted = f"Bearer {key}".encode()
        self.ownership = Ownership()
        self.served: tuple[dict[str, Any], dict[str, int]] | None = None  # ``_served_facts``, from the first claim on

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        path, headers = scope["path"], dict(scope["headers"])
        token = headers.get(RUN.lower().encode(), b"").decode("latin-1")
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.wanted):
            await _answer(scope, send, 401, "Unauthorized")
        elif path == CLAIM:
            self.served = self.served or await _served_facts(scope["app"].state.engine_client)
            reason = await self.ownership.claim(await _read_json(receive), *self.served)
            await _answer(scope, send, 403 if reason else 200, reason)
        elif (reason := self.ownership.refuse(path, token)) or path == RELEASE:
            await _answer(scope, send, 409 if reason else 200, reason)
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
