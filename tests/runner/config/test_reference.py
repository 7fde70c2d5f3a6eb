"""The reference of all settings: up to date, and complete."""

from __future__ import annotations

import re

from dapo_runner.config import Config, flatten
from dapo_runner.config.algorithms import ALGORITHMS
from dapo_runner.config.reading import every_key
from docs.settings_reference import page


def test_every_setting_has_a_row_and_a_meaning() -> None:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if not row[3]] == []
    documented = {row[0].strip("|` ") for row in rows}
    assert {"run.from", "optimizer.lr", "data.eval.NAME.path", "reward.parts[].use"} <= documented
    sections = {key.rpartition(".")[0] for key in documented} | {"loss.overrides"}
    assert [key for key in every_key(Config) if not {key, key.rpartition(".")[0]} & (documented | sections)] == []


def test_rows_name_the_algorithms_that_set_them() -> None:
    train, others = page().split("## `dapo sft`")
    rows = {line.split("`")[1]: line for line in train.splitlines() if line.startswith("| `")}
    for name, algorithm in ALGORITHMS.items():
        for key in flatten(algorithm.settings):
            row = rows.get(key) or rows[key.rpartition(".")[0]]  # of `loss.overrides` there is one
            assert re.search(rf"Set by algorithms: (all\b|[^|]*\b{name}\b)", row), (key, name)
    assert "Set by" not in others
    assert "Set by" not in rows["optimizer.lr"]
    assert "Set by algorithms: ppo |" in rows["critic.clip"]
