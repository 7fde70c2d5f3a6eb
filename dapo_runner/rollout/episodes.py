"""Episodes: the policy and its environment take turns.

An episode is a list of tokens that only grows. What the policy sampled is never decoded and tokenized again; what the
environment says is tokenized once and does not train. Each episode goes on as soon as its own environment has answered.
"""

from __future__ import annotations

import math
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from dapo_runner.config import Config, EnvironmentConfig
from dapo_runner.environments.environment import Environment, Message
from dapo_runner.environments.make import make_environment, read_tools
from dapo_runner.environments.template import TurnTemplate
from dapo_runner.environments.tools import ToolEnvironment
from dapo_runner.errors import ConfigError, RunError
from dapo_runner.rewards.reward import in_thread
from dapo_runner.rollout.calls import Calls, LateError
from dapo_runner.rollout.engine import Groups, RolloutEngine
from dapo_runner.types import CallOptions, Completion, Prompt, SamplingParams, TruncatedSupport, Turn

MOST_OF_ERROR = 300  # characters of an environment's error that are shown
MOST_CHARACTERS = 32  # of a message, for each token that an episode may have; longer ones are not even tokenized


class EpisodeError(RunError):
    """More episodes failed than `env.max_failed` allows."""


class FailureError(Exception):
    """An environment failed in one of the ways of ``KINDS``. The cause is what it raised."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message)
        self.kind = kind


KINDS = ("raised", "late", "invalid", "too_long")
COUNTS = ("episodes", "turns", "failed", *(f"failed_{kind}" for kind in KINDS))
Role = Literal["assistant", "environment"]
Request = Callable[[], Any] | tuple[Prompt, SamplingParams]  # a call of the environment, or a turn of the policy


@dataclass(eq=False)
class _Episode:
    """An episode in the making. ``parts`` are its turns, those of the policy with a reward in ``rewards``."""

    number: int  # of its prompt in the call
    prompt: Prompt
    sampling: SamplingParams  # of its group
    name: str  # what its random numbers follow from
    environment: Environment | None = None
    parts: list[tuple[Role, Completion]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    end: str = ""  # why it ended
    error: FailureError | None = None
    counts: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the environment
    is_closed: bool = False

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.sampling.max_tokens - sum(part.length for _, part in self.parts)

    def begin(self, make: Callable[[], Environment]) -> str:
        with self.lock:
            self.environment = make()
            text = self.environment.reset(deepcopy({"answer": self.prompt.answer, **self.prompt.row}))
        if not isinstance(text, str | None):
            raise FailureError("invalid", f"expected a text or None from reset, got {text!r:.200}")
        return text or ""

    def step(self, text: str) -> tuple[tuple[Message, ...], float | None, bool]:
        with self.lock:
            assert self.environment is not None
            return _read_step(self.environment.step(text))

    def finish(self) -> float | None:
        """Return the reward of the whole episode, and close the environment."""
        with self.lock:
            reward = _read_reward(getattr(self.environment, "get_reward", lambda: None)())
            counts = getattr(self.environment, "counts", {})
        self.close()
        if not isinstance(counts, Mapping) or {*counts} & {*COUNTS} or not all(map(_is_finite, counts.values())):
            raise FailureError("invalid", f"expected counts of finite numbers by new names, got {counts!r:.200}")
        self.counts = dict(counts)
        return reward

    def close(self) -> None:
        """Give back what the environment holds, once, after a call that still runs."""
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                getattr(self.environment, "close", lambda: None)()


class EpisodeRunner:
    """Has an engine and environments take turns. ``counts`` are of all calls so far; calls may be in several threads.

    Raises ConfigError for an environment that cannot be imported, or a chat template that does not only append.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        assert config.env is not None
        self.config: EnvironmentConfig = config.env
        self.tokenizer = tokenizer
        self.make = make_environment(config.env, tokenizer, min(200, config.rollout.max_response_tokens // 4))
        chat = bool(tokenizer.chat_template) and config.data.chat_template != "never"
        self.template = TurnTemplate(tokenizer, chat=chat, tools=read_tools(self.make))
        self.counts, self.warnings = Counter[str](), list[str]()
        self._lock = threading.Lock()

    def __call__(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], options: CallOptions
    ) -> Groups:
        """Return the episodes of each prompt without those that failed. Raises EpisodeError where too many did."""
        episodes = [
            _Episode(number, prompt, one, f"{one.seed}:{number if one.index is None else one.index}:{sample}")
            for number, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
            for sample in range(one.n)
        ]
        self._run(engine, episodes, options)
        self._count(episodes)
        groups = [[one for one in episodes if one.number == number and not one.error] for number in range(len(prompts))]
        for group in groups:
            if any(reward is not None for episode in group for reward in episode.rewards):
                for episode in group:
                    episode.rewards[-1] = episode.rewards[-1] or 0.0
        return [[_joined(episode, self.tokenizer) for episode in group] for group in groups]

    def _run(self, engine: RolloutEngine, episodes: Sequence[_Episode], options: CallOptions) -> None:
        calls = Calls(self.config.concurrency, self.config.timeout_seconds)
        lives = [self._live(episode) for episode in episodes]
        with closing(engine.open_call(options, calls.wake, len(episodes))) as asked:

            def go_on(place: int, result: Any) -> None:
                try:
                    failed = isinstance(result, BaseException)
                    request = lives[place].throw(_as_failure(result)) if failed else lives[place].send(result)
                except StopIteration:
                    return
                if callable(request):
                    calls.add(place, request)
                else:
                    asked.add(place, *request)

            try:
                for place in range(len(episodes)):
                    go_on(place, None)
                while not calls.is_done or asked.n_open:
                    for place, result in calls.take(block=not asked.is_ready(calls.is_done)):
                        go_on(place, result)
                    if asked.is_ready(calls.is_done):
                        for place, completion in asked.work():
                            go_on(place, completion)
            finally:
                for life in lives:
                    life.close()

    def _live(self, episode: _Episode) -> Generator[Request, Any, None]:
        """Yield what an episode asks for and receive the answers, until its environment is closed."""
        try:
            episode.end = yield from self._play(episode)
            reward = yield episode.finish
            if reward is not None:
                episode.rewards[-1] = reward + (episode.rewards[-1] or 0.0)
        except FailureError as error:
            episode.error = error
        finally:
            if not episode.is_closed:
                in_thread(episode.close)

    def _play(self, episode: _Episode) -> Generator[Request, Any, str]:
        """Do the same for the turns of an episode. Returns why it ended."""
        text = yield partial(episode.begin, self.make)
        tokens = self._tokenize(episode, text, partial(self.template.open_episode, episode.prompt.messages, text))
        while len(tokens) < episode.room:
            completion = yield self._ask(episode, tokens)
            episode.parts += [("environment", _as_part(tokens, completion))] if tokens else []
            episode.parts.append(("assistant", completion))
            episode.rewards.append(None)
            if completion.truncated:
                break
            sampled = completion.token_ids.tolist()
            own = sampled[:-1] if self.template.is_special(sampled[-1]) else sampled
            text = self.tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            messages, episode.rewards[-1], is_done = yield partial(episode.step, text)
            if is_done:
                return "done"
            if len(episode.rewards) == self.config.max_turns:
                return "max_turns"
            reply = "".join(message.content for message in messages)
            tokens = self._tokenize(episode, reply, partial(self.template.reply, messages, sampled[-1]))
        return "length"

    def _tokenize(self, episode: _Episode, text: str, tokenize: Callable[[], list[int]]) -> list[int]:
        limit = episode.sampling.max_tokens
        try:
            tokens = tokenize() if len(text) <= MOST_CHARACTERS * limit else [0] * limit
        except ConfigError as error:  # a role that the chat template does not take
            raise FailureError("invalid", str(error)) from error
        if len(tokens) >= limit and not (episode.rewards and self.template.tools):  # the policy asked for this result
            raise FailureError(
                "too_long", f"expected messages that fit into an episode of {limit} tokens, got {len(text)} characters"
            )
        return tokens

    def _ask(self, episode: _Episode, tokens: list[int]) -> tuple[Prompt, SamplingParams]:
        token_ids = chain(episode.prompt.token_ids, *(part.token_ids.tolist() for _, part in episode.parts), tokens)
        room = episode.room - len(tokens)
        limit = min(room, self.config.max_turn_tokens or room)
        seed = random.Random(f"{episode.name}:{len(episode.rewards)}").getrandbits(31)
        prompt = replace(episode.prompt, token_ids=tuple(token_ids))
        return prompt, replace(episode.sampling, n=1, max_tokens=limit, seed=seed, index=0)

    def _count(self, episodes: list[_Episode]) -> None:
        failed = [episode for episode in episodes if episode.error is not None]
        kinds = Counter(episode.error.kind for episode in failed if episode.error)
        turns = sum(len(episode.rewards) for episode in episodes)
        with self._lock:
            self.counts.update({"episodes": len(episodes), "turns": turns, "failed": len(failed)})
            self.counts.update({f"failed_{kind}": n for kind, n in kinds.items()})
            for episode in episodes:
                self.counts.update(episode.counts)
            if failed:
                first = f"{len(failed)} of {len(episodes)} episodes failed and are left out: {failed[0].error}"
                first += f"; prompt {failed[0].prompt.id}, turn {len(failed[0].rewards)}"
                self.warnings.append(first)
        if len(failed) > self.config.max_failed * len(episodes) + 1e-9:
            raise EpisodeError(f"env.max_failed={self.config.max_failed:g}: {first}") from failed[0].error

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            counts, self.counts = {**dict.fromkeys(COUNTS, 0), **self.counts}, Counter()
        return {name: float(n) for name, n in counts.items()}

    def take_warnings(self) -> list[str]:
        """Return which episodes were left out since the last call."""
        with self._lock:
            warnings, self.warnings = self.warnings, []
        return warnings


def open_episodes(config: Config, tokenizer: Any) -> EpisodeRunner | None:
    """Return what runs the episodes of `env`; None where responses have one turn. Raises ConfigError."""
    return None if config.env is None else EpisodeRunner(config, tokenizer)


def _as_failure(error: BaseException) -> FailureError:
    """Return what a call raised, with the line of the user's code."""
    if isinstance(error, FailureError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if Path(frame.filename).name not in ("reward.py", Path(__file__).name)]
    line = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    text = "".join(character if character.isprintable() else "�" for character in str(error))[:MOST_OF_ERROR]
    failure = FailureError(
        "late" if isinstance(error, LateError) else "raised", f"{type(error).__name__}: {text}{line}"
    )
    failure.__cause__ = error
    return failure


def _read_step(result: Any) -> tuple[tuple[Message, ...], float | None, bool]:
    """Return messages, reward and whether the episode is over. Raises FailureError."""
    try:
        observation, reward, is_done = result
        messages = (Message("user", observation),) if isinstance(observation, str) else observation or ()
        if is_done not in (True, False) or not all(map(_is_message, messages)):
            raise TypeError
    except (TypeError, ValueError) as error:
        raise FailureError("invalid", f"expected (observation, reward, done) from step, got {result!r:.200}") from error
    if not (is_done or messages):
        raise FailureError("invalid", "expected an observation or the end of the episode from step, got neither")
    return messages, _read_reward(reward), bool(is_done)


def _is_message(found: Any) -> bool:
    return isinstance(found, Message) and found.role in ("user", "tool") and isinstance(found.content, str)


def _read_reward(reward: Any) -> float | None:
    if not (reward is None or _is_finite(reward)):
        raise FailureError("invalid", f"expected a finite reward or None, got {reward!r:.200}")
    return None if reward is None else float(reward)


def _is_finite(number: Any) -> bool:
    value = number.item() if hasattr(number, "item") else number  # of NumPy or torch
    return isinstance(value, (int, float)) and math.isfinite(value)


def _joined(episode: _Episode, tokenizer: Any) -> Completion:
    """Return the whole episode as one response."""
    own = iter(zip([*["stop"] * (len(episode.rewards) - 1), episode.end], episode.rewards, strict=True))
    turns, parts, start = list[Turn](), [part for _, part in episode.parts], 0
    for role, part in episode.parts:
        reason, reward = next(own) if role == "assistant" else ("", None)
        text = tokenizer.decode(part.token_ids.tolist(), clean_up_tokenization_spaces=False)
        turns.append(Turn(role, start, start + part.length, text, reason, reward))
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
    """Return the reply of the environment in the form of a response, which the turn ``following`` it is joined to."""
    n, versions = len(tokens), following.versions[:1]
    return Completion(
        token_ids=torch.tensor(tokens),
        logprobs=torch.full((n,), torch.nan),
        finish_reason="stop",
        text="",
        support=None if following.support is None else TruncatedSupport.full(n),
        versions=tuple(span._replace(length=n) for span in versions),
    )
