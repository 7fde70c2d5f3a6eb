"""The learning rate: warm-up and schedules against PyTorch's and by hand, by rollout step."""

from __future__ import annotations

import math

import pytest
from builders import make_config

from dapo_runner.algorithms.weights import learning_rate
from dapo_runner.config import Config, ConfigError


def config_of(steps: int = 10, **optimizer: object) -> Config:
    """4 groups of 4 in mini-batches of 8: two updates a step."""
    return make_config(run={"steps": steps}, optimizer={"lr": 1e-3, "mini_batch_size": 8, **optimizer})


def rates(config: Config, steps: int) -> list[float]:
    return [learning_rate(config, step) for step in range(steps)]


def test_warm_up_is_linear_over_steps_then_constant() -> None:
    assert rates(config_of(warmup_steps=4), 6) == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    assert rates(config_of(warmup_steps=0), 2) == [1e-3, 1e-3]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_linear_and_cosine_fall_from_the_end_of_the_warm_up(warmup: int) -> None:
    """By hand: the top once, at the end of the warm-up; equal falls; the last step is not lost on a rate of 0."""
    top = max(warmup, 1)
    falls = 10 - top + 1
    linear = rates(config_of(schedule="linear", warmup_steps=warmup), 12)
    assert linear[top - 1 :] == pytest.approx(
        [1e-3 * max(0, falls - i) / falls for i in range(12 - top + 1)], abs=1e-12
    )
    cosine = rates(config_of(schedule="cosine", warmup_steps=warmup, min_lr_ratio=0.1), 12)
    wave = [1e-4 + 9e-4 * (1 + math.cos(math.pi * min(1, i / falls))) / 2 for i in range(12 - top + 1)]
    assert cosine[top - 1 :] == pytest.approx(wave)
    assert linear[9] > 0
    assert linear[10] == pytest.approx(0, abs=1e-12)
    assert cosine[11] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"min_lr_ratio": 0.1}, r"^optimizer\.min_lr_ratio: .*optimizer\.schedule"),
        ({"schedule": "linear"}, r"^optimizer\.warmup_steps: .* 10 .*20"),
    ],
)
def test_what_cannot_be_meant_is_refused(optimizer: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**optimizer)
