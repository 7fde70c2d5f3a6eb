"""docs/one-gpu.md: its snippets are parts of the recipes, its table is that of the published simulation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dapo_runner.config import load_config
from dapo_runner.config.section import flatten
from docs.models.one_gpu import CASES, FULL, LORA, case_name, rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "one-gpu.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- (.+?) -->\n```\w*\n(.+?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize(("name", "recipe"), [("full", FULL), ("lora", LORA)])
def test_a_snippet_is_a_part_of_its_recipe(name: str, recipe: str) -> None:
    whole = flatten(yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text()))
    assert flatten(yaml.safe_load(SNIPPETS[name])).items() <= whole.items()


def test_the_other_snippet_is_a_setting_of_both() -> None:
    assert set(SNIPPETS) == {"full", "lora", "inputs"}
    for key, value in flatten(yaml.safe_load(SNIPPETS["inputs"])).items():
        for recipe in (FULL, LORA):
            assert load_config(ROOT / "recipes" / f"{recipe}.yaml", [f"{key}={value}"]).model.gradient_checkpointing


def results() -> list[str]:
    (path,) = re.findall(r"\]\(\.\./(benchmarks/results/[^\s)]+)\)", PAGE)
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def test_the_table_is_that_of_the_results() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[0] for row in rows] == [f"| {case_name(*case)}" for case in CASES]
    assert set(rows) <= set(results())


@pytest.mark.slow
def test_a_row_is_simulated_anew() -> None:
    """Two minutes: all layers of the model."""
    assert set(rows_of(LORA, [])) <= set(results())
