"""The figures of docs/scale.md are those of its formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dapo_runner.config import ModelConfig
from dapo_runner.preflight.memory import model_shape
from docs.models import scale

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


@pytest.mark.parametrize("model", scale.MODELS, ids=lambda model: model.name)
def test_a_token_takes_longer_than_its_reads(model: scale.Model) -> None:
    """Alone too, and with what does not shrink with the number of GPUs: launches, and all-reduces where they share."""
    for n in (1, 16, 256):
        read = 1 - (1 - model.active / model.parameters) ** n
        floor = 2 * model.parameters * read / (model.rollout_tensor * scale.BANDWIDTH)
        summed = 0 if model.rollout_tensor == 1 else 2 * model.layers * scale.ALL_REDUCE
        assert scale.pass_time(model, n, 0) > floor + model.layers * scale.LAYER + summed
    one, wide = (replace(model, rollout_tensor=t) for t in (1, 8))
    assert scale.pass_time(one, 1, 0) / 8 < scale.pass_time(wide, 1, 0)


def test_decoding_alone_is_what_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """75 tokens/s of Llama-3.1-8B on an A100 of 1555 GB/s; its bound on an H100 is 4.79 ms."""
    llama = scale.Model("Llama-3.1-8B", 8.03e9, 8.03e9, 32, 4096, 32 * 128, 8 * 128, 1, 1)
    assert 0.8 * scale.pass_time(llama, 1, 1000) > 4.79e-3
    monkeypatch.setattr(scale, "BANDWIDTH", 1555 * scale.GB)
    assert 1 / scale.pass_time(llama, 1, 0) == pytest.approx(75, rel=0.02)


def test_published_rates_in_full_batches_come_out() -> None:
    for line, published in zip(scale.decode_rates().splitlines()[2:], (6300, 1200), strict=True):
        assert float(line.split("|")[2].replace(",", "")) == pytest.approx(published, rel=0.05)


def test_the_longest_response_is_alone_at_last() -> None:
    """Its seconds are those of one response, not a share of a full batch's."""
    _, longest = scale.rollout_time(SMALL, scale.PAPER, 1024)
    assert longest == pytest.approx(20480 * scale.pass_time(SMALL, 1, 10240))
    assert longest < 180


def test_a_model_fits_or_does_not_whichever_table_asks() -> None:
    for model, work, n, _ in scale.PUBLISHED:
        assert model in scale.MODELS
        assert isinstance(scale.step(model, work, n), str) == isinstance(scale.step(model, scale.PAPER, n), str)
