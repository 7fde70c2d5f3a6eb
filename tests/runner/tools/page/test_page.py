"""The page as a file and as `dapo watch` serves it: whole, and closed to what model output or other sites may try."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hostile import IMAGE, SCRIPT, STEPS, log_metrics, write_rollouts, write_run
from small import Dapo

from dapo_runner.cli import main
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps
from dapo_runner.run.folder import CONFIG_FILE
from dapo_runner.tools.page.html import contents, spread_steps, write_page
from dapo_runner.tools.page.serve import open_server

pytest.importorskip("plotly")
HOSTILE_NAME = "<img src=x>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, "a")


def scripts_of(page: str) -> list[tuple[str, str]]:
    """Attributes and content of every script element, as a parser of HTML finds them."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def data_of(page: str) -> Any:
    return json.loads(scripts_of(page)[0][1])


def test_a_file_holds_curves_and_rollouts(run: Path, dapo: Dapo) -> None:
    dapo("report", run, "--html")
    data = data_of((run / "report.html").read_text())
    assert [panel["title"] for panel in data["panels"]] == ["Reward", "Entropy", "Dynamic sampling"]  # what it logs
    drawn = {curve["key"] for panel in data["panels"] for curve in panel["curves"]}
    assert all(len(data["meanings"][key]) > 20 for key in drawn)
    (shown,) = data["runs"]
    assert shown["curves"]["batch/reward"] == [[1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]
    assert (shown["name"], shown["steps"], shown["saved"], data["live"]) == ("a", list(STEPS), 2, False)
    for step, path in saved_steps(run / ROLLOUTS).items():
        assert gzip.decompress(base64.b64decode(shown["rollouts"][str(step)])) == gzip.decompress(path.read_bytes())
    room = sum(path.stat().st_size for path in saved_steps(run / ROLLOUTS).values()) - 1
    (shown,) = data_of(write_page([run], max_mb=room / 1e6).read_text())["runs"]
    assert (shown["steps"], shown["saved"]) == ([STEPS[-1]], 2)


def test_nothing_hostile_stands_in_the_file(tmp_path: Path) -> None:
    page = write_page([write_run(tmp_path, HOSTILE_NAME)], tmp_path / "page.html").read_text()
    assert [text for text in (IMAGE, SCRIPT, HOSTILE_NAME) if text in page] == []
    assert data_of(page)["runs"][0]["name"] == HOSTILE_NAME
    data, *code = scripts_of(page)
    assert data[0] == ' type="application/json" id="data"'
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    allowed = re.findall(r"'sha256-([^']*)'", policy)
    assert [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in code] == allowed
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_runs_are_told_apart_gaps_stay_gaps_and_the_header_has_what_is_set(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent, "same", per_token=False) for parent in "ab"]
    log_metrics(runs[0], 7, **{"train/entropy": float("nan")})
    settings = "{algorithm: null, model: {path: null, tiny: {layers: 2}}, loss: {objective: cispo, clip_high: .inf}}"
    (runs[0] / CONFIG_FILE).write_text(settings)
    one, two = contents(runs)["runs"]
    assert (one["name"], two["name"]) == ("a/same", "b/same")
    assert one["curves"]["train/entropy"][1][-1] is None
    assert (one["about"], two["about"]) == ({"model.tiny.layers": "2", "loss.objective": "cispo"}, {})


@pytest.mark.parametrize(
    ("room", "steps"), [(100, [1, 2, 3, 4, 5]), (30, [1, 3, 5]), (20, [2, 5]), (19, [5]), (10, [5]), (9, [])]
)
def test_what_has_no_room_is_left_out_evenly(room: int, steps: list[int]) -> None:
    assert spread_steps(dict.fromkeys(range(1, 6), 10), room) == steps


def test_a_mistake_is_one_line(run: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for names, *arguments in (
        ("RUN: --html", "report", run, run),
        (f"{run.parent}/metrics.jsonl", "report", run, run.parent, "--html"),
        ("plotly", "report", run, "--html"),
        ("plotly", "watch", run),
        (__file__, "watch", __file__),
    ):
        assert dapo.refuses(names, *arguments) == dapo.err.strip()
    assert not list(run.parent.rglob("*.html*"))


# Served

Serve = Callable[[Path], ThreadingHTTPServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(run: Path) -> ThreadingHTTPServer:
        servers.append(open_server([run], 0))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(server: ThreadingHTTPServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def run_of(server: ThreadingHTTPServer, **headers: str) -> Any:
    """The version of the data, and the run in it."""
    status, body = get(server, "/data", **headers)
    assert status == 200
    data = json.loads(body)
    return data["version"], data["runs"][0]


def test_data_change_when_the_run_begins_and_goes_on(tmp_path: Path, serve: Serve) -> None:
    server = serve(tmp_path / "later")
    version, shown = run_of(server)
    assert (shown["curves"], shown["steps"]) == ({}, [])
    run = write_run(tmp_path, "later")
    version, shown = run_of(server, **{"If-None-Match": version})
    assert shown["curves"]["batch/reward"][0] == [1, 2, 3, 4, 5, 6]
    assert get(server, "/data", **{"If-None-Match": version}) == (304, b"")
    log_metrics(run, 7)
    version, shown = run_of(server, **{"If-None-Match": version})
    assert shown["curves"]["batch/reward"][0][-1] == 7
    write_rollouts(run, 7)
    assert run_of(server, **{"If-None-Match": version})[1]["steps"] == [*STEPS, 7]


def test_only_the_page_its_data_and_rollouts_are_served_and_only_here(run: Path, serve: Serve) -> None:
    server = serve(run)
    status, page = get(server, "/")
    assert status == 200
    assert b"connect-src 'self'" in page
    assert get(server, "/rollouts/0/5") == (200, saved_steps(run / ROLLOUTS)[5].read_bytes())
    numbers = ("0/4", "1/5", "-1/5", "0", f"0/{'9' * 5000}", "0/../metrics.jsonl")
    for path in ("/metrics.jsonl", "/../a/metrics.jsonl", "/rollouts", *(f"/rollouts/{two}" for two in numbers)):
        assert get(server, path)[0] == 404, path
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/data", Host="localhost:1")[0] == 200
    assert get(server, "/data", Host="attacker.example")[0] == 403
    for port in (server.server_port, 99999):  # in use, and none
        assert main(["watch", str(run), "--port", str(port)]) == 2
