"""Decide by logged values whether `run.early_stop` or `run.max_tokens` ends a run before its last step. So a resumed
run, and every rank of a run, decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dapo_runner.config import Config, ConfigError


class EarlyStop:
    """Observe steps and evaluations. ``reason`` is None until one of them ends the run."""

    def __init__(self, config: Config) -> None:
        self.settings = config.run.early_stop
        self.metric = early_stop_metric(config)
        self._spent: str | None = None
        self._decided: str | None = None
        self._best: tuple[int, float] | None = None  # step and value
        self._waited = 0  # evaluations since the best one
        self._tokens, self._budget = 0, config.run.max_tokens

    @property
    def reason(self) -> str | None:
        return self._spent or self._decided

    def replay(self, event: Mapping[str, Any]) -> None:
        """Observe one line of metrics.jsonl."""
        if event["kind"] == "eval":
            self.observe(event["step"], event)
        else:
            self.count(event["step"], event["sampling/tokens"])

    def count(self, step: int, tokens: int) -> None:
        """Count the tokens that a step generated. The run still evaluates after the step that spends the budget."""
        self._tokens += tokens
        if self._budget is not None and self._tokens >= self._budget:
            self._spent = f"ended after step {step}: {self._tokens:,} tokens (run.max_tokens={self._budget:,})"

    def observe(self, step: int, figures: Mapping[str, Any]) -> None:
        """Observe one evaluation. A logged value that is not finite is None. Raises ConfigError if the metric of
        `run.early_stop` is not among ``figures``.
        """
        if self.settings is None:
            return
        # cons@k is left out where no answer was extracted, avg@k never is.
        if self.metric not in figures and self.metric.replace("cons@", "avg@") not in figures:
            known = ", ".join(name.removeprefix("eval/") for name in figures if name.startswith("eval/"))
            raise ConfigError(
                f"run.early_stop.metric: expected one of {known}, got {self.metric.removeprefix('eval/')}. "
                "Choose a metric of the evaluations."
            )
        value = figures.get(self.metric)
        value = value if value is not None and math.isfinite(value) else None
        if value is not None and (self._best is None or value > self._best[1]):
            self._best, self._waited = (step, value), 0
        else:
            self._waited += 1
        self._decided = self._decide(step, value)

    def _decide(self, step: int, value: float | None) -> str | None:
        assert self.settings is not None
        target, patience = self.settings.target, self.settings.patience
        if value is not None and target is not None and value >= target:
            return f"stopped early: {self.metric} is {value:.4g} after step {step} (run.early_stop.target={target:g})"
        if patience is not None and self._waited >= patience:
            best = "none" if self._best is None else f"{self._best[1]:.4g} after step {self._best[0]}"
            since = f"none better in {self._waited} evaluations (run.early_stop.patience={patience})"
            return f"stopped early after step {step}: the best {self.metric} is {best}, {since}"
        return None


def last_step(config: Config, events: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the step that ended the run with these lines in metrics.jsonl; None if it has not ended."""
    early_stop = EarlyStop(config)
    for event in events:
        early_stop.replay(event)
        if early_stop.reason is not None or event["step"] == config.run.steps:
            return int(event["step"])
    return None


def early_stop_metric(config: Config) -> str:
    """Return the name of the observed metric in metrics.jsonl."""
    chosen = config.run.early_stop.metric if config.run.early_stop is not None else None
    return f"eval/{chosen or f'avg@{config.evaluation.k}'}"
