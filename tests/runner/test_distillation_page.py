"""docs/distillation.md: its table and its commands are those of the published result."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_is_the_measured_one() -> None:
    (path,) = re.findall(r"\]\(\.\./(benchmarks/results/distillation-\S+?)\)", PAGE)
    results = (ROOT / path).read_text(encoding="utf-8")
    rows = [line for line in results.splitlines() if line.startswith("|")]
    assert len(rows) == 8
    assert set(rows) <= set(PAGE.splitlines())
    (commands,) = re.findall(r"<!-- commands -->\n```\n(.+?)```", PAGE, re.DOTALL)
    assert commands in results
