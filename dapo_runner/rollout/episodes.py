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
from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from dapo_runner.config import Config, EnvironmentConfig
from dapo_runner.environments.environment import Environment, Message, StepResult
from dapo_runner.environments.make import make_environment, template_arguments
from dapo_runner.environments.template import TurnTemplate
from dapo_runner.errors import ConfigError, RunError
from dapo_runner.rewards.reward import in_thread
from dapo_runner.rollout.calls import Calls, LateError
from dapo_runner.rollout.engine import Groups, OpenCall, RolloutEngine
from dapo_runner.types import CallOptions, Completion, Prompt, SamplingParams, TruncatedSupport, Turn

MOST_OF_ERROR = 300  # characters of an environment's error that are shown
MOST_CHARACTERS = 32  # of a message, for each token that an episode may have; longer ones are not even tokenized


class EpisodeError(RunError):
    """More episodes failed than `env.max_failed` allows."""


class InvalidReplyError(Exception):
    """An environment returned what is no answer."""


class TooLongError(Exception):
    """An environment said more than an episode may have tokens."""


@dataclass(eq=False)
class _Episode:
    """An episode in the making. ``heard``: what the environment said before each turn of the policy in ``spoken``."""

    number: int  # of its prompt in the call
    prompt: Prompt
    sampling: SamplingParams  # of its group
    name: str  # what its random numbers follow from
    environment: Environment | None = None
    heard: list[list[int]] = field(default_factory=list)
    spoken: list[Completion] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    end: str = ""  # why it ended
    error: BaseException | None = None

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.sampling.max_tokens - sum(map(len, self.heard)) - sum(turn.length for turn in self.spoken)

    def finish(self) -> None:
        """Give back what the environment holds."""
        if self.environment is not None:
            self.environment.finish()

    def add_reward(self, reward: float | None) -> None:
        """Add to the reward of the policy's last turn."""
        if reward is not None:
            self.rewards[-1] = reward + (self.rewards[-1] or 0.0)


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
        self.template = TurnTemplate(tokenizer, chat=chat, tools=template_arguments(config.env)["tools"])
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
        try:
            self._run(engine, episodes, options)
        except BaseException:
            for episode in episodes:
                if not episode.end:
                    in_thread(episode.finish)
            raise
        self._count(episodes)
        return [
            [_joined(episode, self.tokenizer) for episode in episodes if episode.number == number and not episode.error]
            for number in range(len(prompts))
        ]

    def _run(self, engine: RolloutEngine, episodes: Sequence[_Episode], options: CallOptions) -> None:
        calls = Calls(self.config.concurrency, self.config.timeout_seconds)
        with closing(engine.open_call(options, calls.wake, len(episodes))) as asked:
            for place, episode in enumerate(episodes):
                calls.add(place, partial(self._begin, episode))
            while not calls.is_done or asked.n_open:
                for place, result in calls.take(wait=not asked.is_ready(calls.is_done)):
                    self._continue(place, episodes[place], result, calls, asked)
                if asked.is_ready(calls.is_done):
                    for place, completion in asked.work():
                        self._hear_policy(place, episodes[place], completion, calls)

    def _begin(self, episode: _Episode) -> StepResult:
        episode.environment = self.make()
        result = _checked(episode.environment.reset(deepcopy({"answer": episode.prompt.answer, **episode.prompt.row})))
        if result.done or result.reward is not None:
            raise InvalidReplyError("expected no reward and no end from reset, before the policy has said anything")
        return result

    def _continue(self, place: int, episode: _Episode, result: Any, calls: Calls, asked: OpenCall) -> None:
        """Go on with what a call of the environment returned or raised."""
        if episode.end and not isinstance(result, BaseException):  # of finish
            if episode.error is None:
                episode.add_reward(result)
            return None
        if isinstance(result, StepResult):
            if episode.spoken:
                episode.add_reward(result.reward)
            if result.done or len(episode.spoken) == self.config.max_turns:
                return self._end(place, episode, "done" if result.done else "max_turns", calls)
            try:
                tokens = self._tokenize(episode, result.messages)
            except (InvalidReplyError, TooLongError, ConfigError) as error:
                result = error
        if isinstance(result, BaseException):
            episode.error = episode.error or result
            if episode.end:
                return None
            episode.end = "failed"
            if isinstance(result, LateError):
                result.call.add_done_callback(lambda _: episode.finish())
            elif episode.environment is not None:
                calls.add(place, episode.environment.finish)
            return None
        if episode.room <= len(tokens):
            return self._end(place, episode, "length", calls)
        said = [
            part
            for heard, own in zip(episode.heard, episode.spoken, strict=False)
            for part in (heard, own.token_ids.tolist())
        ]
        prompt_ids = chain(episode.prompt.token_ids, *said, tokens)
        episode.heard.append(tokens)
        limit = min(episode.room, self.config.max_turn_tokens or episode.room)
        seed = random.Random(f"{episode.name}:{len(episode.spoken)}").getrandbits(31)
        asked.add(
            place,
            replace(episode.prompt, token_ids=tuple(prompt_ids)),
            replace(episode.sampling, n=1, max_tokens=limit, seed=seed, index=0),
        )
        return None

    def _tokenize(self, episode: _Episode, messages: tuple[Message, ...]) -> list[int]:
        limit = episode.sampling.max_tokens
        if sum(len(message.content) for message in messages) > MOST_CHARACTERS * limit:
            raise TooLongError(f"expected messages that fit into an episode of {limit} tokens")
        if episode.spoken and not messages:
            raise InvalidReplyError("expected a message or the end of the episode from step, got neither")
        if episode.spoken:
            tokens = self.template.reply(messages, int(episode.spoken[-1].token_ids[-1]))
        else:
            tokens = self.template.open_episode(episode.prompt.messages, messages)
        if len(tokens) >= limit:
            raise TooLongError(f"expected messages that fit into an episode of {limit} tokens, got {len(tokens)}")
        return tokens

    def _hear_policy(self, place: int, episode: _Episode, completion: Completion, calls: Calls) -> None:
        episode.spoken.append(completion)
        episode.rewards.append(None)
        if completion.truncated:
            return self._end(place, episode, "length", calls)
        tokens = completion.token_ids.tolist()
        if self.template.is_special(tokens[-1]):
            tokens.pop()
        environment, text = episode.environment, self.tokenizer.decode(tokens, skip_special_tokens=False)
        assert environment is not None
        calls.add(place, lambda: _checked(environment.step(text)))
        return None

    def _end(self, place: int, episode: _Episode, reason: str, calls: Calls) -> None:
        assert episode.environment is not None
        episode.end = reason
        finish = episode.environment.finish
        calls.add(place, lambda: _checked_reward(finish()))

    def _count(self, episodes: list[_Episode]) -> None:
        failed = [episode for episode in episodes if episode.error is not None]
        kinds = Counter(KINDS.get(type(episode.error), "raised") for episode in failed)
        turns = sum(len(episode.spoken) for episode in episodes)
        with self._lock:
            self.counts.update({"episodes": len(episodes), "turns": turns, "failed": len(failed)})
            self.counts.update({f"failed_{kind}": n for kind, n in kinds.items()})
            for episode in episodes:
                self.counts.update(getattr(episode.environment, "counts", {}))
            if failed:
                first = f"{len(failed)} of {len(episodes)} episodes failed and are left out: {_describe(failed[0])}"
                self.warnings.append(first)
        if len(failed) > math.ceil(self.config.max_failed * len(episodes)):
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


KINDS: dict[type, str] = {
    LateError: "late",
    InvalidReplyError: "invalid",
    ConfigError: "invalid",  # of a role that the chat template does not take
    TooLongError: "too_long",
}
COUNTS = ("episodes", "turns", "failed", *(f"failed_{kind}" for kind in ("raised", *KINDS.values())))


def _describe(episode: _Episode) -> str:
    """Return the error of an episode, with the line of the user's code."""
    error = episode.error
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    users = [frame for frame in frames if Path(frame.filename).name not in ("reward.py", Path(__file__).name)]
    line = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    said = "".join(character if character.isprintable() else "�" for character in str(error))[:MOST_OF_ERROR]
    return f"{type(error).__name__}: {said}{line}; prompt {episode.prompt.id}, turn {len(episode.spoken)}"


def _checked(result: Any) -> StepResult:
    """Raises InvalidReplyError for what is no StepResult of plain values."""
    if not isinstance(result, StepResult):
        raise InvalidReplyError(f"expected a StepResult, got {type(result).__name__}")
    try:
        messages = tuple(Message(*message) for message in result.messages)
    except TypeError as error:
        raise InvalidReplyError(f"expected messages of a role and a text, got {result.messages!r:.200}") from error
    if not all(isinstance(part, str) for message in messages for part in message):
        raise InvalidReplyError(f"expected messages of a role and a text, got {messages!r:.200}")
    return replace(result, messages=messages, reward=_checked_reward(result.reward))


def _checked_reward(reward: Any) -> float | None:
    value = reward.item() if hasattr(reward, "item") else reward  # of NumPy or torch
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidReplyError(f"expected a finite reward or None, got {value!r:.200}")
    return float(value)


def _joined(episode: _Episode, tokenizer: Any) -> Completion:
    """Return the whole episode as one response."""
    parts: list[Completion] = []
    turns: list[Turn] = []
    reasons: list[str] = [*(own.finish_reason for own in episode.spoken[:-1]), episode.end]

    def add(part: Completion, role: Literal["assistant", "environment"], reason: str, reward: float | None) -> None:
        start = turns[-1].end if turns else 0
        text = tokenizer.decode(part.token_ids.tolist(), clean_up_tokenization_spaces=False)
        turns.append(Turn(role, start, start + part.length, text, reason, reward))
        parts.append(part)

    for heard, own, reason, reward in zip(episode.heard, episode.spoken, reasons, episode.rewards, strict=True):
        if heard:
            add(_as_part(heard, own), "environment", "", None)
        add(own, "assistant", reason, reward)
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
    )


def _as_part(tokens: list[int], following: Completion) -> Completion:
    """Return what the environment said in the form of a response, which the turn ``following`` it is joined to."""
    n, versions = len(tokens), following.versions[:1]
    return Completion(
        token_ids=torch.tensor(tokens),
        logprobs=torch.full((n,), torch.nan),
        finish_reason="stop",
        text="",
        support=None if following.support is None else TruncatedSupport.full(n),
        versions=tuple(span._replace(length=n) for span in versions),
    )
