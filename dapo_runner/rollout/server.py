"""The engine behind addresses: `vllm serve` processes on other GPUs or machines, or on this one.

Prompts are one queue that every server is asked from, so many at a time that each has a batch waiting. Which of them
answers makes no difference but for rounding: a response's dice are thrown by a seed of its round and its prompt's place
in it. An answer counts where it says that all of it was made with the weights of now, or of an update since the call
began. A server that fails is left out until the pool has brought it back; what it was asked goes back to the queue.

No wait is without its end, `rollout.server.*_within`, and what it raises then says who waited for whom.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import Config
from dapo_runner.http import shorten
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import load_model
from dapo_runner.policy.weights import stored_tensors
from dapo_runner.rollout.client import RolloutError, Server, ServerError
from dapo_runner.rollout.engine import check_lengths, loadable_weights, sampling_of_each, stop_token_ids
from dapo_runner.rollout.guard import sizes
from dapo_runner.rollout.nccl import NCCLTransfer
from dapo_runner.rollout.pool import GENERATE, REST, ServerPool
from dapo_runner.rollout.prompt_queue import PromptQueue
from dapo_runner.rollout.transfer import FileTransfer, Transfer
from dapo_runner.rollout.vllm import finish_reason, known_logprobs, sampling_fields
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Prompt, SamplingParams, VersionSpan

QUEUED = 2  # batches that a server is asked for at a time: one that it decodes and one behind it
TRANSFERS: dict[str, type[Transfer]] = {"file": FileTransfer, "nccl": NCCLTransfer}
ENDED = "rollout: the run has ended"


class ServerEngine:
    """A rollout engine over the servers of `rollout.server.urls`. Of many ranks each asks all of them for its share, or
    with `rollout.max_staleness` rank 0 for all of it.

    ``update_weights`` and ``generate`` may be called from different threads, with `rollout.max_staleness`.
    """

    def __init__(
        self,
        source: str | Path,
        tokenizer: Any,
        config: Config,
        world: World = SINGLE_PROCESS,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """The servers begin with the weights of ``source``, a model in transformers' format. ``note`` is told of those
        that are lost and back. Raises ConfigError, RolloutError.
        """
        self.tokenizer = tokenizer
        self.settings = config.rollout.server
        self.world = world
        self.answer_within = self.settings.answer_within * (1 + config.rollout.max_staleness)  # behind earlier rounds'
        self.max_tokens = config.longest_sequence
        self.max_batch_sequences = config.rollout.max_batch_sequences
        self.transfer: Transfer = TRANSFERS[self.settings.transfer](config, world)
        # A new name for each process: no server has weights of one that is gone.
        self.run = world.broadcast_from_rank0(lambda: secrets.token_hex(4))
        self.updates = 0
        self.calls: set[PromptQueue] = set()  # under way
        self.closed = False
        model = load_model(source, config.model, torch.device("cpu" if world.is_main else "meta"), "sdpa")
        self.stop_ids = stop_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        text_config = model.config.get_text_config()
        self._n_vocabulary: int = text_config.vocab_size
        trial = {
            "token_ids": self.stop_ids[:1],
            "sampling_params": sampling_fields(SamplingParams(max_tokens=1), 0, self.stop_ids),
            **({"priority": -1} if config.rollout.max_staleness else {}),
        }
        owner = f"{config.run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})"
        claim = {"token": self.run, "owner": owner, "model": sizes(text_config)}
        self.pool = ServerPool(self.settings, self.transfer, claim, trial, note)
        weakref.finalize(self, self.pool.close)  # whose threads would go on trying lost servers
        self.servers = self.pool.servers
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
    ) -> list[list[Completion]]:
        """See ``RolloutEngine.generate`` and, of the log-probs, ``VLLMEngine.generate``; nothing for prompts whose
        responses were dropped. Raises RolloutError, and ValueError for a prompt that leaves less room than its
        ``max_tokens``.
        """
        each = sampling_of_each(prompts, sampling)
        bodies = self._bodies(prompts, each, options.priority)
        needed = max(bool(bodies), round(options.completion_fraction * len(bodies)))
        n_asking = self.world.size if options.priority is None else 1  # rank 0 asks for all
        queue = PromptQueue(bodies, needed, self.servers, self.settings.attempts, self.updates, n_asking)
        threads: list[tuple[Server, threading.Thread]] = []
        try:
            self.calls.add(queue)
            if self.closed:  # or finds it among the calls
                raise RolloutError(ENDED)
            threads += [(server, _start(self._attend, server, queue)) for server in self.servers if bodies]
            self._wait(queue)
        finally:
            queue.close()
            for server, thread in threads:
                _end(server, thread, queue)
            self.calls.discard(queue)
        found = {place: self._with_texts(answers) for place, answers in list(queue.answers.items())}
        return [
            found[place] * (item.n // len(found[place])) if place in found else [] for place, item in enumerate(each)
        ]

    def generate_on_each(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> dict[str, list[list[Completion]]]:
        """What each server that has the present weights answers to all of the prompts, by its URL, the same on every
        rank. One that fails is lost; where none answers, what ``generate`` returns, by "". Raises RolloutError.
        Collective.
        """
        bodies = self._bodies(prompts, [sampling] * len(prompts), None)

        def ask(server: Server) -> list[list[Completion]] | None:
            def ask_one(body: dict[str, Any]) -> list[Completion]:
                answer = server.post(GENERATE, body, caller=self.pool)
                return self._with_texts(self._checked(server, answer, sampling.n, self.updates))

            try:
                with ThreadPoolExecutor(len(bodies)) as threads:
                    answers = list(threads.map(ask_one, bodies))
            except ServerError as error:
                self.pool.lose(server, error)
                return None
            return answers

        def ask_all() -> dict[str, list[list[Completion]]]:
            servers = self.pool.ready()
            found = zip(servers, self.pool.each(ask, servers), strict=True)
            answered = {str(server): answers for server, answers in found if answers is not None}
            return answered or {"": self.generate(prompts, sampling)}

        self.pool.unprobed -= (asked := set(self.pool.ready()))  # one that is lost from here on is unprobed again
        found = self.world.broadcast_from_rank0(ask_all)
        self.pool.unprobed |= {server for server in asked if str(server) not in found}
        return found

    @property
    def is_unprobed(self) -> bool:
        """Whether a server is back that ``generate_on_each`` has not asked since."""
        return any(server in self.pool.unprobed for server in self.pool.ready())

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine.update_weights``. Waits for the servers that are in; the pool sends them to the others.
        Raises RolloutError where none has come within `back_within`.
        """
        self.transfer.publish(f"{self.run}:{self.updates + 1}", loadable_weights(self._model, weights))
        self.updates += 1
        urls = self.world.broadcast_from_rank0(self.pool.deliver)
        if not self.world.is_main:
            self.pool.follow(urls)

    def release(self) -> None:
        """Nothing to give up: the servers' memory is not the policy's."""

    def close(self) -> None:
        """End the calls that other threads have under way, and those that they begin, each with a RolloutError; and the
        threads of the pool.
        """
        self.closed = True
        for queue in list(self.calls):
            queue.fail(RolloutError(ENDED))
        self.pool.close()

    def _bodies(
        self, prompts: Sequence[Prompt], each: Sequence[SamplingParams], priority: int | None
    ) -> list[dict[str, Any]]:
        """The requests. Raises ValueError for a prompt that leaves less room than its ``max_tokens``."""
        check_lengths(prompts, each, self.max_tokens)
        return [
            {
                "token_ids": prompt.token_ids,
                "sampling_params": sampling_fields(item, place, self.stop_ids),
                **self._priority(priority),
            }
            for place, (prompt, item) in enumerate(zip(prompts, each, strict=True))
        ]

    def _priority(self, priority: int | None) -> dict[str, int]:
        """A call beside others, as the probe may be, does not wait behind what those have queued."""
        if priority is not None:
            return {"priority": priority}
        return {"priority": -len(self.calls)} if self.calls else {}

    def _attend(self, server: Server, queue: PromptQueue) -> None:
        """Ask one server from the queue until all of it is answered, whenever the server is in."""
        while not queue.over:
            try:
                if server in self.pool.ready():
                    self._ask(server, queue)
                else:
                    queue.rest(REST)
            except ServerError as error:
                if not queue.over:
                    self.pool.lose(server, error)
            except Exception as error:  # raised again where the call waits
                queue.fail(error)

    def _ask(self, server: Server, queue: PromptQueue) -> None:
        """The same until it fails. Raises ServerError."""
        longest = max(body["sampling_params"]["n"] for body in queue.bodies)
        n_threads = math.ceil(QUEUED * self.max_batch_sequences / longest / queue.n_asking)
        failed: list[Exception] = []
        pullers = [_start(self._pull, server, queue, failed) for _ in range(min(n_threads, len(queue.bodies)))]
        try:
            while not queue.over and not failed:
                if queue.rest(self.settings.health_within, failed):
                    server.check_health()
        except ServerError as error:
            self.pool.lose(server, error)  # even if others have answered by then what it was asked
            failed.append(error)
        finally:
            failed.append(ServerError(f"{server}: this call is over"))
            queue.wake()
            for puller in pullers:
                _end(server, puller, queue)
        if not queue.over:
            raise failed[0]

    def _pull(self, server: Server, queue: PromptQueue, failed: list[Exception]) -> None:
        while (place := queue.take(server, failed)) is not None:
            try:
                answer = server.post(GENERATE, queue.bodies[place], self.answer_within, queue)
                completions = self._checked(server, answer, queue.bodies[place]["sampling_params"]["n"], queue.version)
            except ServerError as error:
                queue.give_back(place, server, error, failed)
            except Exception as error:  # raised again where the call waits
                queue.fail(error)
            else:
                queue.answer(place, completions)
                self.pool.answered(server)

    def _checked(self, server: Server, answer: Any, n: int, oldest: int) -> list[Completion]:
        """The ``n`` responses of an answer, texts apart, once it is known to be whole and of weights since the update
        ``oldest``. Raises ServerError.
        """
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
            known = {f"{self.run}:{update}": update for update in range(oldest, self.updates + 1)}
            if not versions <= known.keys():
                got = shorten(", ".join(sorted(map(str, versions))))
                raise ServerError(f"{server}: expected an answer of weights {' or '.join(known)}, got one of {got}")
            completions = [_completion(choice, known) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            got = shorten(repr(error))
            raise ServerError(f"{server}: expected token ids, log-probs and versions, got others: {got}") from error
        if (places := [choice["index"] for choice in choices]) != list(range(n)):
            raise ServerError(f"{server}: expected responses 0 to {n - 1}, got {shorten(str(places))}")
        if not all(0 <= token < self._n_vocabulary for one in completions for token in one.token_ids.tolist()):
            raise ServerError(f"{server}: expected token ids below {self._n_vocabulary}, got others: of another model")
        return completions

    def _with_texts(self, completions: Sequence[Completion]) -> list[Completion]:
        texts = self.tokenizer.batch_decode([item.token_ids.tolist() for item in completions], skip_special_tokens=True)
        return [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]

    def _wait(self, queue: PromptQueue) -> None:
        """Until every prompt is answered. Raises what ended that otherwise."""
        seen = time.monotonic()
        while not queue.over:
            if queue.is_served_by(self.pool.present()):
                seen = time.monotonic()
            elif self.pool.is_refused or time.monotonic() > seen + self.settings.back_within:
                waiting = f"{queue.n_left} of {len(queue.bodies)} prompts wait"
                raise RolloutError(self.pool.nobody(waiting, *queue.failures))
            queue.rest(REST)
        if queue.error is not None:
            raise queue.error


def _completion(choice: dict[str, Any], updates: Mapping[str, int]) -> Completion:
    """``updates`` by the versions of their weights. Raises KeyError, TypeError or ValueError for what is none."""
    token_ids = torch.tensor(choice["token_ids"], dtype=torch.int64)
    logprobs = known_logprobs([token["logprob"] for token in choice["logprobs"]["content"]])
    versions = tuple(
        VersionSpan(updates[span["version"]], span["end"] - span["start"]) for span in choice["weight_versions"]
    )
    n_of_versions = sum(stretch.length for stretch in versions)
    if not 0 < token_ids.numel() == logprobs.numel() == n_of_versions:
        raise ValueError(f"{token_ids.numel()} tokens, log-probs of {logprobs.numel()}, versions of {n_of_versions}")
    return Completion(token_ids, logprobs, finish_reason(choice["finish_reason"]), "", versions=versions)


def _start(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="rollout", daemon=True)
    thread.start()
    return thread


def _end(server: Server, thread: threading.Thread, caller: object) -> None:
    """Wait for a thread that has nothing left to do but to see its request cut short, or the one it was just making."""
    while thread.is_alive():
        server.hang_up(caller)
        thread.join(REST)
