"""The engine behind addresses: `vllm serve` processes on other GPUs or machines, or on this one.

Prompts are one queue that every server is asked from, so many at a time that each has a batch waiting. Which of them
answers makes no difference but for rounding: a response's dice are thrown by a seed of its round and its prompt's place
in it. An answer counts where it says that all of it was made with the weights of now, or of an update since the call
began. A server that fails is left alone until it is well again and has taken them; what it was asked goes back to the
queue.

No wait is without its end, `rollout.server.*_within`, and what it raises then says who waited for whom.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import Config
from dapo_runner.parallel.world import ALONE, World
from dapo_runner.policy.model import load_model
from dapo_runner.rewards.endpoint import shown
from dapo_runner.rollout.client import RolloutError, Server, ServerError
from dapo_runner.rollout.engine import check_lengths, checked_weights, sampling_of_each, stop_token_ids
from dapo_runner.rollout.nccl import NCCLTransfer
from dapo_runner.rollout.transfer import FileTransfer, Transfer
from dapo_runner.rollout.vllm import finish_reason, sampling_fields
from dapo_runner.types import Completion, Prompt, SamplingParams, Stretch

REST = 0.2  # seconds before a server that failed is looked at again
QUEUED = 2  # batches that a server is asked for at a time: one that it decodes and one behind it
NO_LOGPROB = -9999.0  # what vLLM writes for one that is none
TRANSFERS: dict[str, type[Transfer]] = {"file": FileTransfer, "nccl": NCCLTransfer}
ENDED = "rollout: the run has ended"


class ServerEngine:
    """A rollout engine over the servers of `rollout.server.urls`. Of many ranks each asks all of them for its share, or
    with `rollout.ahead` rank 0 for all of it.

    ``update_weights`` and ``generate`` may be called from different threads, with `rollout.ahead`.
    """

    def __init__(
        self,
        source: str | Path,
        tokenizer: Any,
        config: Config,
        world: World = ALONE,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """The servers begin with the weights of ``source``, a model in transformers' format. ``note`` is told of those
        that are lost and back. Raises ConfigError, RolloutError.
        """
        self.tokenizer = tokenizer
        self.settings = config.rollout.server
        self.world = world
        self.note = note
        self.answer_within = self.settings.answer_within * (1 + config.rollout.ahead)  # behind earlier rounds'
        self.max_tokens = config.longest_sequence
        self.max_batch_sequences = config.rollout.max_batch_sequences
        self.servers = [Server(url, self.settings) for url in self.settings.urls]
        self.lost: dict[Server, str] = {}  # and why
        self.transfer: Transfer = TRANSFERS[self.settings.transfer](config, world)
        self.run = world.first(lambda: secrets.token_hex(4))  # no server has weights of a process that is gone
        self.updates = 0
        self.calls: set[_Queue] = set()  # under way
        self.closed = False
        model = load_model(source, config.model, torch.device("cpu" if world.is_main else "meta"), "sdpa")
        self.stop_ids = stop_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.update_weights(model.named_parameters())

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """See ``RolloutEngine.generate`` and, of the log-probs, ``VLLMEngine.generate``; nothing for prompts whose
        responses were dropped. Raises RolloutError, and ValueError for a prompt that leaves less room than its
        ``max_tokens``.
        """
        each = sampling_of_each(prompts, sampling)
        check_lengths(prompts, each, self.max_tokens)
        bodies = [
            {
                "token_ids": prompt.token_ids,
                "sampling_params": sampling_fields(item, place, self.stop_ids),
                **self._priority(item),
            }
            for place, (prompt, item) in enumerate(zip(prompts, each, strict=True))
        ]
        needed = max(bool(bodies), round(sum(item.needed for item in each)))
        ahead = any(item.priority is not None for item in each)  # then rank 0 asks, for all
        queue = _Queue(bodies, needed, self.settings.attempts, self.updates, 1 if ahead else self.world.size)
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

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine.update_weights``. Servers that are away get them when they are back. Raises RolloutError
        where none has come within `back_within`.
        """
        self.transfer.publish(f"{self.run}:{self.updates + 1}", checked_weights(self._shapes, weights))
        self.updates += 1
        self.world.on_first(self._deliver)

    def release(self) -> None:
        """Nothing to give up: the servers' memory is not the policy's."""

    def close(self) -> None:
        """End the calls that other threads have under way, and those that they begin, each with a RolloutError."""
        self.closed = True
        for queue in list(self.calls):
            queue.fail(RolloutError(ENDED))

    def _priority(self, sampling: SamplingParams) -> dict[str, int]:
        """A call beside others, as the probe's is with `rollout.ahead`, does not wait behind what those have queued."""
        if sampling.priority is not None:
            return {"priority": sampling.priority}
        return {"priority": -len(self.calls)} if self.calls else {}

    def _deliver(self) -> None:
        """Have the servers that are there load the weights, one at least."""
        until = time.monotonic() + self.settings.back_within
        with ThreadPoolExecutor(len(self.servers)) as threads:
            while True:
                asked = [threads.submit(self._brought_up_to_date, server) for server in self.servers]
                try:
                    if any([one.result() for one in asked]):
                        return
                except BaseException:  # Ctrl-C among them, which a server that hangs does not hold up
                    while wait(asked, REST).not_done:
                        for server in self.servers:
                            server.hang_up(self)
                    raise
                if time.monotonic() > until:
                    raise RolloutError(self._nobody(f"weights {self.transfer.version} wait"))
                time.sleep(REST)

    def _brought_up_to_date(self, server: Server) -> bool:
        try:
            self._bring_up_to_date(server, self)
        except ServerError as error:
            self._lose(server, error)
            for queue in list(self.calls):  # what it has under way is of weights that are past
                server.hang_up(queue)
        return server not in self.lost

    def _bring_up_to_date(self, server: Server, caller: object = None) -> None:
        """See that it is well and has the weights. Raises ServerError."""
        server.check_health()
        with server.turn:
            if server.version != self.transfer.version:
                server.version = self.transfer.send(server, caller)
        if self.lost.pop(server, None) is not None:
            self.note(f"{server} is back, with weights {server.version}")

    def _lose(self, server: Server, error: ServerError) -> None:
        server.version = None
        if server not in self.lost:
            self.note(f"{server} is left out until it is well again: {error}")
        self.lost[server] = str(error)

    def _attend(self, server: Server, queue: _Queue) -> None:
        """Ask one server from the queue until all of it is answered, whatever becomes of the server."""
        while not queue.over:
            try:
                self._bring_up_to_date(server, queue)
                self._ask(server, queue)
            except ServerError as error:
                if not queue.over:
                    self._lose(server, error)
                queue.rest(REST)
            except Exception as error:  # raised again where the call waits
                queue.fail(error)

    def _ask(self, server: Server, queue: _Queue) -> None:
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
            self._lose(server, error)  # even if others have answered by then what it was asked
            failed.append(error)
        finally:
            failed.append(ServerError(f"{server}: this call is over"))
            queue.wake()
            for puller in pullers:
                _end(server, puller, queue)
        if not queue.over:
            raise failed[0]

    def _pull(self, server: Server, queue: _Queue, failed: list[Exception]) -> None:
        while (place := queue.take(failed)) is not None:
            try:
                answer = server.post("/inference/v1/generate", queue.bodies[place], self.answer_within, queue)
                completions = self._checked(server, answer, queue.bodies[place]["sampling_params"]["n"], queue.version)
            except ServerError as error:
                queue.give_back(place, error, failed)
            except Exception as error:  # raised again where the call waits
                queue.fail(error)
            else:
                queue.answer(place, completions)

    def _checked(self, server: Server, answer: Any, n: int, oldest: int) -> list[Completion]:
        """The ``n`` responses of an answer, texts apart, once it is known to be whole and of weights since the update
        ``oldest``. Raises ServerError.
        """
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
            known = {f"{self.run}:{update}": update for update in range(oldest, self.updates + 1)}
            if not versions <= known.keys():
                got = shown(", ".join(sorted(map(str, versions))), None)
                raise ServerError(f"{server}: expected an answer of weights {' or '.join(known)}, got one of {got}")
            completions = [_completion(choice, known) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            got = shown(repr(error), None)
            raise ServerError(f"{server}: expected token ids, log-probs and versions, got others: {got}") from error
        if len(completions) != n:
            raise ServerError(f"{server}: expected {n} responses, got {len(completions)}")
        if not all((completion.logprobs > NO_LOGPROB).all() for completion in completions):  # nor NaN
            raise RolloutError(f"{server}: expected log-probs, got one that is none: the weights are not finite")
        return completions

    def _with_texts(self, completions: Sequence[Completion]) -> list[Completion]:
        texts = self.tokenizer.batch_decode([item.token_ids.tolist() for item in completions], skip_special_tokens=True)
        return [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]

    def _wait(self, queue: _Queue) -> None:
        """Until every prompt is answered. Raises what ended that otherwise."""
        seen = time.monotonic()
        while not queue.over:
            if len(self.lost) < len(self.servers):
                seen = time.monotonic()
            elif time.monotonic() > seen + self.settings.back_within:
                raise RolloutError(self._nobody(f"{queue.n_left} of {len(queue.bodies)} prompts wait"))
            queue.rest(REST)
        if queue.error is not None:
            raise queue.error

    def _nobody(self, waiting: str) -> str:
        why = "; ".join(list(self.lost.values()))
        return (
            f"rollout: {waiting} for a server, and none of {len(self.servers)} has been well for "
            f"{self.settings.back_within:g} s (rollout.server.back_within): {why}. `dapo serve RECIPE` starts one"
        )


def _completion(choice: dict[str, Any], updates: Mapping[str, int]) -> Completion:
    """``updates`` by the versions of their weights. Raises KeyError, TypeError or ValueError for what is none."""
    token_ids = torch.tensor(choice["token_ids"], dtype=torch.int64)
    logprobs = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]], dtype=torch.float32)
    versions = tuple(
        Stretch(updates[span["version"]], span["end"] - span["start"]) for span in choice["weight_versions"]
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


class _Queue:
    """Requests of one call, and what came of them: each is waiting, with one server, or answered."""

    def __init__(self, bodies: list[dict[str, Any]], needed: int, attempts: int, version: int, n_asking: int) -> None:
        """It is over once ``needed`` of them are answered. ``version``: the update whose weights are the oldest that
        may answer. ``n_asking``: ranks that have a part of the same call each.
        """
        self.bodies = bodies
        self.needed = needed
        self.version = version
        self.attempts = attempts
        self.n_asking = n_asking
        self.answers: dict[int, list[Completion]] = {}
        self.error: Exception | None = None
        self._waiting = deque(range(len(bodies)))
        self._tries = Counter[int]()
        self._closed = False
        self._changed = threading.Condition()

    @property
    def n_left(self) -> int:
        return self.needed - len(self.answers)

    @property
    def over(self) -> bool:
        return self._closed or self.error is not None or self.n_left <= 0

    def take(self, stopped: list[Exception]) -> int | None:
        """The next request; waits where all are with servers, until one comes back. None once it is over or there is
        something in ``stopped``.
        """
        with self._changed:
            while not self.over and not stopped:
                if self._waiting:
                    return self._waiting.popleft()
                self._changed.wait()
            return None

    def answer(self, place: int, completions: list[Completion]) -> None:
        with self._changed:
            if not self.over:
                self.answers[place] = completions
            if self.over:
                self._changed.notify_all()

    def give_back(self, place: int, error: ServerError, stopped: list[Exception]) -> None:
        """What a server has failed on. Failures that follow from an earlier one, in ``stopped``, do not count."""
        with self._changed:
            self._tries[place] += not stopped
            if self._tries[place] >= self.attempts:
                self.error = RolloutError(
                    f"rollout: a prompt was asked {self.attempts} times (rollout.server.attempts), at last {error}"
                )
            stopped.append(error)
            self._waiting.appendleft(place)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def rest(self, seconds: float, stopped: Sequence[Exception] = ()) -> bool:
        """Whether so long nothing has come to an end here, nor anything to ``stopped``."""
        with self._changed:
            return not self._changed.wait_for(lambda: self.over or bool(stopped), seconds)
