"""The benchmark of several turns, at a tiny size."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_environments
from dapo_runner.config import TinyModelConfig
from dapo_runner.run.tiny_model import make_model, make_tokenizer


def test_every_call_of_the_slow_environment_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tokenizer, page = make_tokenizer(), tmp_path / "page.md"
    sizes = {"layers": 1, "hidden_size": 8, "intermediate_size": 8, "heads": 1, "warmup": {"stop_at": None}}
    make_model(TinyModelConfig(**sizes), tokenizer, 1024).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    values = {"TURNS": 3, "TOKENS": 2, "EPISODES": 8, "CALL_S": 0.3, "THREADS": torch.get_num_threads()}
    for name, value in values.items():
        monkeypatch.setattr(bench_environments, name, value)
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds=1", f"--model={tmp_path}", f"--out={page}"])
    bench_environments.main()
    rows = dict(re.findall(r"^\| (.+?) \| (\d+ \| [\d.]+) \|", page.read_text(), re.MULTILINE))
    tokens, seconds = zip(*(map(float, row.split(" | ")) for row in rows.values()), strict=True)
    assert list(rows) == ["one turn", "3 turns", "3 turns, 300 ms a call", "3 turns, earlier ones computed again"]
    assert set(tokens) == {8 * 3 * 2}
    assert seconds[2] >= 4 * 0.3  # reset and three steps
