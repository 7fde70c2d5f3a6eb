"""The figures of docs/scale.md are those of its formulas."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import scale
from dapo_runner.config import ModelConfig
from dapo_runner.preflight.plan import model_shape

SMALL, LARGE, EXPERTS = scale.MODELS


def test_the_page_holds_what_is_computed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    for part in (scale.table(), scale.decode_rates(), scale.against_published()):
        assert part in page


def test_its_models_are_those_of_the_recipes() -> None:
    for model, path in ((SMALL, "Qwen/Qwen2.5-7B"), (LARGE, "Qwen/Qwen2.5-32B")):
        shape = model_shape(ModelConfig(path=path))
        assert shape is not None
        assert model.parameters == pytest.approx(shape.parameters, rel=0.005)
        assert (model.layers, model.attention, model.key_value) == (shape.layers, shape.attention, shape.key_value)
        assert model.cache == 2 * 2 * shape.layers * shape.key_value


def test_terms() -> None:
    steps = {n: scale.step(LARGE, scale.PAPER, n) for n in scale.GPUS}
    assert "does not fit" in scale.table()
    assert isinstance(steps[8], str)
    found = [step for step in steps.values() if isinstance(step, scale.Step)]
    assert len(found) == 4
    for fewer, more in pairwise(found):
        assert fewer.total > more.total
        assert fewer.longest == more.longest <= more.rollout  # no GPU shortens it
        assert fewer.waits <= more.waits

    assert scale.collective(2 * 32.8e9, 16, 64) == pytest.approx(65.6e9 * 15 / 16 / 320e9 + 64 * 15 * 3e-6)
