"""One `vllm serve` process at its address, and how the run stands with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dapo_runner import http
from dapo_runner.config.rollout import ServerConfig
from dapo_runner.errors import RunError
from dapo_runner.rollout.guard import CLAIM, RELEASE, RUN
from dapo_runner.rollout.key import key_file, server_key

MAX_BYTES = 2**30  # of an answer: 140 for a token, so that a group of 16 responses of 20k tokens takes 46 MB
HEALTH_WITHIN = 10.0  # seconds
CLAIM_WITHIN = 60.0  # a server waits for the lease of a run that was killed


class ServerError(RuntimeError):
    """A server did not answer, or not as a healthy one does: another may, or the same one later.

    ``waited``: seconds, where a deadline ended the request.
    """

    def __init__(self, message: str, waited: float = 0.0) -> None:
        super().__init__(message)
        self.waited = waited


class RefusedError(ServerError):
    """A server will not serve this run: the key is wrong, it belongs to another run, or has another model."""


class RolloutError(RunError):
    """No server answers, or none has in time."""


class Server:
    """A server and its state, which only the shared event loop changes.

    Attributes:
        version: Of the weights that it was given by this process or another rank.
        error: Why it is left out; None while it is in.
        rest: Seconds before it is tried again; 0 once it has answered a prompt since it failed.
        penalty: Seconds that it stays out for having kept requests waiting.
        is_unprobed: Whether it was left out since the last probe.
        sync: Held by the task that gives it weights.
    """

    def __init__(self, url: str, settings: ServerConfig) -> None:
        self.url = url.rstrip("/")
        self.settings = settings
        self.version: str | None = None
        self.error: Exception | None = None
        self.rest = self.penalty = 0.0
        self.is_unprobed = False
        self.sync = asyncio.Lock()
        self._token = ""

    def __str__(self) -> str:
        return self.url

    async def get(self, path: str, within: float | None = None) -> Any:
        return await self._request("GET", path, None, within)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, within: float | None = None) -> Any:
        """Return the answer's JSON. ``within``: seconds, by default `sync_within`. Raises ServerError."""
        return await self._request("POST", path, body or {}, within)

    async def check_health(self) -> None:
        """Raise ServerError unless the server is healthy."""
        await self.get("/health", HEALTH_WITHIN)

    async def claim(self, claim: Mapping[str, Any]) -> None:
        """Have the server belong to the run of ``claim`` (see ``Ownership``), or renew that. Raises ServerError."""
        self._token = claim["token"]
        await self.post(CLAIM, claim, CLAIM_WITHIN)

    async def release(self) -> None:
        """Let the server go. Raises ServerError."""
        await self.post(RELEASE, within=HEALTH_WITHIN)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, within: float | None) -> Any:
        settings = self.settings
        key = server_key(self.url, settings.key_env)
        headers, within = {RUN: self._token}, within or settings.sync_within
        try:
            return await http.request(
                method, self.url + path, body, key=key, headers=headers, within=within, max_bytes=MAX_BYTES
            )
        except http.HTTPError as error:
            message = str(error)
            if error.status == 401:
                message += f". Its key must be in {settings.key_env or key_file(self.url)}, as `dapo serve` has it."
            kind = RefusedError if error.status in (401, 403) else ServerError
            raise kind(message, error.waited) from None
