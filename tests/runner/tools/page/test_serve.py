"""`dapo watch`: what the server tells, and to whom."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from hostile import STEPS, log_metrics, write_rollouts, write_run

from dapo_runner.cli import main
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps
from dapo_runner.tools.page.serve import open_server

pytest.importorskip("plotly")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, "a")


@pytest.fixture
def server(run: Path) -> Iterator[ThreadingHTTPServer]:
    with open_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ThreadingHTTPServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_data_change_when_the_run_goes_on(server: ThreadingHTTPServer, run: Path) -> None:
    status, body = get(server, "/data")
    data = json.loads(body)
    assert status == 200
    assert data["runs"][0]["curves"]["batch/reward"][0] == [1, 2, 3, 4, 5, 6]
    known = {"If-None-Match": data["version"]}
    assert get(server, "/data", **known) == (304, b"")
    log_metrics(run, 7)
    status, body = get(server, "/data", **known)
    assert status == 200
    assert json.loads(body)["runs"][0]["curves"]["batch/reward"][0][-1] == 7
    write_rollouts(run, 7)
    assert json.loads(get(server, "/data")[1])["runs"][0]["steps"] == [*STEPS, 7]


def test_a_run_that_does_not_exist_yet_is_waited_for(
    server: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = tmp_path / "later"
    assert main(["watch", str(later), "--port", str(server.server_port)]) == 2
    assert "--port" in capsys.readouterr().err  # which the test has taken: of the folder nothing is said
    with open_server([later], 0) as waiting:
        threading.Thread(target=waiting.serve_forever, daemon=True).start()
        assert get(waiting, "/")[0] == 200
        before = json.loads(get(waiting, "/data")[1])
        assert (before["runs"][0]["curves"], before["runs"][0]["steps"]) == ({}, [])
        write_run(tmp_path, "later")
        status, body = get(waiting, "/data", **{"If-None-Match": before["version"]})
        assert (status, json.loads(body)["runs"][0]["steps"]) == (200, [*STEPS])
        waiting.shutdown()


def test_the_page_and_rollouts_are_served_and_nothing_else(server: ThreadingHTTPServer, run: Path) -> None:
    status, page = get(server, "/")
    assert status == 200
    assert b"connect-src 'self'" in page
    assert get(server, "/rollouts/0/5") == (200, saved_steps(run / ROLLOUTS)[5].read_bytes())
    numbers = ("0/4", "1/5", "-1/5", "0", f"0/{'9' * 5000}", "0/../metrics.jsonl")
    for path in ("/metrics.jsonl", "/../a/metrics.jsonl", "/rollouts", *(f"/rollouts/{two}" for two in numbers)):
        assert get(server, path)[0] == 404, path


def test_only_this_machine_is_served_under_its_own_name(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/data", Host="localhost:1")[0] == 200
    assert get(server, "/data", Host="attacker.example")[0] == 403


def test_a_run_that_has_logged_nothing_yet_is_waited_for(tmp_path: Path) -> None:
    with open_server([tmp_path], 0) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        (shown,) = json.loads(get(server, "/data")[1])["runs"]
        thread.join()
    assert (shown["curves"], shown["steps"]) == ({}, [])


def test_a_taken_port_is_told(server: ThreadingHTTPServer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run), "--port", str(server.server_port)]) == 2
    assert main(["watch", str(run), "--port", "99999"]) == 2
    assert capsys.readouterr().err.count("--port: ") == 2
