"""The server engine: `vllm serve` processes on this machine or others.

Prompts are one queue for all servers. Each server gets so many at a time that a batch is always waiting. Which server
completes a prompt only affects rounding: the seed depends on the round and on the prompt's index in it. An answer
counts if all of it was sampled with the current weights, or with those of an update since the call began. Prompts of a
failed server go back to the queue. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo_runner import http
from dapo_runner.config import Config
from dapo_runner.engines.client import GENERATE, RolloutError, Server, ServerError, server_key
from dapo_runner.engines.engine import Groups, Note, OpenCall, RolloutEngine, loadable_weights, stop_token_ids
from dapo_runner.engines.guard import model_facts, server_limits
from dapo_runner.engines.nccl import NCCLTransfer
from dapo_runner.engines.pool import ServerPool, Signal
from dapo_runner.engines.transfer import FileTransfer, Transfer
from dapo_runner.engines.vllm import finish_reason, known_logprobs, sampling_fields
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import load_model, load_tokenizer
from dapo_runner.policy.weights import stored_tensors
from dapo_runner.types import Completion, Prompt, RolloutRequest, SamplingParams, VersionSpan

T = TypeVar("T")
Body = dict[str, Any]  # of a request
ATTEMPTS = 5  # attempts per prompt and server before the run ends
QUEUED = 2  # batches submitted to a server at a time: one that it decodes and one that waits
POLL = 0.2  # seconds
OPEN_FILES = 2**15  # the limit of this process, if the system allows it; often it is 1024
TRANSFERS: dict[str, type[Transfer]] = {"file": FileTransfer, "nccl": NCCLTransfer}


class _Call:
    """The requests of one call: each is waiting, in progress, or answered. With ``on_answer``, which is called with the
    index of each answer, requests can be added and the call does not end.
    """

    def __init__(self, bodies: list[Body], oldest: int, on_answer: Callable[[int], None] | None = None) -> None:
        self.bodies, self.on_answer = bodies, on_answer
        self.oldest = oldest  # the oldest update whose weights may answer
        self.answers: dict[int, list[Completion]] = {}
        self.waiting = list(range(len(bodies)))
        self.failures = Counter[tuple[Server, int]]()
        self.reason = ""  # the last failure of a request
        self.changed = Signal()  # for idle tasks: a request waits again, or the servers have changed

    @property
    def n_left(self) -> int:
        n_left = len(self.bodies) - len(self.answers)
        return n_left if self.on_answer is None else max(1, n_left)

    def add(self, body: Body) -> None:
        self.waiting.append(len(self.bodies))
        self.bodies.append(body)
        self.changed.set(at_most=1)

    def next_for(self, server: Server) -> int | None:
        return next((index for index in self.waiting if self.failures[server, index] < ATTEMPTS), None)

    def is_served_by(self, servers: Sequence[Server]) -> bool:
        """Return whether a request is in progress, or one of ``servers`` may take a waiting request."""
        n_under_way = len(self.bodies) - len(self.answers) - len(self.waiting)
        return not self.waiting or n_under_way > 0 or any(self.next_for(server) is not None for server in servers)


class ServerEngine(RolloutEngine):
    """A rollout engine over the servers of `rollout.server.urls`. With several ranks, each submits its share to all
    servers. With asynchronous rollouts rank 0 submits everything, and ``update_weights`` and ``generate`` are called
    from different threads.
    """

    @classmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> ServerEngine:
        return cls(source, load_tokenizer(source, config.model), config, world, note)

    @classmethod
    def check(cls, config: Config) -> None:
        settings = config.rollout.server
        server_key(settings.urls[0], settings.key_env)
        TRANSFERS[settings.transfer].check(config)

    def __init__(self, source: str | Path, tokenizer: Any, config: Config, world: World, note: Note) -> None:
        """Send the weights of ``source`` to the servers. ``note`` gets a line for each server that fails or recovers.

        Raises ConfigError if the key cannot be read or weights cannot be sent, RolloutError if no server loads them.
        """
        self.config, self.tokenizer, self.world = config, tokenizer, world
        rollout, settings = config.rollout, config.rollout.server
        server_key(settings.urls[0], settings.key_env)
        self.transfer: Transfer = TRANSFERS[settings.transfer](config, world)
        self.token = world.broadcast_from_rank0(lambda: secrets.token_hex(4))  # identifies this run, see ``Ownership``
        self.updates = 0
        self.calls: set[Future] = set()  # in progress
        self.is_closed = False
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = max(soft, min(OPEN_FILES, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        self._connections = asyncio.Semaphore(limit // 2)  # each is an open file; the other half is for other files
        model = load_model(source, config.model, torch.device("cpu" if world.is_main else "meta"), "sdpa")
        self.stop_ids = stop_token_ids(model, tokenizer)
        text_config = model.config.get_text_config()
        self._n_vocabulary: int = text_config.vocab_size
        owner = f"{config.run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})"
        is_wide = config.model.float32_logits or config.model.dtype == "float32"
        facts = model_facts(text_config, config.model.dtype, is_wide, rollout.vllm.batch_invariant)
        limits = server_limits(config.longest_sequence, rollout.max_batch_sequences, rollout.max_staleness > 0)
        claim = {"token": self.token, "owner": owner, "model": facts, "limits": limits}
        short = RolloutRequest(0, Prompt("", (self.stop_ids[0],), "", ""), SamplingParams(max_tokens=1))
        (trial,) = self._bodies([short], None)
        self.pool = ServerPool(settings, self.transfer, claim, trial, note)
        weakref.finalize(self, self.pool.close)  # its tasks would not end otherwise
        self._model = load_model(source, config.model, torch.device("meta"), "sdpa")
        try:
            self.update_weights(stored_tensors(model))
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[RolloutRequest], priority: int | None = None) -> Groups:
        """See ``RolloutEngine.generate``, and ``VLLMEngine.generate`` about log-probs. Raises RolloutError."""
        bodies = self._bodies(requests, priority)
        if not bodies:
            return []
        call = _Call(bodies, self.updates)
        n_requests = self._n_requests(max(one.sampling.n for one in requests), priority)
        self._run(self._answer(call, n_requests, len(bodies)))
        found = ((call.answers[index], one.sampling.n) for index, one in enumerate(requests))
        return [completions * (n // len(completions)) for completions, n in found]

    def open_call(self, priority: int | None, wake: Callable[[], None], n_prompts: int) -> OpenCall:
        return _OpenServerCall(self, priority, wake, n_prompts)

    def answers_to_probe(self, requests: Sequence[RolloutRequest], world: World) -> list[tuple[str | None, Groups]]:
        """See ``RolloutEngine.answers_to_probe``. Returns the answers of each server with the current weights, divided
        among the ranks. A server that fails is excluded. If none answers, returns the result of ``generate``.
        """
        bodies = self._bodies(requests, None)
        ready = self.pool.ready
        for server in ready:  # one that fails from here on becomes unprobed again
            server.is_unprobed = False
        found = world.broadcast_from_rank0(lambda: self._run(self._ask_each(bodies)) or {"": self.generate(requests)})
        for server in ready:
            server.is_unprobed |= server.url not in found
        named: list[tuple[str | None, Groups]] = [(url and f" of {url}", answers) for url, answers in found.items()]
        named += [(None, [])] * (-len(found) % world.data_size)
        return named[world.data_rank :: world.data_size]

    @property
    def is_unprobed(self) -> bool:
        return any(server.is_unprobed for server in self.pool.ready)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine.update_weights``. Waits for the servers in use; the others load the weights when they
        recover. Raises RolloutError if none is available within `sync_timeout`.
        """
        self.transfer.publish(f"{self.token}:{self.updates + 1}", loadable_weights(self._model, weights))
        self.updates += 1
        urls = self.world.broadcast_from_rank0(lambda: self._run(self.pool.deliver()))
        if not self.world.is_main:
            self._run(self.pool.follow(urls))

    def close(self) -> None:
        """Cancel calls of other threads, also those that start later, and release the servers."""
        self.is_closed = True
        for call in list(self.calls):
            call.cancel()
        self.pool.close()
        http.run(self.pool.release())
        self.transfer.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the shared event loop and wait until it ends or the engine is closed. Raises RolloutError."""
        try:
            return http.wait(self.start(work))
        except CancelledError:
            raise RolloutError("rollout: the run has ended") from None

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the shared event loop. ``close`` cancels it."""
        call = http.start(work)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        if self.is_closed:  # else ``close`` finds it in ``calls``
            call.cancel()
        return call

    def _n_requests(self, n_samples: int, priority: int | None) -> int:
        """Return how many requests with ``n_samples`` responses a server gets at a time."""
        n_submitting = self.world.size if priority is None else 1  # with a priority, only rank 0
        return math.ceil(QUEUED * self.config.rollout.max_batch_sequences / n_samples / n_submitting)

    def _bodies(self, requests: Sequence[RolloutRequest], priority: int | None) -> list[Body]:
        """Return the bodies of requests. Those without a priority go before those of asynchronous rollouts."""
        first = {"priority": -1} if self.config.rollout.max_staleness else {}
        return [
            {"token_ids": request.prompt.token_ids, "sampling_params": sampling_fields(request, self.stop_ids)}
            | (first if priority is None else {"priority": priority})
            for request in requests
        ]

    async def _answer(self, call: _Call, n_requests: int, n_prompts: int) -> None:
        """Let the servers answer a call of ``n_prompts`` prompts, each with at most ``n_requests`` at a time."""
        tasks = [
            asyncio.create_task(self._work(server, call))
            for _ in range(min(n_requests, n_prompts))
            for server in self.pool.servers  # servers take turns
        ]
        served = time.monotonic()
        self.pool.changed.parts.add(call.changed)
        try:
            while call.n_left > 0:
                done, _ = await asyncio.wait(tasks, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
                for task in done:  # the call has completed, or the task has failed
                    task.result()
                if call.is_served_by(self.pool.present):
                    served = time.monotonic()
                elif self.pool.is_refused or time.monotonic() > served + self.pool.settings.sync_timeout:
                    waiting = f"{call.n_left} of {len(call.bodies)} prompts wait"
                    raise RolloutError(self.pool.explain_wait(waiting, call.reason))
        finally:
            self.pool.changed.parts.discard(call.changed)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, server: Server, call: _Call) -> None:
        """Submit requests to a server in use, one after another, until the call completes. Raises RolloutError."""
        while call.n_left > 0:
            await call.changed.wait_until(
                lambda: call.n_left == 0 or (call.next_for(server) is not None and server in self.pool.ready)
            )
            async with self._connections:
                if server in self.pool.ready and (index := call.next_for(server)) is not None:
                    await self._submit(server, call, index)

    async def _submit(self, server: Server, call: _Call, index: int) -> None:
        """Submit a waiting request to a server, which is excluded if it fails. Raises RolloutError."""
        pool, version = self.pool, server.version
        call.waiting.remove(index)
        try:
            timeout = self.config.rollout.request_timeout
            call.answers[index] = await self._ask(server, call.bodies[index], call.oldest, timeout)
            if call.on_answer is not None:
                call.on_answer(index)
            pool.answered(server)
        except ServerError as error:
            call.waiting.insert(0, index)
            # vLLM 0.33 refuses requests while it is paused for new weights, unless the pause mode is keep.
            is_paused = error.status == 503 and pool.transfer.version != version
            if is_first := server.error is None and not is_paused:  # else an earlier failure caused this one
                pool.lose(server, error)
            if is_first or error.waited:  # each request of a server that is silent may be the reason
                call.failures[server, index] += 1
                call.reason = str(error)
                if all(call.failures[each, index] >= ATTEMPTS for each in pool.servers):
                    failed = f"a prompt failed {ATTEMPTS} times at every server"
                    raise RolloutError(f"rollout: {failed}. The last error: {error}") from error
            call.changed.set()

    async def _ask_each(self, bodies: list[Body]) -> dict[str, Groups]:
        found: dict[str, Groups] = {}

        async def ask(server: Server) -> None:
            try:
                found[server.url] = await asyncio.gather(*(self._ask(server, body, self.updates) for body in bodies))
            except ServerError as error:
                self.pool.lose(server, error)

        await asyncio.gather(*map(ask, self.pool.ready))
        return found

    async def _ask(self, server: Server, body: Body, oldest: int, timeout: float | None = None) -> list[Completion]:
        """Return the responses to ``body``. Raises ServerError if they are incomplete or from old weights."""
        answer = await server.ask(body, timeout)
        n, max_tokens = (body["sampling_params"][name] for name in ("n", "max_tokens"))
        known = {f"{self.token}:{update}": update for update in range(oldest, self.updates + 1)}
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
            if not versions <= known.keys():
                raise ValueError(f"weights {', '.join(sorted(map(str, versions)))}, expected {' or '.join(known)}")
            if (indices := [choice["index"] for choice in choices]) != list(range(n)):
                raise ValueError(f"responses {indices}, expected 0 to {n - 1}")
            found = [self._completion(choice, known) for choice in choices]
            if short := [one.length for one in found if one.truncated and one.length < max_tokens]:
                raise ValueError(f"responses cut off after {short} tokens, expected {max_tokens}")
            return found
        except (KeyError, TypeError, ValueError) as error:
            got = http.shorten(f"{type(error).__name__}: {error}")
            raise ServerError(f"{server}{GENERATE}: expected the answer of `vllm serve`, got {got}") from error

    def _completion(self, choice: dict[str, Any], updates: Mapping[str, int]) -> Completion:
        """Return one response. ``updates``: update numbers by version. Raises KeyError, TypeError or ValueError."""
        token_ids = torch.tensor(choice["token_ids"], dtype=torch.int64)
        logprobs = known_logprobs([token["logprob"] for token in choice["logprobs"]["content"]])
        spans = [(updates[span["version"]], span["end"] - span["start"]) for span in choice["weight_versions"]]
        versions = tuple(VersionSpan(*span) for span in spans)
        n_of_versions = sum(span.length for span in versions)
        if not 0 < token_ids.numel() == logprobs.numel() == n_of_versions:
            raise ValueError(f"{token_ids.numel()} tokens, {logprobs.numel()} log-probs, versions of {n_of_versions}")
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self._n_vocabulary:
            raise ValueError(f"tokens of another model, expected token ids below {self._n_vocabulary}")
        text = self.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        return Completion(token_ids, logprobs, finish_reason(choice["finish_reason"]), text, versions=versions)


class _OpenServerCall(OpenCall):
    """Each prompt is a separate request. The servers' queues batch them, and their caches reuse earlier turns."""

    def __init__(self, engine: ServerEngine, priority: int | None, wake: Callable[[], None], n_prompts: int) -> None:
        super().__init__()
        self.engine, self.priority, self._wake = engine, priority, wake
        self._keys: list[int] = []  # of the requests, by index
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._call = _Call([], engine.updates, self._on_answer)
        self._task = engine.start(engine._answer(self._call, engine._n_requests(1, priority), n_prompts))
        self._task.add_done_callback(lambda _: wake())

    def _on_answer(self, index: int) -> None:
        self._call.bodies[index] = {}  # only their number counts from here on, and each repeats the turns before
        self._answered.put(index)
        self._wake()

    def add(self, key: int, request: RolloutRequest) -> None:
        super().add(key, request)
        self._keys.append(key)
        (body,) = self.engine._bodies([request], self.priority)
        http.shared_loop().call_soon_threadsafe(self._call.add, body)

    def is_ready(self, is_complete: bool) -> bool:
        return not self._answered.empty() or self._task.done()

    def work(self) -> list[tuple[int, Completion]]:
        if self._task.cancelled():
            raise RolloutError("rollout: the run has ended")
        if self._task.done():  # it ends only with an error
            self._task.result()
        found = []
        while not self._answered.empty():
            index = self._answered.get()
            found.append((self._keys[index], self._call.answers[index].pop()))
            del self._open[self._keys[index]]
        return found

    def close(self) -> None:
        self._task.cancel()
