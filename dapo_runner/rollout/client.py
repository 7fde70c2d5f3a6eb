"""One `vllm serve` process at its address: requests that end in time, and what went wrong in one line.

Nothing is sent anywhere but to the URL that was named: no proxy, no redirect. The key is read from the environment or
its file with every request and kept nowhere.
"""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from dapo_runner.config.rollout_server import ServerConfig
from dapo_runner.errors import RunError
from dapo_runner.http import shorten
from dapo_runner.rollout.guard import CLAIM, RUN
from dapo_runner.rollout.key import authorize, key_file

MAX_BYTES = 2**30  # of an answer: 140 for a token, so that a group of 16 responses of 20k tokens takes 46 MB


class ServerError(RuntimeError):
    """A server that did not answer, or not as one does that is well: another may, or the same one later. ``waited``:
    seconds, where a deadline ended the request.
    """

    def __init__(self, text: str, waited: float = 0.0) -> None:
        super().__init__(text)
        self.waited = waited


class RefusedError(ServerError):
    """A server that will not serve this run: the key is wrong, it belongs to another run, or has another model."""


class RolloutError(RunError):
    """What no server will answer, or none has in time."""


class Server:
    """One address. May be asked by several threads at a time."""

    def __init__(self, url: str, settings: ServerConfig) -> None:
        self.url = url.rstrip("/")
        self.settings = settings
        self.version: str | None = None  # of the weights that it was given, by this process or another rank
        self.turn = threading.Lock()  # of whoever gives it weights
        self._token = ""  # of the run that it belongs to
        self._claim: socket.socket | None = None  # open for as long as it does
        os.register_at_fork(after_in_child=self.release)  # a child that outlives this process does not keep it
        self._open: dict[socket.socket, object] = {}  # and for whom
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.url

    def check_health(self) -> None:
        """Raises ServerError unless it says within `health_within` that it is well."""
        self._request("GET", "/health", None, self.settings.health_within, None)

    def get(self, path: str, caller: object = None) -> Any:
        return self._request("GET", path, None, self.settings.sync_within, caller)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        within: float | None = None,
        caller: object = None,
    ) -> Any:
        """The answer's JSON. ``within``: seconds it has, by default `sync_within`; ``caller``: who may ``hang_up``."""
        return self._request("POST", path, body or {}, within or self.settings.sync_within, caller)

    def claim(self, claim: Mapping[str, Any], caller: object = None) -> None:
        """Have the server belong to the run of ``claim``, see ``Ownership``, until ``release`` or the end of this
        process. May be called again, since a server that was started anew has forgotten. Raises ServerError.
        """
        before = self._claim
        self.post(CLAIM, claim, caller=caller)
        self._token = claim["token"]
        if before is not None:
            before.close()

    def release(self) -> None:
        """End the claim."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, within: float, caller: object) -> Any:
        """Raises ServerError."""
        what = f"{self.url}: {method} {path}"
        headers = {"User-Agent": "dapo-runner", RUN: self._token, **authorize(self.url, self.settings.key_env)}
        sent = None if body is None else json.dumps(body).encode()
        if sent is not None:
            headers["Content-Type"] = "application/json"
        try:
            with self._connection(within, caller) as connection:
                until = time.monotonic() + within
                connection.request(method, path, sent, headers)
                response = HTTPResponse(_Answer(connection.sock, until), method=method)  # type: ignore[arg-type]
                response.begin()
                if path == CLAIM and response.status == 200:  # has no end
                    self._claim, connection.sock = connection.sock, None
                    return None
                raw = read_until(response, until, MAX_BYTES)
        except TimeoutError as error:
            raise ServerError(f"{what}: no answer within {within:g} s", within) from error
        except (OSError, HTTPException, ValueError) as error:  # a TLS connection that is hung up may raise ValueError
            raise ServerError(f"{what}: {self._shown(f'{type(error).__name__}: {error}')}") from None
        return self._read(what, response, raw)

    def _read(self, what: str, response: HTTPResponse, raw: bytes) -> Any:
        text, length = raw.decode("utf-8", "replace"), response.getheader("Content-Length")
        if length is not None and length != str(len(raw)):
            raise ServerError(f"{what}: expected {self._shown(length)} bytes, the answer ended after {len(raw)}")
        if response.status != 200:
            said = f"{what}: HTTP {response.status} {self._shown(f'{response.reason}: {text}')}"
            if response.status == 401:
                said += f". Its key must be in {self.settings.key_env or key_file(self.url)}, as `dapo serve` has it."
            raise (RefusedError if response.status in (401, 403) else ServerError)(said)
        if not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{what}: expected JSON, got {self._shown(text)}") from error

    @contextmanager
    def _connection(self, within: float, caller: object) -> Iterator[HTTPConnection]:
        """A connection that ``hang_up`` ends; one that is not made within `health_within` never will be."""
        parts, made_within = urlsplit(self.url), min(within, self.settings.health_within)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.hostname or "", parts.port, timeout=made_within)) as connection:
            try:
                connection.connect()
            except TimeoutError as error:
                raise ServerError(f"{self.url}: no connection within {made_within:g} s", made_within) from error
            own = connection.sock  # which http.client lets go of where an answer ends the connection
            own.settimeout(within)
            with self._lock:
                self._open[own] = caller
            try:
                yield connection
            finally:
                with self._lock:
                    del self._open[own]

    def hang_up(self, caller: object = None) -> None:
        """End the caller's requests, or everybody's, each with a ServerError where it was made; the server drops them
        too.
        """
        with self._lock:
            for connection, asking in self._open.items():
                if caller is None or asking is caller:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def _shown(self, text: str) -> str:
        for header in authorize(self.url, self.settings.key_env).values():
            text = text.replace(header.removeprefix("Bearer "), "***")
        return shorten(text)


class _Answer(io.RawIOBase):
    """What comes out of a socket until a moment on the monotonic clock. Raises TimeoutError past it, also where every
    byte of the headers comes soon after the one before.
    """

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection = connection
        self.until = until

    def makefile(self, _: str) -> io.BufferedReader:
        """Return a file, as ``http.client`` asks a socket for it."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


def read_until(response: HTTPResponse, until: float, max_bytes: int) -> bytes:
    """Read at most so many bytes of an answer. Raises TimeoutError past ``until``, on the monotonic clock."""
    raw = bytearray()
    while len(raw) < max_bytes and (part := response.read1(max_bytes - len(raw))):
        raw += part
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(raw)
