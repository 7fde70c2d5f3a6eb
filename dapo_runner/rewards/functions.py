"""The user's reward functions, named as `module:function`, plain or `async`.

    reward(prompts, completions, rows)    all responses to one prompt: three lists of one length
    reward(prompt, completion)            one response

For each response a function returns a ``Verdict``; a bool, which earns `reward.correct` or `reward.incorrect`; a
number, the reward itself, which counts as correct above the middle between those two; or None where it does not apply.
Anything else, an exception, a reward that is not finite and a missed deadline are failures, never a 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.plugins import import_function
from dapo_runner.rewards.calls import ASYNC_CALLS, Call, Calls
from dapo_runner.rewards.deadline import call_within, run_async
from dapo_runner.rewards.reward import Reward, RewardError, Verdicts
from dapo_runner.types import Completion, Prompt, Verdict


class FunctionReward(Reward):
    """Calls a function of the user's with a deadline and retries."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        """Find the function. Raises ConfigError."""
        self.config = config
        self.function = _find_function(name)
        called = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        self.is_async = inspect.iscoroutinefunction(called)
        self.takes_batch = len(_required(self.function)) == 3
        self.calls = Calls(name, config, config.calls.concurrency or (ASYNC_CALLS if self.is_async else 1))

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        groups = [Call(index, *group) for index, group in enumerate(zip(prompts, completions, strict=True))]
        calls = groups if self.takes_batch else [call for group in groups for call in group.split()]
        results: list[list[list[Verdict | None] | RewardError]] = [[] for _ in prompts]
        for call, result in zip(calls, self.calls.run(self._call, calls), strict=True):
            results[call.index].append(result)
        return [_join(of_prompt) for of_prompt in results]

    def take_counts(self) -> dict[str, int]:
        return self.calls.take_counts()

    def _call(self, call: Call) -> list[Verdict | None]:
        returned = self._answer(*call.arguments()) if self.takes_batch else [self._answer(*call.pair())]
        return _read_verdicts(returned, len(call.completions), self.config)

    def _answer(self, *arguments: Any) -> Any:
        if self.is_async:
            return run_async(self.function(*arguments), self.config.plugin_deadline)
        return call_within(self.config.plugin_deadline, lambda: self.function(*arguments))


def _join(results: list[list[Verdict | None] | RewardError]) -> list[Verdict | None] | RewardError:
    """Return the verdicts of several calls, or the first error."""
    verdicts: list[Verdict | None] = []
    for result in results:
        if isinstance(result, RewardError):
            return result
        verdicts += result
    return verdicts


def _find_function(name: str) -> Callable[..., Any]:
    function = import_function("reward.kind", name)
    kinds = {parameter.kind for parameter in _parameters(function)}
    if inspect.Parameter.VAR_KEYWORD in kinds and "completions" in {item.name for item in _parameters(function)}:
        raise ConfigError(
            f"reward.kind: expected a function of (prompts, completions, rows), got {name!r} of completions and "
            "columns, as TRL calls it. Convert it with dapo_runner.rewards.trl.from_trl."
        )
    return function


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C without a signature
        return []


def _required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [item for item in _parameters(function) if item.kind in positional and item.default is item.empty]


def _read_verdicts(returned: Any, n: int, config: RewardConfig) -> list[Verdict | None]:
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
        raise TypeError(f"expected a list of {n} rewards, got {type(returned).__name__}")
    if len(returned) != n:
        raise ValueError(f"expected {n} rewards, one for each completion, got {len(returned)}")
    return [None if item is None else _read_verdict(item, config) for item in returned]


def _read_verdict(result: Any, config: RewardConfig) -> Verdict:
    """Return a verdict of plain values: torch refuses to load a checkpoint with a NumPy number in it."""
    if hasattr(result, "item"):  # a scalar of NumPy or torch
        result = result.item()
    if isinstance(result, bool):
        return Verdict(result)
    if isinstance(result, int | float):
        result = Verdict(result > (config.correct + config.incorrect) / 2, value=float(result))
    if not isinstance(result, Verdict):
        raise TypeError(f"expected a dapo_runner.types.Verdict, a number or a bool, got {type(result).__name__}")
    value = None if result.value is None else float(result.value)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"expected a finite reward, got {value}")
    extracted = None if result.extracted is None else str(result.extracted)
    rule = str.__str__(result.rule)  # the plain text of a StrEnum or np.str_
    return replace(result, correct=bool(result.correct), extracted=extracted, rule=rule, value=value)
