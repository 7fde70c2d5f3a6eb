"""Episodes: the policy and its environment take turns.

An episode is a list of tokens that only grows. What the policy sampled is never decoded and tokenized again; what the
environment says is tokenized once and does not train. Each episode goes on as soon as its own environment has answered.
"""

from __future__ import annotations

import asyncio
import random
import reprlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from dapo_runner.config import Config
from dapo_runner.environments.environment import Answer, Environment, Number
from dapo_runner.environments.make import make_environment, read_tools
from dapo_runner.environments.template import TurnTemplate
from dapo_runner.environments.tools import ToolEnvironment
from dapo_runner.errors import ConfigError, RunError
from dapo_runner.rewards.reward import describe_error, in_thread
from dapo_runner.rollout.engine import Groups, RolloutEngine
from dapo_runner.types import CallOptions, Completion, Prompt, SamplingParams, TruncatedSupport, Turn

MOST_OF_ERROR = 300  # characters of an environment's error that are shown
MOST_CHARACTERS = 32  # of a message, for each token that an episode may have; longer ones are not even tokenized
KINDS = ("raised", "late", "invalid", "too_long")
ANSWER = "(text, messages or None; finite number or None; True or False) from step"
COUNTS = ("episodes", "turns", "failed", *(f"failed_{kind}" for kind in KINDS))


class EpisodeError(RunError):
    """More episodes failed than `env.max_failed` allows."""


class FailureError(Exception):
    """An environment failed in one of the ways of ``KINDS``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(eq=False)
class _Episode:
    """An episode in the making."""

    number: int  # of its prompt in the call
    prompt: Prompt
    sampling: SamplingParams  # of its group
    name: str  # what its random numbers follow from
    environment: Any = None
    cleanup: ExitStack = field(default_factory=ExitStack)  # closes the environment
    call: Future[Any] = field(default_factory=Future)  # of the environment, the last one so far
    turns: list[tuple[list[int], Completion]] = field(default_factory=list)  # each behind tokens of the environment
    rewards: list[float | None] = field(default_factory=list)  # of the turns
    end: str = ""  # why it ended
    error: FailureError | None = None
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return list(chain.from_iterable((*tokens, *turn.token_ids.tolist()) for tokens, turn in self.turns))

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.sampling.max_tokens - len(self.token_ids)

    def reset(self, make: Callable[[], Environment]) -> str:
        self.environment = make()
        self.cleanup.callback(getattr(self.environment, "close", lambda: None))
        text = self.environment.reset(deepcopy({"answer": self.prompt.answer, **self.prompt.row}))
        return _checked(str | None, text, "a text or None from reset") or ""

    def step(self, text: str) -> Answer:
        answer: Answer = _checked(Answer, self.environment.step(text), ANSWER)
        if not (answer.is_done or answer.messages):
            raise FailureError("invalid", "expected an observation or the end of the episode from step, got neither")
        return answer

    def finish(self) -> None:
        """Add the reward of the whole episode to that of its last turn, and close the environment."""
        with self.cleanup:
            found = getattr(self.environment, "get_reward", lambda: None)()
            reward = _checked(Number | None, found, "a finite number or None from get_reward")
            self.counts = _checked(dict[str, Number], getattr(self.environment, "counts", {}), "numbers in counts")
        if {*self.counts} & {*COUNTS}:
            raise FailureError("invalid", f"expected counts by other names than {', '.join(COUNTS)}")
        if reward is not None:
            self.rewards[-1] = reward + (self.rewards[-1] or 0.0)


class EpisodeRunner:
    """Has an engine and environments take turns. Calls may be in several threads.

    Raises ConfigError for an environment that cannot be imported, or a chat template that does not only append.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        assert config.env is not None
        self.config, self.tokenizer = config.env, tokenizer
        self.make = make_environment(config.env, tokenizer, min(200, config.rollout.max_response_tokens // 4))
        chat = bool(tokenizer.chat_template) and config.data.chat_template != "never"
        self.template = TurnTemplate(tokenizer, chat=chat, tools=read_tools(self.make))
        self.counts, self.warnings = deque[Counter[str]](), deque[str]()  # of the calls so far
        self.unknown: list[str] = []  # the first text that the tokenizer does not know

    def __call__(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], options: CallOptions
    ) -> Groups:
        """Return the episodes of each prompt without those that failed. Raises EpisodeError where too many did."""
        episodes = [
            _Episode(number, prompt, one, f"{one.seed}:{number if one.index is None else one.index}:{sample}")
            for number, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
            for sample in range(one.n)
        ]
        _run(_Call(self, engine).run(episodes, options))
        self._count(episodes)
        groups = [[one for one in episodes if one.number == number and not one.error] for number in range(len(prompts))]
        for group in groups:
            if any(reward is not None for episode in group for reward in episode.rewards):
                for episode in group:
                    episode.rewards[-1] = episode.rewards[-1] or 0.0
        return [[_joined(episode, self.tokenizer) for episode in group] for group in groups]

    def _count(self, episodes: Sequence[_Episode]) -> None:
        failed = [(episode, episode.error) for episode in episodes if episode.error is not None]
        counts = Counter(episodes=len(episodes), turns=sum(len(one.turns) for one in episodes), failed=len(failed))
        counts.update(f"failed_{error.kind}" for _, error in failed)
        for episode in episodes:
            counts.update({} if episode.error else episode.counts)
        self.counts.append(counts)
        if failed:
            episode, error = failed[0]
            where = f"prompt {episode.prompt.id}, turn {len(episode.turns)}"
            warning = f"{len(failed)} of {len(episodes)} episodes failed and are left out: {error}; {where}"
            self.warnings.append(warning)
            if len(failed) > self.config.max_failed * len(episodes) + 1e-9:
                raise EpisodeError(f"env.max_failed={self.config.max_failed:g}: {warning}") from error.__cause__

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        total = Counter[str](dict.fromkeys(COUNTS, 0))
        while self.counts:
            total.update(self.counts.popleft())
        return dict(total)

    def take_warnings(self) -> list[str]:
        """Return which episodes were left out since the last call."""
        return [self.warnings.popleft() for _ in range(len(self.warnings))]

    def warn_if_unknown(self, text: str, tokens: Sequence[int]) -> None:
        """Warn once of a text of an environment that the vocabulary lacks a part of. ``tokens``: as it was written."""
        unknown = self.tokenizer.unk_token_id
        if unknown in tokens and not self.unknown and unknown in self.tokenizer.encode(text, add_special_tokens=False):
            self.unknown.append(text)
            self.warnings.append(f"env: the tokenizer turns a part of {text!r:.200} into {self.tokenizer.unk_token}")

    def uncounted(self) -> EpisodeRunner:
        """Return a runner whose episodes are not counted here. It shares the warnings."""
        other = copy(self)
        other.counts = deque()
        return other


def _run(call: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, in a thread if this one has a running event loop, as that of a notebook does."""
    run = partial(asyncio.run, call)
    run() if asyncio.events._get_running_loop() is None else in_thread(run).result()


class _Call:
    """A call of an ``EpisodeRunner``. Episodes are coroutines of this thread; environments are called in others."""

    def __init__(self, runner: EpisodeRunner, engine: RolloutEngine) -> None:
        self.runner, self.config, self.template, self.engine = runner, runner.config, runner.template, engine
        self.progress = asyncio.Event()
        self.free = asyncio.Semaphore(self.config.concurrency)
        self.n_called = 0  # environments that have not answered
        self.sampled: dict[int, asyncio.Future[Completion]] = {}

    async def run(self, episodes: Sequence[_Episode], options: CallOptions) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.progress.set)

        with closing(self.engine.open_call(options, wake, len(episodes))) as self.asked:
            lives = (self._live(key, episode) for key, episode in enumerate(episodes))
            finished = asyncio.gather(*lives, return_exceptions=True)
            finished.add_done_callback(lambda _: self.progress.set())
            while not finished.done():
                if self.asked.is_ready(self.n_called == 0):
                    for key, completion in self.asked.work():
                        self.sampled.pop(key).set_result(completion)
                    for _ in range(3):  # rounds of the loop until the answer of a thread has reached its episode
                        await asyncio.sleep(0)
                else:
                    await self.progress.wait()
                    self.progress.clear()
            for error in filter(None, await finished):
                raise error

    async def _live(self, key: int, episode: _Episode) -> None:
        try:
            episode.end = await self._take_turns(key, episode)
            await self._call(episode, episode.finish)
        except BaseException as error:  # a cancellation too: the engine has failed
            episode.call.add_done_callback(lambda _: in_thread(episode.cleanup.close))  # no call runs beside another
            if not isinstance(error, FailureError):
                raise
            episode.error = error

    async def _take_turns(self, key: int, episode: _Episode) -> str:
        """Return why the episode ended."""
        text = await self._call(episode, partial(episode.reset, self.runner.make))
        tokens = self._tokenize(episode, text, partial(self.template.open_episode, episode.prompt.messages, text))
        while len(tokens) < episode.room:
            self.asked.add(key, *self._request(episode, tokens))
            self.sampled[key] = asyncio.get_running_loop().create_future()
            completion = await self.sampled[key]
            episode.turns.append((tokens, completion))
            episode.rewards.append(None)
            if completion.truncated:
                break
            sampled = completion.token_ids.tolist()
            own = sampled[:-1] if self.template.is_special(sampled[-1]) else sampled
            text = self.runner.tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            answer = await self._call(episode, partial(episode.step, text))
            episode.rewards[-1] = answer.reward
            if answer.is_done:
                return "done"
            if len(episode.turns) == self.config.max_turns:
                return "max_turns"
            reply = "".join(message.content for message in answer.messages)
            tokens = self._tokenize(episode, reply, partial(self.template.reply, answer.messages, sampled[-1]))
        return "length"

    def _tokenize(self, episode: _Episode, text: str, tokenize: Callable[[], list[int]]) -> list[int]:
        limit = episode.sampling.max_tokens
        try:
            tokens = tokenize() if len(text) <= MOST_CHARACTERS * limit else [-1] * limit
        except ConfigError as error:  # a role that the chat template does not take
            raise FailureError("invalid", str(error)) from error
        self.runner.warn_if_unknown(text, tokens)
        if len(tokens) >= limit and not (episode.turns and self.template.tools):  # the policy asked for this result
            raise FailureError(
                "too_long", f"expected messages that fit into an episode of {limit} tokens, got {len(text)} characters"
            )
        return tokens

    def _request(self, episode: _Episode, tokens: list[int]) -> tuple[Prompt, SamplingParams]:
        """Return what the engine is asked for the next turn, behind ``tokens`` of the environment."""
        room = episode.room - len(tokens)
        limit = min(room, self.config.max_turn_tokens or room)
        seed = random.Random(f"{episode.name}:{len(episode.turns)}").getrandbits(31)
        prompt = replace(episode.prompt, token_ids=(*episode.prompt.token_ids, *episode.token_ids, *tokens))
        return prompt, replace(episode.sampling, n=1, max_tokens=limit, seed=seed, index=0)

    async def _call(self, episode: _Episode, function: Callable[[], Any]) -> Any:
        """Call an environment in a thread, which is left behind if it is late. Raises FailureError."""
        self.n_called += 1
        try:
            async with self.free:
                episode.call = in_thread(partial(_attempt, function))
                result = await asyncio.wait_for(asyncio.wrap_future(episode.call), self.config.timeout_seconds)
        except asyncio.TimeoutError:
            message = f"no answer within {self.config.timeout_seconds:g} s (env.timeout_seconds)"
            raise FailureError("late", message) from None
        finally:
            self.n_called -= 1
            self.progress.set()
        if isinstance(result, FailureError):
            raise result
        return result


def _attempt(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or a FailureError."""
    try:
        return function()
    except FailureError as failure:
        return failure
    except BaseException as error:
        text = "".join(character if character.isprintable() else "�" for character in describe_error(error))
        raised = FailureError("raised", text[:MOST_OF_ERROR])
        raised.__cause__ = error
        return raised


_adapter = cache(TypeAdapter)


def _checked(kind: Any, value: Any, expected: str) -> Any:
    """Return what a method of an environment has returned as ``kind``, in words ``expected``. Raises FailureError."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise FailureError("invalid", f"expected {expected}, got {reprlib.repr(value)}") from error


def open_episodes(config: Config, tokenizer: Any) -> EpisodeRunner | None:
    """Return what runs the episodes of `env`; None where responses have one turn. Raises ConfigError."""
    return None if config.env is None else EpisodeRunner(config, tokenizer)


def _joined(episode: _Episode, tokenizer: Any) -> Completion:
    """Return the whole episode as one response."""
    parts, turns, start = list[Completion](), list[Turn](), 0
    ends = [*(("stop", reward) for reward in episode.rewards[:-1]), (episode.end, episode.rewards[-1])]
    for (tokens, completion), end in zip(episode.turns, ends, strict=True):
        for part in (_as_part(tokens, completion), completion) if tokens else (completion,):
            text = tokenizer.decode(part.token_ids.tolist(), clean_up_tokenization_spaces=False)
            place = start, start + part.length, text
            turns.append(Turn("assistant", *place, *end) if part is completion else Turn("environment", *place))
            parts.append(part)
            start += part.length
    supports = [part.support for part in parts if part.support is not None]
    return replace(
        parts[-1],
        token_ids=torch.cat([part.token_ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        finish_reason="length" if episode.end == "length" else "stop",
        support=TruncatedSupport.concatenate(supports) if supports else None,
        versions=tuple(span for part in parts for span in part.versions),
        loss_mask=torch.cat([torch.full((turn.end - turn.start,), turn.role == "assistant") for turn in turns]),
        turns=tuple(turns),
        environment=shown.state if isinstance(shown := episode.environment, ToolEnvironment) else shown,
    )


def _as_part(tokens: list[int], following: Completion) -> Completion:
    """Return tokens of the environment in the form of a response, as the turn ``following`` them is."""
    n, versions = len(tokens), following.versions[:1]
    return Completion(
        token_ids=torch.tensor(tokens),
        logprobs=torch.full((n,), torch.nan),
        finish_reason="stop",
        text="",
        support=None if following.support is None else TruncatedSupport.full(n),
        versions=tuple(span._replace(length=n) for span in versions),
    )
