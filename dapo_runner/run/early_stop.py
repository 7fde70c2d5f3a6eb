"""`run.early_stop` and `run.max_tokens`: whether a run has come to its end before its last step. The answer follows
from what is logged alone, so that a run which was killed, and every rank of one that many share, gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dapo_runner.config import Config, ConfigError


class EarlyStop:
    """``reason`` is None until a step or an evaluation that was observed ends the run."""

    def __init__(self, config: Config) -> None:
        self.settings = config.run.early_stop
        self.metric, self.k = early_stop_metric(config), config.evaluation.k
        self._spent: str | None = None
        self._decided: str | None = None
        self._best: tuple[int, float] | None = None  # step and figure
        self._waited = 0
        self._tokens, self._budget = 0, config.run.max_tokens

    @property
    def reason(self) -> str | None:
        return self._spent or self._decided

    def replay(self, event: Mapping[str, Any]) -> None:
        """The next line of metrics.jsonl."""
        if event["kind"] == "eval":
            self.observe(event["step"], event)
        else:
            self.count(event["step"], event.get("sampling/tokens", 0))  # which older versions did not log

    def count(self, step: int, tokens: int) -> None:
        """The tokens that a step generated. The evaluation after it is still made."""
        self._tokens += tokens
        if self._budget is not None and self._tokens >= self._budget:
            spent = f"{self._tokens:,} tokens generated (run.max_tokens={self._budget:,})"
            self._spent = f"ended after step {step}: {spent}"

    def observe(self, step: int, figures: Mapping[str, Any]) -> None:
        """The next evaluation, as measured or as logged, where a figure that is not finite is None. Raises ConfigError
        where the figure that counts is not among them.
        """
        if self.settings is None:
            return
        if self.metric not in figures and self.metric.endswith(f"cons@{self.k}"):
            return  # it is measured only where every response has an extracted answer
        if self.metric not in figures:
            there = ", ".join(name.removeprefix("eval/") for name in figures if name.startswith("eval/"))
            raise ConfigError(
                f"run.early_stop.metric: expected a figure of the evaluations, {there}, "
                f"got {self.metric.removeprefix('eval/')}"
            )
        value, sign = figures[self.metric], 1 if self.settings.mode == "max" else -1
        if value is not None and not math.isfinite(value):
            value = None
        if value is not None and (self._best is None or sign * value > sign * self._best[1]):
            self._best, self._waited = (step, value), 0
        else:
            self._waited += 1
        self._decided = self._decide(step, value, sign)

    def _decide(self, step: int, value: float | None, sign: int) -> str | None:
        assert self.settings is not None
        target, patience = self.settings.target, self.settings.patience
        if value is not None and target is not None and sign * value >= sign * target:
            return f"stopped early: {self.metric} is {value:.4g} after step {step} (run.early_stop.target={target:g})"
        if patience is not None and self._waited >= patience:
            best = "none" if self._best is None else f"{self._best[1]:.4g} after step {self._best[0]}"
            return (
                f"stopped early after step {step}: the best {self.metric} is {best}, none better in {self._waited} "
                f"evaluations (run.early_stop.patience={patience})"
            )
        return None


def last_step(config: Config, events: Iterable[Mapping[str, Any]]) -> int | None:
    """The step that a run with these lines in metrics.jsonl came to its end with; None where it has not yet."""
    early_stop = EarlyStop(config)
    for event in events:
        early_stop.replay(event)
        if early_stop.reason is not None or event["step"] == config.run.steps:
            return int(event["step"])
    return None


def early_stop_metric(config: Config) -> str:
    """The name of the figure, as it is logged."""
    settings = config.run.early_stop
    chosen = settings.metric if settings is not None else None
    return f"eval/{chosen or f'avg@{config.evaluation.k}'}"
