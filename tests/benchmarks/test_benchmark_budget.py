"""The budget of the benchmarks: their lines, and the newest result of each kind. Older ones are in git."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LINES = 3034
# The run of 23 November alone has sampling masks; docs/guide.md quotes it. The GPU run without a date alone has
# more than 8,192 tokens; docs/gpu.md quotes it.
SOLE_SOURCES = {"full-amd-epyc-2c-avx512bf16-20261123-0455", "gpu-logits-nvidia-h200"}


def test_lines_of_the_benchmarks() -> None:
    assert sum(len(path.read_text().splitlines()) for path in BENCHMARKS.glob("*.py")) <= LINES


def test_results_are_the_newest_of_their_kind() -> None:
    names = {path.name for path in (BENCHMARKS / "results").iterdir() if path.stem not in SOLE_SOURCES}
    kinds = Counter(re.sub(r"-\d{8}(-\d{4})?\.", ".", name) for name in names)
    assert [kind for kind, count in kinds.items() if count > 1] == []


def test_every_result_is_linked() -> None:
    """From the README, CONTRIBUTING.md or a page."""
    root = BENCHMARKS.parent
    text = "\n".join(page.read_text() for page in (*root.glob("*.md"), *(root / "docs").glob("**/*.md")))
    pages = {path.stem for path in (BENCHMARKS / "results").glob("*.md")}
    assert {page for page in pages if f"results/{page}." not in text} == set()
