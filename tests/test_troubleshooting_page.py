"""Each case of docs/troubleshooting.md has a picture, drawn from kept curves, and the setting that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from docs.troubleshooting_pictures import (
    CASES,
    DRAWN,
    FOLDER,
    HEALTHY,
    ROOT,
    VALUES,
    draw_case,
    file_of,
    settings_of,
)

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
RUNS = json.loads(VALUES.read_text(encoding="utf-8"))["runs"]
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("case", DRAWN)
def test_a_case_has_a_picture_and_its_setting(case: str) -> None:
    section = " ".join(SECTIONS[case].split())
    assert f"]({FOLDER.name}/{file_of(case).name})" in section
    assert file_of(case).is_file()
    setting = section[section.index("**Setting in the picture.**") :]
    assert all(f"`{override}`" in setting for override in CASES[case])
    assert "**Change" in section or "changes.**" in section


def test_the_curves_are_those_of_the_settings() -> None:
    assert {case: run["overrides"] for case, run in RUNS.items()} == {case: settings_of(case) for case in RUNS}
    assert DRAWN.keys() == CASES.keys() - {HEALTHY}


@pytest.mark.parametrize("case", DRAWN)
def test_a_picture_can_be_drawn_again(case: str, tmp_path: Path) -> None:
    draw_case(case, {name: run["curves"] for name, run in RUNS.items()}, tmp_path / "case.png")
    assert (tmp_path / "case.png").read_bytes().startswith(b"\x89PNG")
