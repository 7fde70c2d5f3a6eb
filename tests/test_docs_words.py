"""Words of our own that have a standard term: they are not in the README or on a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = {  # and the terms that are used instead
    r"\b(put back|taken up|runs? (is|are|was|were) opened)\b": "start, resume",
    r"\b(Place|Moment|Kept|Stretch)\b": "run context; snapshot; TruncatedSupport; VersionSpan",
    r"\b\d+ (steps? )?ahead\b|\ba lead of\b": "asynchronous rollouts, max_staleness",
    r"\b(prompts?|groups?) (that (is|are|was|were) )?(asked|answered)\b": "submitted, completed",
    r"\b(answers?|responses?|samples?|texts?) (is|are|was|were) (really )?(right|wrong|cut)\b": "correct, truncated",
    r"\b(right|wrong|cut) (answers?|responses?|samples?)\b": "correct, incorrect, truncated",
    r"\b(kept|graded) groups\b|\bgroups (is|are|was|were) (kept|graded)\b": "accepted; with varying reward",
    r"\bnever[_ ]right\b": "unmatchable answers",
    r"\b(told|aloud|befalls?)\b": "logged, set, states",
    r"\b(says|said)\b(?! (little|nothing))": "logs, states, returns",
    r"\ba token's worth\b": "value, return, advantage",
    r"\bby hand, no file\b": "unpublished measurement",
    r"\bwhat would stop\b": "dry run, preflight checks",
    r"\bturned away\b": "filtered out",
    r"\bserved by\b": "backend",
}
EXCEPTIONS = {("spo.md", "response is cut")}  # the cut points of the paper


def prose(text: str) -> str:
    """Return the text without code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_page_uses_standard_terms(path: Path) -> None:
    text = " ".join(prose(path.read_text(encoding="utf-8")).split())
    found = {(path.name, match[0]): terms for words, terms in WORDS.items() for match in re.finditer(words, text)}
    assert {key: terms for key, terms in found.items() if key not in EXCEPTIONS} == {}


def test_every_exception_is_one() -> None:
    for name, words in EXCEPTIONS:
        text = " ".join(prose((ROOT / "docs" / name).read_text(encoding="utf-8")).split())
        assert words in text
        assert any(re.search(pattern, words) for pattern in WORDS)
