"""A `vllm serve` process at its address, and its API key."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dapo_runner import http
from dapo_runner.config.rollout import ServerConfig
from dapo_runner.engines.guard import RUN
from dapo_runner.errors import ConfigError, RunError

MAX_BYTES = 2**30  # of an answer; about 140 per token: a group of 16 responses with 20k tokens takes 46 MB
GENERATE = "/inference/v1/generate"


class ServerError(http.HTTPError):
    """A server did not answer correctly. Another server may, or the same one later."""


class RefusedError(ServerError):
    """A server refuses this run: the key is wrong, another run uses it, or it has another model or lower limits."""


class RolloutError(RunError):
    """No server answered, or none in time."""


class Server:
    """A server and its state. Only the shared event loop changes it.

    Attributes:
        version: The version of its weights.
        error: Why it is excluded; None while it is in use.
        rest: Seconds before the next attempt; 0 once it has completed a prompt after a failure.
        penalty, out_until: For how long, and until when, it is excluded because its requests timed out.
        is_unprobed: Whether it was excluded since the last probe.
        key: Its API key, read once; "" to read it again.
    """

    def __init__(self, url: str, settings: ServerConfig, token: str = "") -> None:
        """Take ``token``, which identifies the run; see ``Ownership``."""
        self.url, self.settings, self.token = url.rstrip("/"), settings, token
        self.version: str | None = None
        self.error: Exception | None = None
        self.rest = self.penalty = self.out_until = 0.0
        self.is_unprobed = False
        self.key = ""
        self.prompt_requests = set[asyncio.Task[Any]]()

    def __str__(self) -> str:
        return self.url

    async def read(self, path: str, field: str, method: str = "GET") -> Any:
        """Return one field of an answer. Raises ServerError."""
        answer = await self._request(method, path, None, None)
        if not isinstance(answer, dict) or field not in answer:
            raise ServerError(f"{self}{path}: expected {field!r} of `vllm serve`, got {http.shorten(repr(answer))}")
        return answer[field]

    async def get(self, path: str, timeout: float | None = None) -> Any:
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the answer's JSON. ``timeout``: in seconds, by default `sync_timeout`. Raises ServerError."""
        return await self._request("POST", path, body or {}, timeout)

    async def ask(self, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """Return the answer to a prompt. Raises ServerError, after ``drop_requests`` with ``waited`` of ``error``."""
        request = asyncio.create_task(self.post(GENERATE, body, timeout))
        self.prompt_requests.add(request)
        try:
            await asyncio.wait([request])
        finally:
            request.cancel()
            self.prompt_requests.discard(request)
        if request.cancelled():
            raise ServerError(f"{self}: was excluded during a prompt", waited=getattr(self.error, "waited", 0.0))
        return request.result()

    def drop_requests(self) -> None:
        for request in self.prompt_requests:
            request.cancel()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> Any:
        key_env, timeout = self.settings.key_env, timeout or self.settings.sync_timeout
        self.key, headers = self.key or server_key(self.url, key_env), {RUN: self.token}
        try:
            return await http.request(
                method, self.url + path, body, key=self.key, headers=headers, timeout=timeout, max_bytes=MAX_BYTES
            )
        except http.HTTPError as error:
            hint = f". {key_env or key_file(self.url)} must hold the key of `dapo serve`" if error.status == 401 else ""
            kind = RefusedError if error.status in (401, 403) else ServerError
            raise kind(f"{error}{hint}", error.status, error.waited) from None


def key_file(url: str) -> Path:
    """Return the path of the key file of the server at ``url``, in the user's configuration folder."""
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if settings.startswith("~"):  # a user without a home folder
        raise ConfigError("rollout.server.key_env: expected a name, or HOME or XDG_CONFIG_HOME to be set")
    return Path(settings, "dapo", "keys") / urlsplit(url).netloc.lower()


def make_key(url: str) -> None:
    """Write a key file for the server at ``url`` unless it exists. Raises ConfigError."""
    path = key_file(url)
    if _read_key(path):
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"rollout.server.key_env: expected a name, or to write {path}, got: {error}") from error


def server_key(url: str, key_env: str | None) -> str:
    """Return the server's key, "" if there is neither variable nor file. Raises ConfigError if it is not private."""
    return http.read_key(url, key_env) or _read_key(key_file(url))


def _read_key(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            status, key = os.fstat(file.fileno()), file.read().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout.server.key_env: expected a readable key in {path}, got: {error}") from error
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise ConfigError(f"rollout.server.key_env: {path} must belong to user {os.getuid()} alone: chown, chmod 600.")
    if not (key and key.isprintable()):
        raise ConfigError(f"rollout.server.key_env: expected a key of printable ASCII characters in {path}. Delete it.")
    return key
