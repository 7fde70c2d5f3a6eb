"""The servers of a run: which of them have the present weights, and what brings the others back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_runner import http
from dapo_runner.config import ConfigError
from dapo_runner.config.rollout import ServerConfig
from dapo_runner.rollout.client import RefusedError, RolloutError, Server, ServerError
from dapo_runner.rollout.guard import RENEW
from dapo_runner.rollout.transfer import Transfer

REST = 0.2  # seconds before a server that failed is tried again, doubled with each failure in a row
LONGEST_REST = 10.0
GENERATE = "/inference/v1/generate"


class Signal:
    """Wakes the tasks that wait for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, is_true: Callable[[], Any], within: float | None = None) -> bool:
        """Return whether it has become true in so many seconds."""

        async def wait() -> None:
            while not is_true():
                await self._event.wait()

        try:
            await asyncio.wait_for(wait(), within)
        except asyncio.TimeoutError:
            return False
        return True


class ServerPool:
    """A server is in, or it is lost: it failed, and is tried until it is healthy, has loaded the present weights and
    has answered a short request. Nobody waits for that unless every server is lost.

    A server that fails again before it has answered a prompt is tried ever more rarely. One that has kept a request
    waiting until its deadline is left out for as long, and each time before it has answered a prompt for longer, unless
    no other is in.

    All but ``close`` runs on the shared event loop.
    """

    def __init__(
        self,
        settings: ServerConfig,
        transfer: Transfer,
        claim: Mapping[str, Any],
        trial: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        """``claim``: see ``Ownership``. ``trial``: the short request. ``note`` gets a line when a server is lost, and
        when it is back.
        """
        self.settings = settings
        self.transfer = transfer
        self.servers = [Server(url, settings) for url in settings.urls]
        self.changed = Signal()
        self._claim = claim
        self._trial = trial
        self._note = note
        self._tasks = [http.start(self._keep(server)) for server in self.servers]

    @property
    def present(self) -> list[Server]:
        return [server for server in self.servers if server.error is None]

    @property
    def ready(self) -> list[Server]:
        """The servers that have the present weights. The others that are in wait for the next ``deliver``."""
        return [server for server in self.present if server.version == self.transfer.version]

    @property
    def is_refused(self) -> bool:
        """Whether every server refuses the run, so that waiting is of no use."""
        return all(isinstance(server.error, RefusedError) for server in self.servers)

    async def deliver(self) -> list[str]:
        """Have the servers that are in load the present weights, and wait for one where none is.

        Returns:
            The URLs of those that have them.

        Raises:
            RolloutError: None has come within `sync_within`, or every one refuses.
        """
        while True:
            await asyncio.gather(*(self._deliver_to(server) for server in self.present))
            if ready := self.ready:
                return [str(server) for server in ready]
            await self.changed.wait_until(lambda: self.present or self.is_refused, self.settings.sync_within)
            if not self.present:
                raise RolloutError(self.explain_wait(f"weights {self.transfer.version} wait"))

    async def follow(self, urls: Sequence[str]) -> None:
        """On another rank than 0, whose ``deliver`` has returned ``urls``."""
        for server in self.present:
            if str(server) in urls:
                server.version = self.transfer.version
            else:
                self.lose(server, ServerError(f"{server}: rank 0 could not send weights to it"))
        self.changed.set()

    def lose(self, server: Server, error: Exception) -> None:
        """Leave a server out until it is back."""
        if server.error is not None:
            return
        server.error, server.version, server.is_unprobed = error, None, True
        if not server.rest:
            server.rest, server.penalty = REST, 0.0
            self._note(f"{server} is left out until it is healthy again: {error}")
        server.penalty = 2 * server.penalty + getattr(error, "waited", 0.0)
        self.changed.set()

    def answered(self, server: Server) -> None:
        """Record that a server has answered a prompt."""
        if server.rest and server.error is None:
            server.rest = 0.0
            self._note(f"{server} is back, with weights {server.version}")

    def explain_wait(self, waiting: str, reason: str = "") -> str:
        why = "; ".join(filter(None, [reason, *(str(server.error) for server in self.servers if server.error)]))
        if self.is_refused:
            return f"rollout: {waiting} for a server, and each of {len(self.servers)} refuses this run: {why}"
        return (
            f"rollout: {waiting} for a server, and none of {len(self.servers)} has been healthy for "
            f"{self.settings.sync_within:g} s (rollout.server.sync_within): {why}. `dapo serve RECIPE` starts one"
        )

    def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()

    async def release(self) -> None:
        """Let the servers go."""
        claimed = [server for server in self.servers if server.version]
        await asyncio.gather(*(server.release() for server in claimed), return_exceptions=True)

    async def _keep(self, server: Server) -> None:
        """Renew the claim of a server while it is in, and bring it back where it is lost."""
        while True:
            if server.error is not None:
                await self._bring_back(server)
            elif not await self.changed.wait_until(lambda: server.error is not None, RENEW) and server.version:
                try:
                    await self._renew(server)
                except (ServerError, ConfigError) as error:  # a key that cannot be read is one of these
                    self.lose(server, error)

    async def _renew(self, server: Server) -> None:
        await server.check_health()
        await server.claim(self._claim)

    async def _deliver_to(self, server: Server) -> None:
        try:
            await self._load(server)
        except ServerError as error:
            self.lose(server, error)

    async def _load(self, server: Server) -> None:
        """Claim a healthy server, and send it the present weights unless it has them. Raises ServerError."""
        async with server.sync:
            await self._renew(server)
            if server.version == self.transfer.version:
                return
            try:
                server.version = await self.transfer.send(server)
            except (KeyError, TypeError) as error:
                raise ServerError(f"{server}: expected the answers of `vllm serve`, got others: {error!r}") from error
            self.changed.set()

    async def _bring_back(self, server: Server) -> None:
        await self.changed.wait_until(lambda: not self.present, server.penalty)
        while server.error is not None:
            await asyncio.sleep(server.rest)
            server.rest = min(2 * server.rest, LONGEST_REST)
            try:
                await self._load(server)
                await self._load(server)  # newer weights may have come meanwhile; after that `deliver` waits for it
                await server.post(GENERATE, self._trial)
            except (ServerError, ConfigError) as error:  # a key that cannot be read is one of these
                server.error, server.version = error, None
            else:
                server.error = None
            self.changed.set()
