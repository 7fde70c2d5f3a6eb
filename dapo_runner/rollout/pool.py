"""The servers of a run: which of them have the present weights, and the threads that bring the others back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from dapo_runner.config import ConfigError
from dapo_runner.config.rollout_server import ServerConfig
from dapo_runner.rollout.client import RefusedError, RolloutError, Server, ServerError
from dapo_runner.rollout.transfer import Transfer

T = TypeVar("T")
REST = 0.2  # seconds before a server that failed is tried again, doubled with each failure in a row
LONGEST_REST = 10.0
GENERATE = "/inference/v1/generate"


class ServerPool:
    """A server is in, or it is lost: it failed, and a thread of its own tries it until it is healthy, has loaded the
    present weights and has answered a short request. Nobody waits for that thread unless every server is lost.

    A server that fails again before it has answered a prompt is tried ever more rarely. One that has kept a request
    waiting until its deadline is left out for as long, and each time before it has answered a prompt for longer, unless
    no other is in.
    """

    def __init__(
        self,
        settings: ServerConfig,
        transfer: Transfer,
        claim: Mapping[str, Any],
        trial: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        """``claim``: see ``Ownership``. ``trial``: the short request. ``note`` is called with a line when a server is
        lost, and when it is back.
        """
        self.settings = settings
        self.transfer = transfer
        self.servers = [Server(url, settings) for url in settings.urls]
        self.lost: dict[Server, Exception] = {}  # and why
        self.unprobed: set[Server] = set()  # lost since the last probe, and perhaps back
        self._claim = claim
        self._trial = trial
        self._note = note
        self._rests: dict[Server, float] = {}  # of servers that have failed and not answered a prompt since
        self._waits: dict[Server, float] = {}  # of the same, for what they have kept waiting
        self._closed = False
        self._changed = threading.Condition()

    def present(self) -> list[Server]:
        return [server for server in self.servers if server not in self.lost]

    @property
    def is_refused(self) -> bool:
        """Whether every server refuses the run, so that waiting is of no use."""
        return all(isinstance(self.lost.get(server), RefusedError) for server in self.servers)

    def ready(self) -> list[Server]:
        """Those that are in and have the present weights. The others that are in wait for the next ``deliver``."""
        return [server for server in self.present() if server.version == self.transfer.version]

    def deliver(self) -> list[str]:
        """Have the servers that are in load the present weights, and wait for one where none is. Returns the URLs of
        those that have them. Raises RolloutError where none has come within `back_within`, or every one refuses.
        """
        while True:
            self.each(self._deliver_to, self.present())
            if ready := self.ready():
                return [str(server) for server in ready]
            with self._changed:
                self._changed.wait_for(lambda: self.present() or self.is_refused, self.settings.back_within)
                if not self.present():
                    raise RolloutError(self.nobody(f"weights {self.transfer.version} wait"))

    def follow(self, urls: Sequence[str]) -> None:
        """On another rank than 0, whose ``deliver`` has returned ``urls``."""
        for server in self.present():
            if str(server) in urls:
                server.version = self.transfer.version
            else:
                self.lose(server, ServerError(f"{server}: rank 0 could not send weights to it"))

    def lose(self, server: Server, error: ServerError) -> None:
        with self._changed:
            if server in self.lost:
                return
            self.lost[server], server.version = error, None
            self.unprobed.add(server)
            if server not in self._rests:
                self._rests[server], self._waits[server] = REST, 0.0
                self._note(f"{server} is left out until it is well again: {error}")
            self._waits[server] = 2 * self._waits[server] + error.waited
            self._changed.notify_all()  # another that rests may be the last one
        threading.Thread(target=self._bring_back, args=[server], name="servers", daemon=True).start()

    def answered(self, server: Server) -> None:
        """It has answered a prompt."""
        if server in self._rests:
            with self._changed:
                if server not in self.lost and self._rests.pop(server, None) is not None:
                    self._note(f"{server} is back, with weights {server.version}")

    def each(self, work: Callable[[Server], T], servers: Sequence[Server]) -> list[T]:
        """What ``work`` returns for each server, in threads of their own. An exception here, Ctrl-C for one, ends the
        requests that they make with the pool as ``caller``.
        """
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            tasks = [threads.submit(work, server) for server in servers]
            try:
                return [task.result() for task in tasks]
            except BaseException:
                while wait(tasks, REST).not_done:
                    self._hang_up()
                raise

    def nobody(self, waiting: str, *reasons: str) -> str:
        why = "; ".join([*reasons, *map(str, list(self.lost.values()))])
        if self.is_refused:
            return f"rollout: {waiting} for a server, and each of {len(self.servers)} refuses this run: {why}"
        return (
            f"rollout: {waiting} for a server, and none of {len(self.servers)} has been well for "
            f"{self.settings.back_within:g} s (rollout.server.back_within): {why}. `dapo serve RECIPE` starts one"
        )

    def close(self) -> None:
        """End the threads, and let the servers go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._hang_up()
        for server in self.servers:
            server.release()

    def _hang_up(self) -> None:
        for server in self.servers:
            server.hang_up(self)

    def _deliver_to(self, server: Server) -> None:
        try:
            self._load(server)
        except ServerError as error:
            self.lose(server, error)
            server.hang_up()  # what it is asked by calls under way is of earlier weights

    def _load(self, server: Server) -> None:
        """Check its health, and send it the present weights unless it has them. Raises ServerError."""
        server.check_health()
        with server.turn:
            if server.version == self.transfer.version:
                return
            server.claim(self._claim, self)
            try:
                server.version = self.transfer.send(server, self)
            except (KeyError, TypeError) as error:
                raise ServerError(f"{server}: expected the answers of `vllm serve`, got others: {error!r}") from error

    def _bring_back(self, server: Server) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.present(), self._waits[server])
        while self._rest(server):
            try:
                self._load(server)
                self._load(server)  # newer weights may have come meanwhile; after that the next `deliver` waits for it
                server.post(GENERATE, self._trial, caller=self)
            except (ServerError, ConfigError) as error:  # a key that cannot be read is one of these
                with self._changed:
                    self.lost[server], server.version = error, None
                    self._changed.notify_all()
            else:
                with self._changed:
                    del self.lost[server]
                    self._changed.notify_all()
                return

    def _rest(self, server: Server) -> bool:
        """Whether it is to be tried again."""
        with self._changed:
            rest = self._rests[server]
            self._rests[server] = min(2 * rest, LONGEST_REST)
            return not self._changed.wait_for(lambda: self._closed, rest)
