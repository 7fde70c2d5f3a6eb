"""The page as a file: whole, closed to what model output may try, and no larger than asked for."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import IMAGE, SCRIPT, STEPS, log_metrics, write_run

from dapo_runner.cli import main
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps
from dapo_runner.run.folder import CONFIG_FILE
from dapo_runner.tools.page.html import contents, spread_steps, write_page

pytest.importorskip("plotly")
HOSTILE_NAME = "<img src=x>"


def scripts_of(page: str) -> list[tuple[str, str]]:
    """Attributes and content of every script element, as a parser of HTML finds them."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def data_of(page: str) -> Any:
    return json.loads(scripts_of(page)[0][1])


def test_a_file_holds_curves_and_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "a")
    assert main(["report", str(run), "--html"]) == 0
    assert f"page: {run / 'report.html'}" in capsys.readouterr().out
    data = data_of((run / "report.html").read_text())
    assert [panel["title"] for panel in data["panels"]] == ["Reward", "Entropy", "Dynamic sampling"]  # what it logs
    drawn = {curve["key"] for panel in data["panels"] for curve in panel["curves"]}
    assert all(len(data["meanings"][key]) > 20 for key in drawn)
    (shown,) = data["runs"]
    assert shown["curves"]["batch/reward"] == [[1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]
    assert (shown["name"], shown["steps"], shown["kept"], data["live"]) == ("a", list(STEPS), 2, False)
    for step, path in saved_steps(run / ROLLOUTS).items():
        assert gzip.decompress(base64.b64decode(shown["rollouts"][str(step)])) == gzip.decompress(path.read_bytes())


def test_nothing_hostile_stands_in_the_file(tmp_path: Path) -> None:
    page = write_page([write_run(tmp_path, HOSTILE_NAME)], tmp_path / "page.html").read_text()
    assert IMAGE not in page
    assert SCRIPT not in page
    assert HOSTILE_NAME not in page
    assert data_of(page)["runs"][0]["name"] == HOSTILE_NAME
    data, *code = scripts_of(page)
    assert data[0] == ' type="application/json" id="data"'
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    allowed = re.findall(r"'sha256-([^']*)'", policy[1])
    assert [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in code] == allowed
    assert policy[1].startswith("default-src 'none'; ")
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1].replace("style-src 'unsafe-inline'", "")


def test_runs_are_told_apart_and_gaps_stay_gaps(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent, "same", per_token=False) for parent in "ab"]
    log_metrics(runs[0], 7, **{"train/entropy": float("nan")})
    data = contents(runs)
    assert [run["name"] for run in data["runs"]] == ["a/same", "b/same"]
    assert data["runs"][0]["curves"]["train/entropy"][1][-1] is None


def test_the_header_has_what_is_set(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    assert contents([run])["runs"][0]["about"] == {}
    settings = "{algorithm: null, model: {path: null, tiny: {layers: 2}}, loss: {objective: cispo, clip_high: .inf}}"
    (run / CONFIG_FILE).write_text(settings)
    assert contents([run])["runs"][0]["about"] == {"model.tiny.layers": "2", "loss.objective": "cispo"}


@pytest.mark.parametrize(
    ("room", "steps"), [(100, [1, 2, 3, 4, 5]), (30, [1, 3, 5]), (20, [2, 5]), (19, [5]), (10, [5]), (9, [])]
)
def test_what_has_no_room_is_left_out_evenly(room: int, steps: list[int]) -> None:
    assert spread_steps(dict.fromkeys(range(1, 6), 10), room) == steps


def test_a_limit_is_kept_and_told(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    sizes = [path.stat().st_size for path in saved_steps(run / ROLLOUTS).values()]
    for room, steps in ((sum(sizes), list(STEPS)), (sum(sizes) - 1, [STEPS[-1]]), (0, [])):
        (shown,) = data_of(write_page([run], max_mb=room / 1e6).read_text())["runs"]
        assert (shown["steps"], shown["kept"]) == (steps, 2)


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(write_run(tmp_path, "a"))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for arguments, message in (
        (["report", run, run], "--html"),
        (["report", run, str(tmp_path), "--html"], f"{tmp_path / 'metrics.jsonl'}: expected the metrics of a run"),
        (["report", run, "--html"], "requires plotly. pip install 'dapo-kernels[html]'"),
        (["watch", run], "requires plotly. pip install 'dapo-kernels[html]'"),
        (["watch", __file__], "test_page.py: expected the folder of a run"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("dapo: ")
        assert message in error
        assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.html*"))
