"""The servers of a run: which have the current weights, and how the others recover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from dapo_runner import http
from dapo_runner.config import ConfigError, ServerConfig
from dapo_runner.engines.client import RefusedError, RolloutError, Server, ServerError
from dapo_runner.engines.engine import Note
from dapo_runner.engines.guard import CLAIM, RELEASE
from dapo_runner.engines.transfer import Transfer

REST = 0.2  # seconds before a failed server is tried again; doubled with each failure in a row
LONGEST_REST = 10.0
RENEW = 4.0  # seconds after which a run renews its claims
HEALTH_TIMEOUT = 10.0  # for an idle server. One that writes a long answer does not listen meanwhile


class Signal:
    """Wake up tasks that wait for a change. Tasks whose condition is still false stay asleep."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, Callable[[], Any]] = {}  # conditions; the longest wait is first
        self.parts = set[Signal]()  # whose tasks this one wakes up too

    def set(self, at_most: int | None = None) -> None:
        """Wake up ``at_most`` tasks, by default all, and the tasks of all ``parts``."""
        ready = (event for event, is_true in self._waiting.items() if is_true())
        for event in list(islice(ready, at_most)):
            del self._waiting[event]
            event.set()
        for part in self.parts:
            part.set()

    async def wait_until(self, is_true: Callable[[], Any], timeout: float | None = None) -> None:
        """Return when ``is_true()``, or after ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # ``wait_for`` of Python 3.11 may ignore a cancellation
                while not is_true():
                    event = asyncio.Event()
                    self._waiting[event] = is_true
                    try:
                        await event.wait()
                    finally:
                        self._waiting.pop(event, None)


class ServerPool:
    """Keep healthy servers in use. A failed server is excluded until it is healthy, has loaded the current weights and
    has answered a short request. Calls do not wait for that unless all servers are excluded.

    A server that fails again before it completes a prompt is tried less and less often. If its requests timed out, it
    is excluded for as long as they waited, and longer each time until it completes a prompt, unless no other server is
    in use. All methods but ``close`` run on the shared event loop.
    """

    def __init__(
        self, settings: ServerConfig, transfer: Transfer, claim: Mapping[str, Any], trial: Mapping[str, Any], note: Note
    ) -> None:
        """Take ``claim``, described in ``Ownership``, and ``trial``, the short request."""
        self.settings, self.transfer = settings, transfer
        self.servers = [Server(url, settings, claim["token"]) for url in settings.urls]
        self.changed = Signal()
        self._claim, self._trial, self._note = claim, trial, note
        self._tasks = [http.start(self._keep(server)) for server in self.servers]

    @property
    def present(self) -> list[Server]:
        return [server for server in self.servers if server.error is None]

    @property
    def ready(self) -> list[Server]:
        """The servers with the current weights. Other servers in use are about to load them."""
        return [server for server in self.present if server.version == self.transfer.version]

    @property
    def is_refused(self) -> bool:
        """Whether every server refuses the run, so that waiting is useless."""
        return all(isinstance(server.error, RefusedError) for server in self.servers)

    async def deliver(self) -> list[str]:
        """Wait until all servers in use have the current weights, and return their URLs. Wait if no server is in use.

        Raises RolloutError if none becomes available within `sync_timeout`, or all refuse.
        """
        self.changed.set()
        while True:
            await self.changed.wait_until(lambda: self.ready == self.present)
            if ready := self.ready:
                return [server.url for server in ready]
            await self.changed.wait_until(lambda: self.present or self.is_refused, self.settings.sync_timeout)
            if not self.present:
                raise RolloutError(self.explain_wait(f"weights {self.transfer.version} wait"))

    async def follow(self, urls: Sequence[str]) -> None:
        """Apply the result of rank 0's ``deliver``, its ``urls``, on another rank."""
        for server in self.present:
            if server.url in urls:
                server.version = self.transfer.version
            else:
                self.lose(server, ServerError(f"{server}: rank 0 could not send weights to it"))
        self.changed.set()

    def lose(self, server: Server, error: Exception) -> None:
        """Exclude a server until it recovers."""
        if server.error is None:
            server.is_unprobed = True
            if not server.rest:
                server.rest, server.penalty = REST, 0.0
                self._note(f"{server} is excluded until it is healthy again: {error}")
            server.penalty = 2 * server.penalty + getattr(error, "waited", 0.0)
            server.out_until = time.monotonic() + server.penalty
        server.error, server.version, server.key = error, None, ""  # once restarted it may have another key
        server.drop_requests()
        self.changed.set()

    def answered(self, server: Server) -> None:
        """Record that a server has completed a prompt."""
        if server.rest and server.error is None:
            server.rest = 0.0
            self._note(f"{server} is back, with weights {server.version}")

    def explain_wait(self, waiting: str, reason: str = "") -> str:
        why = "; ".join(filter(None, [reason, *(str(server.error) for server in self.servers if server.error)]))
        if self.is_refused:
            return f"rollout.server.urls: {waiting} for a server, and each refuses this run: {why}"
        return (
            f"rollout.server.sync_timeout: {waiting} for a server, and none of {len(self.servers)} serves this run "
            f"({self.settings.sync_timeout:g} s): {why}. Start one with `dapo serve RECIPE`."
        )

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def release(self) -> None:
        """Release the servers for other runs."""
        requests = [server.post(RELEASE, timeout=HEALTH_TIMEOUT) for server in self.present]
        await asyncio.gather(*requests, return_exceptions=True)

    async def _keep(self, server: Server) -> None:
        """Claim a server for the run, send it every version of the weights, and recover it after a failure."""
        while True:
            if is_out := server.error is not None:
                await self.changed.wait_until(lambda: not self.present, server.out_until - time.monotonic())
                await asyncio.sleep(server.rest)
                server.rest = min(2 * server.rest, LONGEST_REST)
            try:
                await self._update(server)
                if is_out:
                    await server.ask(self._trial)
                    if self.transfer.world.is_main or server.version == self.transfer.version:
                        server.error = None  # else ``follow`` has passed over this server: load the newer weights first
            except (ServerError, ConfigError) as error:  # ConfigError: the key cannot be read
                self.lose(server, error)
            except Exception as error:  # nothing awaits this task: if it died, calls would wait forever
                self.lose(server, ServerError(f"{server}: {type(error).__name__}: {error}"))
            self.changed.set()
            await self.changed.wait_until(lambda: server.error is not None or self._is_behind(server), RENEW)

    def _is_behind(self, server: Server) -> bool:
        """Return whether this rank must send weights to a server. Only rank 0 does; ``follow`` updates the others."""
        return server.version != self.transfer.version and (self.transfer.world.is_main or server.error is not None)

    async def _update(self, server: Server) -> None:
        """Claim a healthy server and send it the current weights if it lacks them. Raises ServerError."""
        timeout = self.settings.sync_timeout
        await server.get("/health", timeout if server.prompt_requests else min(HEALTH_TIMEOUT, timeout))
        await server.post(CLAIM, self._claim)  # a server waits until the lease of a killed run expires
        if self._is_behind(server):
            server.version = await self.transfer.send(server)
        elif server.version is not None and self.transfer.world.is_main:  # ``follow`` updates other ranks
            found = await server.read("/weight_info", "weight_version")
            if found != server.version:
                raise ServerError(f"{server}: expected weights {server.version}, got {found}")
