"""The engine behind addresses: `vllm serve` processes on other GPUs or machines, or on this one.

Prompts are one queue that every server is asked from, so many at a time that each has a batch waiting. Which of them
answers makes no difference but for rounding: a response's seed is that of its round and its prompt's index in it. An
answer counts where all of it was made with the present weights, or of an update since the call began. What a server
that fails was asked goes back to the queue. No wait is without its end.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo_runner import http
from dapo_runner.config import Config
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import load_model, load_tokenizer
from dapo_runner.policy.weights import stored_tensors
from dapo_runner.rollout.client import GENERATE, RolloutError, Server, ServerError, server_key
from dapo_runner.rollout.engine import Groups, Note, RolloutEngine, loadable_weights, sampling_of_each, stop_token_ids
from dapo_runner.rollout.guard import model_sizes
from dapo_runner.rollout.nccl import NCCLTransfer
from dapo_runner.rollout.pool import ServerPool
from dapo_runner.rollout.transfer import FileTransfer, Transfer
from dapo_runner.rollout.vllm import finish_reason, known_logprobs, sampling_fields
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Prompt, SamplingParams, VersionSpan

T = TypeVar("T")
ATTEMPTS = 5  # times that a prompt is asked of each server before the run ends
QUEUED = 2  # batches that a server is asked for at a time: one that it decodes and one behind it
POLL = 0.2  # seconds
TRANSFERS: dict[str, type[Transfer]] = {"file": FileTransfer, "nccl": NCCLTransfer}


class _Call:
    """The requests of one call: each is waiting, with one server, or answered. ``n_needed`` answers complete it."""

    def __init__(self, bodies: list[dict[str, Any]], n_needed: int, oldest: int) -> None:
        self.bodies, self.n_needed = bodies, n_needed
        self.oldest = oldest  # the update whose weights are the oldest that may answer
        self.answers: dict[int, list[Completion]] = {}
        self.waiting = list(range(len(bodies)))
        self.failures = Counter[tuple[Server, int]]()
        self.reason = ""  # what a request has failed on last

    @property
    def n_left(self) -> int:
        return self.n_needed - len(self.answers)

    def next_for(self, server: Server) -> int | None:
        return next((index for index in self.waiting if self.failures[server, index] < ATTEMPTS), None)

    def is_served_by(self, servers: Sequence[Server]) -> bool:
        """Return whether a request is under way, or one of ``servers`` may be asked one that waits."""
        n_under_way = len(self.bodies) - len(self.answers) - len(self.waiting)
        return n_under_way > 0 or any(self.next_for(server) is not None for server in servers)


class ServerEngine(RolloutEngine):
    """A rollout engine over the servers of `rollout.server.urls`. Of many ranks each asks all of them for its share, or
    of asynchronous rollouts rank 0 for all of it, when ``update_weights`` and ``generate`` are called from different
    threads.
    """

    @classmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> ServerEngine:
        return cls(source, load_tokenizer(source, config.model), config, world, note)

    @classmethod
    def check(cls, config: Config) -> None:
        settings = config.rollout.server
        server_key(settings.urls[0], settings.key_env)
        TRANSFERS[settings.transfer].check(config)

    def __init__(
        self,
        source: str | Path,
        tokenizer: Any,
        config: Config,
        world: World = SINGLE_PROCESS,
        note: Note = lambda _: None,
    ) -> None:
        """The servers begin with the weights of ``source``. ``note`` gets a line for each server that is lost or back.

        Raises ConfigError: the key cannot be read, or weights cannot pass. RolloutError: no server takes the weights.
        """
        self.config, self.tokenizer, self.world = config, tokenizer, world
        settings, max_staleness = config.rollout.server, config.rollout.max_staleness
        server_key(settings.urls[0], settings.key_env)
        self.answer_within = settings.answer_within * (1 + max_staleness)  # behind those of earlier rounds
        self.transfer: Transfer = TRANSFERS[settings.transfer](config, world)
        self.run = world.broadcast_from_rank0(lambda: secrets.token_hex(4))  # of this process alone
        self.updates = 0
        self.calls: set[Future] = set()  # under way
        self.is_closed = False
        model = load_model(source, config.model, torch.device("cpu" if world.is_main else "meta"), "sdpa")
        self.stop_ids = stop_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        text_config = model.config.get_text_config()
        self._n_vocabulary: int = text_config.vocab_size
        owner = f"{config.run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})"
        claim = {"token": self.run, "owner": owner, "model": model_sizes(text_config)}
        (trial,) = self._bodies([Prompt("", (self.stop_ids[0],), "", "")], [SamplingParams(max_tokens=1)], None)
        self.pool = ServerPool(settings, self.transfer, claim, trial, note)
        weakref.finalize(self, self.pool.close)  # whose tasks would go on
        self._model = load_model(source, config.model, torch.device("meta"), "sdpa")
        try:
            self.update_weights(stored_tensors(model))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Groups:
        """See ``RolloutEngine.generate`` and, of the log-probs, ``VLLMEngine.generate``; nothing for prompts whose
        responses were dropped. Raises RolloutError.
        """
        each = sampling_of_each(prompts, sampling)
        bodies = self._bodies(prompts, each, options.priority)
        if not bodies:
            return []
        call = _Call(bodies, max(1, round(options.completion_fraction * len(bodies))), self.updates)
        self._run(self._answer(call, self.world.size if options.priority is None else 1))  # else rank 0 asks for all
        found = [call.answers.get(index, []) for index in range(len(bodies))]
        return [one * (item.n // len(one)) if one else [] for one, item in zip(found, each, strict=True)]

    def answers_to_probe(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, world: World
    ) -> list[tuple[str | None, Groups]]:
        """See ``RolloutEngine.answers_to_probe``: the answers of each server that has the present weights, which the
        ranks share out. A server that fails is lost; where none answers, it is what ``generate`` returns.
        """
        bodies = self._bodies(prompts, [sampling] * len(prompts), None)

        def ask_all() -> dict[str, Groups]:
            return self._run(self._ask_each(bodies, sampling.n)) or {"": self.generate(prompts, sampling)}

        ready = self.pool.ready
        for server in ready:  # one that is lost from here on is unprobed again
            server.is_unprobed = False
        found = world.broadcast_from_rank0(ask_all)
        for server in ready:
            server.is_unprobed |= server.url not in found
        named: list[tuple[str | None, Groups]] = [(url and f" of {url}", answers) for url, answers in found.items()]
        named += [(None, [])] * (-len(found) % world.data_size)
        return named[world.data_rank :: world.data_size]

    @property
    def is_unprobed(self) -> bool:
        return any(server.is_unprobed for server in self.pool.ready)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine.update_weights``. Waits for the servers that are in; the pool sends them to the others.
        Raises RolloutError where none has come within `sync_within`.
        """
        self.transfer.publish(f"{self.run}:{self.updates + 1}", loadable_weights(self._model, weights))
        self.updates += 1
        urls = self.world.broadcast_from_rank0(lambda: self._run(self.pool.deliver()))
        if not self.world.is_main:
            self._run(self.pool.follow(urls))

    def close(self) -> None:
        """End the calls of other threads, also those that they begin from now on, and let the servers go."""
        self.is_closed = True
        for call in list(self.calls):
            call.cancel()
        self.pool.close()
        http.run(self.pool.release())
        self.transfer.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the shared event loop until it ends or the engine is closed. Raises RolloutError."""
        call = http.start(work)
        try:
            self.calls.add(call)
            if self.is_closed:  # or `close` finds it among the calls
                call.cancel()
            return http.wait(call)
        except CancelledError:
            raise RolloutError("rollout: the run has ended") from None
        finally:
            self.calls.discard(call)

    def _bodies(
        self, prompts: Sequence[Prompt], each: Sequence[SamplingParams], priority: int | None
    ) -> list[dict[str, Any]]:
        """Return the requests. Without a priority they go before those of asynchronous rollouts."""
        first = {"priority": -1} if self.config.rollout.max_staleness else {}
        return [
            {"token_ids": prompt.token_ids, "sampling_params": sampling_fields(item, index, self.stop_ids)}
            | (first if priority is None else {"priority": priority})
            for index, (prompt, item) in enumerate(zip(prompts, each, strict=True))
        ]

    async def _answer(self, call: _Call, n_asking: int) -> None:
        """Have the servers answer a call. ``n_asking``: ranks that have a part of the same call each."""
        longest = max(body["sampling_params"]["n"] for body in call.bodies)
        n_requests = math.ceil(QUEUED * self.config.rollout.max_batch_sequences / longest / n_asking)
        tasks = [
            asyncio.create_task(self._work(server, call))
            for _ in range(min(n_requests, len(call.bodies)))
            for server in self.pool.servers  # which take turns
        ]
        served = time.monotonic()
        try:
            while call.n_left > 0:
                done, _ = await asyncio.wait(tasks, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
                for task in done:  # the call is over, or it has raised
                    task.result()
                if call.is_served_by(self.pool.present):
                    served = time.monotonic()
                elif self.pool.is_refused or time.monotonic() > served + self.pool.settings.sync_within:
                    waiting = f"{call.n_left} of {len(call.bodies)} prompts wait"
                    raise RolloutError(self.pool.explain_wait(waiting, call.reason))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, server: Server, call: _Call) -> None:
        """Ask one server for one request after the other, while it is in, until the call is over."""
        pool = self.pool
        while call.n_left > 0:
            await pool.changed.wait_until(
                lambda: call.n_left <= 0 or (server in pool.ready and call.next_for(server) is not None)
            )
            if (index := call.next_for(server)) is None or call.n_left <= 0:
                continue
            call.waiting.remove(index)
            try:
                answer = await server.ask(call.bodies[index], self.answer_within)
                n_samples = call.bodies[index]["sampling_params"]["n"]
                completions = self._checked(server, answer, n_samples, call.oldest)
                if call.n_left > 0:
                    call.answers[index] = completions
                pool.answered(server)
            except ServerError as error:
                call.waiting.insert(0, index)
                if server.error is None:  # else it follows from an earlier failure
                    pool.lose(server, error)
                    self._count_failure(call, server, index, error)
            pool.changed.set()

    def _count_failure(self, call: _Call, server: Server, index: int, error: ServerError) -> None:
        """Raises RolloutError where a request has failed too often at every server."""
        call.failures[server, index] += 1
        call.reason = str(error)
        if all(call.failures[each, index] >= ATTEMPTS for each in self.pool.servers):
            raise RolloutError(f"rollout: a prompt was asked {ATTEMPTS} times of every server, at last {error}")

    async def _ask_each(self, bodies: list[dict[str, Any]], n_samples: int) -> dict[str, Groups]:
        found: dict[str, Groups] = {}

        async def ask(server: Server) -> None:
            try:
                answers = await asyncio.gather(*(server.ask(body) for body in bodies))
                found[server.url] = [self._checked(server, answer, n_samples, self.updates) for answer in answers]
            except ServerError as error:
                self.pool.lose(server, error)

        await asyncio.gather(*map(ask, self.pool.ready))
        return found

    def _checked(self, server: Server, answer: Any, n: int, oldest: int) -> list[Completion]:
        """Return the ``n`` responses of an answer. Raises ServerError: not whole, or of weights before ``oldest``."""
        known = {f"{self.run}:{update}": update for update in range(oldest, self.updates + 1)}
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
            if not versions <= known.keys():
                raise ValueError(f"weights {', '.join(sorted(map(str, versions)))}, expected {' or '.join(known)}")
            if (indices := [choice["index"] for choice in choices]) != list(range(n)):
                raise ValueError(f"responses {indices}, expected 0 to {n - 1}")
            return [self._completion(choice, known) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            got = http.shorten(f"{type(error).__name__}: {error}")
            raise ServerError(f"{server}{GENERATE}: expected the answer of `vllm serve`, got {got}") from error

    def _completion(self, choice: dict[str, Any], updates: Mapping[str, int]) -> Completion:
        """``updates`` by the versions of their weights. Raises KeyError, TypeError or ValueError."""
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
