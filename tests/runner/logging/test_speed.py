"""What a step's time amounts to."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dapo_runner.config import TinyModelConfig
from dapo_runner.logging.speed import peak_flops, speed_figures, speed_line, training_flops
from dapo_runner.run.tiny_model import make_model, make_tokenizer


def test_the_flops_of_a_step_are_those_of_its_products() -> None:
    shape = TinyModelConfig(layers=3, hidden_size=64, heads=4, intermediate_size=128)
    model = make_model(shape, make_tokenizer(), max_positions=256)
    length = 128
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.int64)).logits.sum().backward()
    counted = counter.get_total_flops()
    attention = 6 * 3 * 64 * length**2  # which the counter does not know on a CPU
    assert training_flops(model, [length]) - attention == pytest.approx(counted, rel=0.01)
    assert training_flops(model, [length, length]) == 2 * training_flops(model, [length])


def test_speed_is_over_the_step_and_the_share_of_the_peak_over_its_passes() -> None:
    seconds = {"rollout": 6.0, "forward_backward": 4.0}
    figures = speed_figures(flops=8e15, positions=1000, seconds=seconds, ranks=2, peak=2e15)
    assert figures == {"ranks": 2.0, "tokens_per_second": 100.0, "mfu": 0.5}
    assert speed_line(figures) == "100 trained tokens/s, MFU 50%"
    assert speed_line({}) == ""
    assert "mfu" not in speed_figures(8e15, 1000, seconds, 2, peak=None)
    assert peak_flops(torch.device("cpu")) is None
