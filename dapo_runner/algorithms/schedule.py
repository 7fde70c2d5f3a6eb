"""The learning rate of an update, a function of the configuration and of its place in the run: nothing to checkpoint.

Places count from 1, in rollout steps, or in updates with `optimizer.warmup_updates`. Over a warm-up of w places (at
least one) the rate rises linearly to `lr`; from there to the last place T it falls by x = (place − w) / (T − w + 1):

    linear   lr · (r + (1 − r) · (1 − x))
    cosine   lr · (r + (1 − r) · (1 + cos πx) / 2)

with r = `min_lr_ratio`, which is reached one place after T: the last update still moves. Beyond it the rate stays
there. A step that dynamic sampling left short makes fewer updates; its places are passed over.
"""

from __future__ import annotations

import math

from dapo_runner.config import Config


def learning_rate(config: Config, step: int, number: int = 0) -> float:
    """Of update ``number`` of a rollout ``step``, both counted from 0."""
    settings, place, total = config.optimizer, step + 1, config.decay_steps
    warmup = settings.warmup_steps
    if settings.warmup_updates is not None:
        place, total = step * config.updates_per_step + number + 1, total * config.updates_per_step
        warmup = settings.warmup_updates
    warmup = max(warmup, 1)
    warmed = settings.lr * min(1.0, place / warmup)
    if settings.schedule == "constant" or place <= warmup:
        return warmed
    x = min(1.0, (place - warmup) / (total - warmup + 1))
    shape = 1 - x if settings.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)
