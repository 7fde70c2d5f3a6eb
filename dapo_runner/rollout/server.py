"""The engine behind addresses: `vllm serve` processes on other GPUs or machines, or on this one.

Prompts are one queue that every server is asked from, so many at a time that each has a batch waiting. Which of them
answers makes no difference but for rounding: a response's seed is that of its round and its prompt's index in it. An
answer counts where it says that all of it was made with the present weights, or of an update since the call began. A
server that fails is left out until the pool has brought it back; what it was asked goes back to the queue.

No wait is without its end, and what it raises then says who waited for whom.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo_runner import http
from dapo_runner.config import Config
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import load_model
from dapo_runner.policy.weights import stored_tensors
from dapo_runner.rollout.client import RolloutError, Server, ServerError
from dapo_runner.rollout.engine import (
    EngineContext,
    Groups,
    RolloutEngine,
    check_lengths,
    loadable_weights,
    sampling_of_each,
    stop_token_ids,
)
from dapo_runner.rollout.guard import model_sizes
from dapo_runner.rollout.key import server_key
from dapo_runner.rollout.nccl import NCCLTransfer
from dapo_runner.rollout.pool import GENERATE, ServerPool
from dapo_runner.rollout.prompt_queue import PromptQueue
from dapo_runner.rollout.transfer import FileTransfer, Transfer
from dapo_runner.rollout.vllm import finish_reason, known_logprobs, sampling_fields
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Prompt, SamplingParams, VersionSpan

T = TypeVar("T")
QUEUED = 2  # batches that a server is asked for at a time: one that it decodes and one behind it
POLL = 0.2  # seconds
TRANSFERS: dict[str, type[Transfer]] = {"file": FileTransfer, "nccl": NCCLTransfer}


class ServerEngine(RolloutEngine):
    """A rollout engine over the servers of `rollout.server.urls`. Of many ranks each asks all of them for its share, or
    of asynchronous rollouts rank 0 for all of it, when ``update_weights`` and ``generate`` are called from different
    threads.
    """

    @classmethod
    def load(cls, context: EngineContext) -> RolloutEngine:
        return cls(context.source, context.tokenizer, context.config, context.world, context.note)

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
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """The servers begin with the weights of ``source``, a model in transformers' format.

        Args:
            note: Called with a line for each server that is lost or back.

        Raises:
            ConfigError: The key cannot be read, or weights cannot pass.
            RolloutError: No server has taken the weights in time.
        """
        rollout = config.rollout
        self.tokenizer = tokenizer
        self.settings = rollout.server
        self.world = world
        self.answer_within = self.settings.answer_within * (1 + rollout.max_staleness)  # behind earlier rounds'
        self.max_tokens = config.longest_sequence
        self.max_batch_sequences = rollout.max_batch_sequences
        self.transfer: Transfer = TRANSFERS[self.settings.transfer](config, world)
        self.run = world.broadcast_from_rank0(lambda: secrets.token_hex(4))  # of this process alone
        self.updates = 0
        self.calls: set[Future] = set()  # under way
        self.closed = False
        model = load_model(source, config.model, torch.device("cpu" if world.is_main else "meta"), "sdpa")
        self.stop_ids = stop_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        text_config = model.config.get_text_config()
        self._n_vocabulary: int = text_config.vocab_size
        owner = f"{config.run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})"
        claim = {"token": self.run, "owner": owner, "model": model_sizes(text_config)}
        trial = self._body((self.stop_ids[0],), SamplingParams(max_tokens=1), 0)
        trial |= {"priority": -1} if rollout.max_staleness else {}
        self.pool = ServerPool(self.settings, self.transfer, claim, trial, note)
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
        responses were dropped. Raises RolloutError, and ValueError for a prompt that leaves less room than its
        ``max_tokens``.
        """
        each = sampling_of_each(prompts, sampling)
        bodies = self._bodies(prompts, each, options.priority)
        if not bodies:
            return []
        n_needed = max(1, round(options.completion_fraction * len(bodies)))
        queue = PromptQueue(bodies, n_needed, self.updates, self.pool.servers)
        n_asking = self.world.size if options.priority is None else 1  # rank 0 asks for all
        self._run(self._answer(queue, n_asking))
        found = {index: self._with_texts(answers) for index, answers in queue.answers.items()}
        return [
            found[index] * (item.n // len(found[index])) if index in found else [] for index, item in enumerate(each)
        ]

    def answers_to_probe(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, world: World
    ) -> list[tuple[str | None, Groups]]:
        """See ``RolloutEngine.answers_to_probe``: every server's answers, which the ranks share out."""
        found: list[tuple[str | None, Groups]] = [
            (f" of {name}" if name else "", answers)
            for name, answers in self.generate_on_each(prompts, sampling).items()
        ]
        found += [(None, [])] * (-len(found) % world.data_size)
        return found[world.data_rank :: world.data_size]

    def generate_on_each(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> dict[str, Groups]:
        """Return what each server that has the present weights answers to all of the prompts, by its URL.

        It is the same on every rank. A server that fails is lost; where none answers, it is what ``generate`` returns,
        by "". Collective.

        Raises:
            RolloutError: See ``generate``.
        """
        bodies = self._bodies(prompts, [sampling] * len(prompts), None)

        def ask_all() -> dict[str, Groups]:
            answered = self._run(self._ask_each(bodies, sampling.n))
            found = {url: [self._with_texts(one) for one in answers] for url, answers in answered.items()}
            return found or {"": self.generate(prompts, sampling)}

        ready = self.pool.ready
        for server in ready:  # one that is lost from here on is unprobed again
            server.is_unprobed = False
        found = self.world.broadcast_from_rank0(ask_all)
        for server in ready:
            server.is_unprobed |= str(server) not in found
        return found

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
        """End the calls that other threads have under way, and those that they begin, each with a RolloutError; and let
        the servers go.
        """
        self.closed = True
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
            if self.closed:  # or finds it among the calls
                call.cancel()
            return http.wait(call)
        except CancelledError:
            raise RolloutError("rollout: the run has ended") from None
        finally:
            self.calls.discard(call)

    def _body(self, token_ids: Sequence[int], sampling: SamplingParams, index: int) -> dict[str, Any]:
        return {"token_ids": token_ids, "sampling_params": sampling_fields(sampling, index, self.stop_ids)}

    def _bodies(
        self, prompts: Sequence[Prompt], each: Sequence[SamplingParams], priority: int | None
    ) -> list[dict[str, Any]]:
        """Return the requests. Raises ValueError for a prompt that leaves less room than its ``max_tokens``.

        A call beside others, as the probe's is beside asynchronous rollouts, does not wait behind what those have
        queued.
        """
        check_lengths(prompts, each, self.max_tokens)
        if priority is None and self.calls:
            priority = -len(self.calls)
        more = {} if priority is None else {"priority": priority}
        return [
            self._body(prompt.token_ids, item, index) | more
            for index, (prompt, item) in enumerate(zip(prompts, each, strict=True))
        ]

    async def _answer(self, queue: PromptQueue, n_asking: int) -> None:
        """Have the servers answer the queue. ``n_asking``: ranks that have a part of the same call each."""
        longest = max(body["sampling_params"]["n"] for body in queue.bodies)
        n_requests = min(math.ceil(QUEUED * self.max_batch_sequences / longest / n_asking), len(queue.bodies))
        tasks = [asyncio.create_task(self._attend(server, queue, n_requests)) for server in self.pool.servers]
        try:
            await self._wait(queue)
        finally:
            await _cancel(tasks)

    async def _wait(self, queue: PromptQueue) -> None:
        """Wait until the queue is over. Raises what ended it otherwise."""
        served = time.monotonic()
        while not await queue.changed.wait_until(lambda: queue.is_over, POLL):
            if queue.is_served_by(self.pool.present):
                served = time.monotonic()
            elif self.pool.is_refused or time.monotonic() > served + self.settings.sync_within:
                waiting = f"{queue.n_left} of {len(queue.bodies)} prompts wait"
                raise RolloutError(self.pool.explain_wait(waiting, queue.reason))
        if queue.error is not None:
            raise queue.error

    async def _attend(self, server: Server, queue: PromptQueue, n_requests: int) -> None:
        """Ask one server from the queue whenever it is in."""
        while True:
            await self.pool.changed.wait_until(lambda: server in self.pool.ready)
            tasks: list[asyncio.Task[None]] = []
            try:
                for _ in range(n_requests):
                    tasks.append(asyncio.create_task(self._pull(server, queue)))
                    await asyncio.sleep(0)  # the servers take turns
                await self.pool.changed.wait_until(lambda: server.error is not None)
            finally:
                await _cancel(tasks)

    async def _pull(self, server: Server, queue: PromptQueue) -> None:
        while server.error is None:
            index = await queue.take(server)
            try:
                answer = await server.post(GENERATE, queue.bodies[index], self.answer_within)
                n_samples = queue.bodies[index]["sampling_params"]["n"]
                queue.answer(index, self._checked(server, answer, n_samples, queue.oldest))
                self.pool.answered(server)
            except ServerError as error:
                queue.give_back(index)
                if server.error is None:  # else what follows from an earlier failure
                    queue.count_failure(index, server, error)
                    self.pool.lose(server, error)
            except asyncio.CancelledError:
                queue.give_back(index)
                raise
            except Exception as error:  # raised again where the call waits
                queue.fail(error)

    async def _ask_each(self, bodies: list[dict[str, Any]], n_samples: int) -> dict[str, Groups]:
        async def ask(server: Server) -> Groups | None:
            try:
                answers = await asyncio.gather(*(server.post(GENERATE, body) for body in bodies))
                return [self._checked(server, answer, n_samples, self.updates) for answer in answers]
            except ServerError as error:
                self.pool.lose(server, error)
                return None

        servers = self.pool.ready
        found = await asyncio.gather(*map(ask, servers))
        return {str(server): answers for server, answers in zip(servers, found, strict=True) if answers is not None}

    def _checked(self, server: Server, answer: Any, n: int, oldest: int) -> list[Completion]:
        """Return the ``n`` responses of an answer, without texts, where it is whole and of weights since the update
        ``oldest``. Raises ServerError.
        """
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
            known = {f"{self.run}:{update}": update for update in range(oldest, self.updates + 1)}
            if not versions <= known.keys():
                got = http.shorten(", ".join(sorted(map(str, versions))))
                raise ServerError(f"{server}: expected an answer of weights {' or '.join(known)}, got one of {got}")
            completions = [_completion(choice, known) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            got = http.shorten(repr(error))
            raise ServerError(f"{server}: expected token ids, log-probs and versions, got others: {got}") from error
        if (indices := [choice["index"] for choice in choices]) != list(range(n)):
            raise ServerError(f"{server}: expected responses 0 to {n - 1}, got {http.shorten(str(indices))}")
        if not all(0 <= token < self._n_vocabulary for one in completions for token in one.token_ids.tolist()):
            raise ServerError(f"{server}: expected token ids below {self._n_vocabulary}, got others: of another model")
        return completions

    def _with_texts(self, completions: Sequence[Completion]) -> list[Completion]:
        texts = self.tokenizer.batch_decode([item.token_ids.tolist() for item in completions], skip_special_tokens=True)
        return [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]


def _completion(choice: dict[str, Any], updates: Mapping[str, int]) -> Completion:
    """``updates`` by the versions of their weights. Raises KeyError, TypeError or ValueError for what is none."""
    token_ids = torch.tensor(choice["token_ids"], dtype=torch.int64)
    logprobs = known_logprobs([token["logprob"] for token in choice["logprobs"]["content"]])
    versions = tuple(
        VersionSpan(updates[span["version"]], span["end"] - span["start"]) for span in choice["weight_versions"]
    )
    n_of_versions = sum(span.length for span in versions)
    if not 0 < token_ids.numel() == logprobs.numel() == n_of_versions:
        raise ValueError(f"{token_ids.numel()} tokens, log-probs of {logprobs.numel()}, versions of {n_of_versions}")
    return Completion(token_ids, logprobs, finish_reason(choice["finish_reason"]), "", versions=versions)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
