"""Reward functions of the user's own, named as `module:function`: what they are called with and may return.

    reward(prompts, completions, rows)    a batch at a time, plain or `async`: `calls.py`
    reward(prompt, completion)            one response at a time, in order, in the main thread: here

Of each response it says a ``Verdict``; a bool, right or wrong at the configured rewards; or a number, the reward
itself, which counts as correct above the middle between `reward.incorrect` and `reward.correct`. Anything else, an
exception, a reward that is not finite and an answer that does not come within `reward.plugin_deadline` is a failure, never a 0.

The function runs in this process, so that it may keep models and connections. In the main thread what it draws from
random generators is the same after a resume, and its deadline is an alarm signal.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.errors import RunError
from dapo_runner.rewards.alarm import LateError, call_within
from dapo_runner.types import Completion, Prompt, Verdict

SHOWN = 400  # characters of a prompt or a text that an error shows, from its two ends

Verdicts = list[list[Verdict | None] | None]
"""For each prompt, a verdict on each of its responses: None where the reward does not apply. None in place of all of
them where they could not be judged.
"""
BatchReward = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], Verdicts]


class RewardError(RunError):
    """A reward function that failed; ``prompt`` and ``completion`` are what it was given, the first of a batch."""

    def __init__(self, message: str, prompt: Prompt, completion: Completion) -> None:
        super().__init__(message)
        self.prompt = prompt
        self.completion = completion

    def __reduce__(self) -> tuple[type[RewardError], tuple[str, Prompt, Completion]]:
        return RewardError, (str(self), self.prompt, self.completion)


def find_function(use: str) -> Callable[..., Any]:
    """What `module:function` names. Raises ConfigError when it cannot be found, or is one that TRL would call."""
    module_name, _, function_name = use.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console script does not see the folder it is started in
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reward.kind: expected module:function that can be imported from here, got {use!r} ({error})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.kind: module {module_name!r} has no function {function_name!r}")
    parameters = _parameters(function)
    if "completions" in parameters and any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        raise ConfigError(
            f"reward.kind: expected a function of (prompts, completions, rows), got {use!r} of completions and "
            "columns, as TRL calls it: dapo_runner.rewards.trl.from_trl makes one of the other"
        )
    if is_async(function) and not takes_batch(function):
        raise ConfigError(
            f"reward.kind: an async reward takes (prompts, completions, rows), got {use!r} of {', '.join(parameters)}"
        )
    return function


def is_async(function: Callable[..., Any]) -> bool:
    called = function if inspect.isroutine(function) else type(function).__call__  # an object that is called
    return inspect.iscoroutinefunction(called)


def takes_batch(function: Callable[..., Any]) -> bool:
    """Whether it is one of three arguments; other ones are called with a prompt and a completion."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [item for item in _parameters(function).values() if item.default is item.empty]
    return sum(item.kind in positional for item in required) == 3


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a function in C that does not say
        return {}


def one_at_a_time(use: str, function: Callable[..., Any], config: RewardConfig) -> BatchReward:
    """A function of a prompt and a completion as a reward, which raises RewardError."""

    def judge(prompt: Prompt, completion: Completion) -> Verdict | None:
        try:
            return read_verdict(call_within(config.plugin_deadline, lambda: function(prompt, completion)), config)
        except (Exception, SystemExit) as error:
            raise RewardError(explain(use, error, config, prompt, completion), prompt, completion) from error

    def judge_all(prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        pairs = zip(prompts, completions, strict=True)
        return [[judge(prompt, completion) for completion in samples] for prompt, samples in pairs]

    return judge_all


def read_verdict(result: Any, config: RewardConfig) -> Verdict:
    """Raises TypeError and ValueError."""
    if hasattr(result, "item"):  # a scalar of NumPy or torch
        result = result.item()
    if isinstance(result, bool):
        return Verdict(result)
    if isinstance(result, int | float):
        result = Verdict(result > (config.correct + config.incorrect) / 2, value=float(result))
    if not isinstance(result, Verdict):
        raise TypeError(f"expected a dapo_runner.types.Verdict, a number or a bool, got {type(result).__name__}")
    # Plain values: a NumPy number inside would go into a checkpoint that torch then refuses to load.
    value = None if result.value is None else float(result.value)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"expected a finite reward, got {value}")
    extracted = None if result.extracted is None else str(result.extracted)
    rule = str.__str__(result.rule)  # of a subclass (StrEnum, np.str_) the plain text
    return replace(result, correct=bool(result.correct), extracted=extracted, rule=rule, value=value)


def explain(use: str, error: BaseException, config: RewardConfig, prompt: Prompt, completion: Completion) -> str:
    """A failure in one line."""
    return (
        f"reward {use}: {_describe(error, config.plugin_deadline)}; on prompt {prompt.id}: "
        f"{_shorten(prompt.text)}, response: {_shorten(completion.text)}"
    )


def _describe(error: BaseException, deadline: float | None) -> str:
    # The innermost line that is not of this folder: in the function, or in what it calls.
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    place = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
    if isinstance(error, LateError):
        return f"no answer within {deadline:g} s (reward.plugin_deadline{'; it was at ' + place if place else ''})"
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def _shorten(text: str) -> str:
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    return repr(shown)
