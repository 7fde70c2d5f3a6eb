"""User-defined reward functions, named as `module:function`, plain or `async`.

    reward(prompts, completions, rows)    all responses to one prompt: three lists of equal length
    reward(prompt, completion)            one response
    reward(environments, **columns)       TRL's functions over environments: see ``trl``

For each response a function returns a ``Verdict``; a bool, which means `reward.correct` or `reward.incorrect`; a
number, which is the reward and counts as correct above the mean of those two; or None if it does not apply. Any other
value, an exception, a reward that is not finite and a timeout are failures; they never become a reward of 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.plugins import import_function
from dapo_runner.rewards.calls import ASYNC_CALLS, Call, CallingReward, Verdicts, call_with_timeout, first_error
from dapo_runner.rewards.trl import from_trl
from dapo_runner.types import Completion, Prompt, Verdict

BATCH = ["prompts", "completions", "rows"]


class FunctionReward(CallingReward):
    """Call a user-defined function with a timeout and retries."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        """Import the function. Raises ConfigError."""
        key = f"reward.parts.{config.uses.index(name)}.use" if config.parts else "reward.kind"
        self.function = import_function(key, name)
        if "environments" in inspect.signature(self.function).parameters:
            self.function = from_trl(self.function, chat=True)
        signature = inspect.signature(self.function)
        names = [x.name for x in signature.parameters.values() if x.default is x.empty and x.kind < x.VAR_POSITIONAL]
        self.takes_batch = names == BATCH
        takes_one = len(names) in (0, 2) and "prompt" not in names[1:] and not {*names} & {*BATCH}
        if inspect.isclass(self.function) or not (self.takes_batch or takes_one):
            raise ConfigError(
                f"{key}: expected a function of (prompts, completions, rows) or (prompt, completion), got {name} with "
                f"{signature}. dapo_runner.rewards.trl.from_trl converts one of TRL."
            )
        self.is_async = any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))
        super().__init__(name, config, ASYNC_CALLS if self.is_async else 1)

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], allowed: int) -> Verdicts:
        parts = [[samples] if self.takes_batch else [[one] for one in samples] for samples in completions]
        calls = [
            Call(index, prompt, part[0], partial(self._judge_part, prompt, part), len(part))
            for index, prompt in enumerate(prompts)
            for part in parts[index]
        ]
        results = iter(self.run_calls(calls, allowed))
        found = [[next(results) for _ in per_prompt] for per_prompt in parts]
        return [first_error(per_prompt) or list(chain.from_iterable(per_prompt)) for per_prompt in found]

    def _judge_part(self, prompt: Prompt, part: Sequence[Completion]) -> list[Verdict | None]:
        batch = [prompt] * len(part), list(part), [dict(prompt.row) for _ in part]
        call = partial(self.function, *(batch if self.takes_batch else (prompt, part[0])))
        returned = call_with_timeout(self.config.call_timeout, call, self.is_async)
        return _read_verdicts(returned if self.takes_batch else [returned], len(part), self.config)


def _read_verdicts(returned: Any, n: int, config: RewardConfig) -> list[Verdict | None]:
    if isinstance(returned, str | bytes | dict | set | frozenset) or not hasattr(returned, "__len__"):
        raise TypeError(f"expected a list of {n} rewards, got {type(returned).__name__}")
    if len(returned) != n:
        raise ValueError(f"expected {n} rewards, one for each completion, got {len(returned)}")
    return [None if item is None else _read_verdict(item, config) for item in returned]


def _read_verdict(result: Any, config: RewardConfig) -> Verdict:
    """Return a verdict with plain Python values: torch refuses to load a checkpoint that contains NumPy numbers."""
    result = result.item() if hasattr(result, "item") else result  # a scalar of NumPy or torch
    if isinstance(result, bool):
        return Verdict(result)
    if isinstance(result, int | float):
        result = Verdict(result > (config.correct + config.incorrect) / 2, value=float(result))
    if not isinstance(result, Verdict) or result.correct not in (True, False):
        raise TypeError(f"expected a number, a bool or a Verdict with True or False as correct, got {result!r:.200}")
    value = None if result.value is None else float(result.value)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"expected a finite reward, got {value}")
    extracted = None if result.extracted is None else str(result.extracted)
    rule = str.__str__(result.rule)  # the plain text of a StrEnum or np.str_
    return Verdict(bool(result.correct), extracted, rule, value)  # a subclass could not be loaded from a checkpoint
