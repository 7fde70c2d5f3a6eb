"""The learning rate of a rollout step.

It is a function of the configuration and the step, so a checkpoint need not hold it. Steps count from 1. Over a warm-up
of w steps (at least one) the rate rises linearly to `lr`. From there to the last step T = `run.steps` it falls with
x = (step − w) / (T − w + 1):

    linear   lr · (r + (1 − r) · (1 − x))
    cosine   lr · (r + (1 − r) · (1 + cos πx) / 2)

r is `min_lr_ratio`, which is reached one step after T: the last update still moves. Beyond T the rate stays there.
"""

from __future__ import annotations

import math

from dapo_runner.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of the updates of a rollout ``step``, counted from 0."""
    settings, count = config.optimizer, step + 1
    warmup = max(settings.warmup_steps, 1)
    warmed = settings.lr * min(1.0, count / warmup)
    if settings.schedule == "constant" or count <= warmup:
        return warmed
    x = min(1.0, (count - warmup) / (config.run.steps - warmup + 1))
    shape = 1 - x if settings.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)
