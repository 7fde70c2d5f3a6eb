"""Episodes: the policy and its environment take turns.

An episode is a list of tokens that only grows. What the policy sampled is never decoded and tokenized again; what the
environment says is tokenized once and does not train. Each episode goes on as soon as its own environment has answered.
"""

from __future__ import annotations

import random
import reprlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from dapo_runner import http
from dapo_runner.config import Config
from dapo_runner.data.dataset import uses_chat_template
from dapo_runner.engines.engine import Groups, RolloutEngine
from dapo_runner.environments.environment import Answer, Environment, Message, Number
from dapo_runner.environments.template import TurnTemplate
from dapo_runner.environments.tools import TOOL_LOOP, ToolEnvironment, make_environment, template_arguments
from dapo_runner.errors import ConfigError, RunError, describe_error
from dapo_runner.rollout.segments import begin, join
from dapo_runner.threads import in_thread
from dapo_runner.types import Completion, RolloutRequest, Turn

MOST_CHARACTERS, MOST_CALLS = 32, 64  # of a message per token that an episode may have; calls at the same time
COUNTS = ("episodes", "turns", "failed", "failed_raised", "failed_late", "failed_invalid", "failed_too_long")
END = "a finite number or None from get_reward, and numbers in counts"
ANSWER = "(text, messages or None; finite number or None; True or False) from step"
_adapter = cache(TypeAdapter)
Play = Generator[RolloutRequest, Completion, tuple[Completion, dict[str, float]]]


class EpisodeError(RunError):
    """More episodes failed than `env.max_failed` allows."""


class FailureError(Exception):
    """An environment failed without an error of its own. Arguments: late, invalid or too_long, and a message."""


class EpisodeRunner:
    """Has an engine and environments take turns. Calls may be in several threads. Raises ConfigError."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        assert config.env is not None
        self.config, self.tokenizer = config.env, tokenizer
        self.make = make_environment(config.env, tokenizer, min(200, config.rollout.max_response_tokens // 4))
        tools, kwargs = template_arguments(config.env)["tools"], config.data.chat_template_kwargs
        chat = uses_chat_template(tokenizer, config.data)
        self.template = TurnTemplate(tokenizer, chat=chat, **(kwargs | {"tools": tools}))
        self.counts, self.warnings = deque[Counter[str]](), deque[str]()  # of the calls so far
        texts = f"{config.data.system}{config.data.prompt_template}"
        if "<tool_call>" not in texts and not self.template.shows_calls:
            form = "the chat template does not show how to write <tool_call>{…}</tool_call>"
            self.warnings.append(
                f"env.tools: {form}. Unless prompts do, or the policy has learned it, no tool is called"
            )
        self.n_unknown = count()  # texts that the tokenizer does not know a part of

    def __call__(self, engine: RolloutEngine, requests: Sequence[RolloutRequest], priority: int | None) -> Groups:
        """Return the episodes of each request without those that failed. Raises EpisodeError where too many did."""
        numbers = [number for number, one in enumerate(requests) for _ in range(one.sampling.n)]
        plays = [self._play(one, sample) for one in requests for sample in range(one.sampling.n)]
        found, turns = self._run(engine, plays, priority)
        failed = {key: one for key, one in found.items() if isinstance(one, BaseException)}
        counts = Counter[str](episodes=len(plays), turns=turns.total(), failed=len(failed))
        counts.update(f"failed_{one.args[0] if isinstance(one, FailureError) else 'raised'}" for one in failed.values())
        groups: Groups = [[] for _ in requests]
        for key in sorted(found.keys() - failed.keys()):
            groups[numbers[key]].append(found[key][0])
            counts.update(found[key][1])
        self.counts.append(counts)
        if failed:
            first, error = min(failed), failed[min(failed)]
            text = error.args[1] if isinstance(error, FailureError) else describe_error(error)
            where = f"prompt {requests[numbers[first]].prompt.id}, turn {turns[first]}"
            kinds = ", ".join(f"{n} {key.removeprefix('failed_')}" for key, n in counts.items() if "failed_" in key)
            warning = f"{len(failed)} of {len(plays)} episodes failed ({kinds}); the first: {text!r:.300}; {where}"
            if len(failed) > self.config.max_failed * len(plays) + 1e-9:
                raise EpisodeError(f"env.max_failed={self.config.max_failed:g}: {warning}") from error
            self.warnings.append(warning)
        for group in groups:
            has_reward = any(one.environment_reward is not None for one in group)
            # The first turn of all episodes of a game was truncated: no step could give a reward.
            if has_reward or all(
                hasattr(one.environment, "step") and len(one.policy_turns) == 1 and one.truncated for one in group
            ):
                ends = [one.turns[-1]._replace(reward=one.turns[-1].reward or 0.0) for one in group]
                group[:] = [replace(one, turns=(*one.turns[:-1], end)) for one, end in zip(group, ends, strict=True)]
        return groups

    def _run(self, engine: RolloutEngine, plays: list[Play], priority: int | None) -> tuple[dict[int, Any], Any]:
        """Return what each episode returned or raised, and how many turns it had. Late calls are left behind."""
        found, turns = dict[int, Any](), Counter[int]()
        futures, deadlines = dict[int, Any](), dict[int, float]()  # of calls, by the key of the episode
        waiting = deque[tuple[int, Any]]((key, None) for key in range(len(plays)))
        seconds, progress = self.config.timeout, threading.Event()
        late = FailureError("late", f"no answer within {seconds:g} s (env.timeout)")
        try:
            with closing(engine.open_call(priority, progress.set, len(plays))) as asked:
                while len(found) < len(plays):
                    is_ready = asked.is_ready(not (waiting or deadlines))
                    while waiting and len(deadlines) < MOST_CALLS:
                        key, turn = waiting.popleft()
                        futures[key] = in_thread(partial(plays[key].send, turn))
                        deadlines[key] = time.monotonic() + seconds
                        futures[key].add_done_callback(lambda _: progress.set())
                    if is_ready:
                        waiting.extend(asked.work())
                    else:
                        progress.wait(min(deadlines.values()) - time.monotonic() if deadlines else None)
                        progress.clear()
                    for key in [key for key, end in deadlines.items() if futures[key].done() or end < time.monotonic()]:
                        del deadlines[key]
                        error = futures[key].exception() if futures[key].done() else late
                        if error is late:
                            http.replace_if_blocked(TOOL_LOOP)
                        if error is None:
                            asked.add(key, futures[key].result())
                            turns[key] += 1
                        else:
                            found[key] = error.value if isinstance(error, StopIteration) else error
            return found, turns
        finally:
            for key, future in futures.items():  # closes environments, once their last calls have ended
                if found.get(key, late) is late:
                    future.add_done_callback(lambda _, close=plays[key].close: in_thread(close))

    def _play(self, request: RolloutRequest, sample: int) -> Play:
        """Yield what the engine is asked for each turn. Return the episode and its counts."""
        prompt, sampling, name = request.prompt, request.sampling, f"{request.sampling.seed}:{request.index}:{sample}"
        environment, episode, end, limit = self.make(), begin(torch.zeros(0).long()), "length", sampling.max_tokens
        try:
            truth = {"answer": prompt.answer} if prompt.answer and not isinstance(environment, ToolEnvironment) else {}
            row = deepcopy({"answer": prompt.answer, **prompt.row, **truth})
            text = _checked(str | None, environment.reset(row), "a text or None from reset") or ""
            said: tuple[Message, ...] = ()  # by the environment, after the first turn
            write = partial(self.template.open_episode, prompt.messages, text)
            for number in range(self.config.max_turns):
                tokens = self._tokenize(text, write, limit, is_result=number > 0 and bool(self.template.tools))
                room = limit - episode.length - len(tokens)
                if room <= 0:
                    break
                asked = replace(prompt, token_ids=(*prompt.token_ids, *episode.token_ids.tolist(), *tokens))
                n, seed = self.config.max_turn_tokens or room, random.Random(f"{name}:{number}").getrandbits(31)
                turn = yield RolloutRequest(0, asked, replace(sampling, n=1, max_tokens=min(room, n), seed=seed))
                answer = None if turn.truncated else self._step(environment, turn)
                turn = replace(turn, messages=(*said, ("assistant", turn.text)))
                episode = self._extended(episode, tokens, turn, answer and answer.reward)
                if answer is None or answer.is_done:
                    end = "length" if answer is None else "done"
                    break
                said, text = answer.messages, "".join(message.content for message in answer.messages)
                write = partial(self.template.reply, said, int(turn.token_ids[-1]))
            else:
                end = "max_turns"
            found = getattr(environment, "get_reward", lambda: None)(), getattr(environment, "counts", {})
            reward, counts = _checked(tuple[Number | None, dict[str, Number]], found, END)
            if {*counts} & {*COUNTS}:
                raise FailureError("invalid", f"expected counts by other names than {', '.join(COUNTS)}")
        finally:
            with suppress(Exception) if sys.exc_info()[0] else nullcontext():  # the first error is the one to name
                getattr(environment, "close", lambda: None)()
        *turns, last = episode.turns
        total = last.reward if reward is None else reward + (last.reward or 0.0)
        episode = replace(
            episode,
            finish_reason="length" if end == "length" else "stop",
            loss_mask=torch.cat([torch.full((one.end - one.start,), one.role == "assistant") for one in episode.turns]),
            turns=(*turns, last._replace(finish_reason=end, reward=total)),
            environment=environment.state if isinstance(environment, ToolEnvironment) else environment,
        )
        return episode, counts

    def _tokenize(self, text: str, write: Callable[[], list[int]], limit: int, is_result: bool) -> list[int]:
        """Return the tokens of a text of the environment as ``write`` writes it. Raises FailureError."""
        try:
            tokens = write() if len(text) <= MOST_CHARACTERS * limit else [-1] * limit
        except ConfigError as error:  # a role that the chat template does not take
            raise FailureError("invalid", str(error)) from error
        unknown = self.tokenizer.unk_token_id
        is_unknown = unknown in tokens and unknown in self.tokenizer.encode(text, add_special_tokens=False)
        if is_unknown and next(self.n_unknown) == 0:
            self.warnings.append(f"env: the tokenizer turns a part of {text!r:.200} into {self.tokenizer.unk_token}")
        if len(tokens) >= limit and not is_result:  # the policy asked for a result
            raise FailureError("too_long", f"expected fewer than {limit} tokens in all, got {len(text)} characters")
        return tokens

    def _step(self, environment: Environment, turn: Completion) -> Answer:
        *ids, last = turn.token_ids.tolist()
        text = self.tokenizer.decode(ids if self.template.is_special(last) else [*ids, last])
        answer: Answer = _checked(Answer, environment.step(text), ANSWER)
        if not (answer.is_done or answer.messages):
            raise FailureError("invalid", "expected an observation or the end of the episode from step, got neither")
        return answer

    def _extended(self, episode: Completion, tokens: list[int], turn: Completion, reward: float | None) -> Completion:
        """Return an episode with ``tokens`` of the environment and a turn of the policy behind them."""
        n, turns, messages = len(tokens), list(episode.turns), (*episode.messages, *turn.messages)
        versions = tuple(span._replace(length=n) for span in turn.versions[:1] if n)
        reply = replace(begin(torch.tensor(tokens).long()), logprobs=torch.full((n,), torch.nan), versions=versions)
        for part in (reply, turn) if tokens else (turn,):
            extent = episode.length, episode.length + part.length, self.tokenizer.decode(part.token_ids.tolist())
            turns.append(Turn("environment" if part is reply else "assistant", *extent))
            episode = replace(join(episode, part), versions=(*episode.versions, *part.versions))
        turns[-1] = turns[-1]._replace(finish_reason="stop", reward=reward)
        return replace(episode, turns=tuple(turns), messages=messages)

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        total = Counter[str](dict.fromkeys(COUNTS, 0))
        while self.counts:
            total.update(self.counts.popleft())
        return dict(total)

    def take_warnings(self) -> list[str]:
        """Return which episodes were left out since the last call."""
        return [self.warnings.popleft() for _ in range(len(self.warnings))]

    def uncounted(self) -> EpisodeRunner:
        """Return a runner whose episodes are not counted here. It shares the warnings."""
        other = copy(self)
        other.counts = deque()
        return other


def _checked(kind: Any, value: Any, expected: str) -> Any:
    """Return what a method of an environment has returned as ``kind``, in words ``expected``. Raises FailureError."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise FailureError("invalid", f"expected {expected}, got {reprlib.repr(value)}") from error
