"""The settings of a critic."""

from __future__ import annotations

from dapo_runner.config.section import NonNegativeInt, PositiveFloat, Section


class CriticConfig(Section):
    """Predicts what the rest of a response will earn: advantage.kind=gae."""

    requires = {
        "!share_trunk": "path lr warmup_steps",
        "share_trunk": "coef",
        "parallel.sequence=1": "share_trunk",
    }

    path: str | None = None  # the model that gets a value head; null: the one that the policy starts from
    share_trunk: bool = False  # the head sits on the policy, whose update takes coef × value loss along
    coef: PositiveFloat = 0.1  # share_trunk
    lr: PositiveFloat = 9e-6  # a model of its own: at the peak of the optimizer's schedule, which it follows
    warmup_steps: NonNegativeInt = 0  # a model of its own: rollout steps of a run in which it alone trains
    clip: PositiveFloat | None = 0.2  # how far a value may move in a step before its gradient stops; null: any
