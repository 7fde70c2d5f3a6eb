"""The page as a file and as `dapo watch` serves it, closed to what model output and other sites may try.

The model and the data set of its run are out to break the page.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_prompt, make_sample
from small import Dapo
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import AdvantageConfig, RolloutLogConfig
from dapo_runner.logging.metrics import METRICS_FILE, MetricsLog
from dapo_runner.logging.rollout_log import ROLLOUTS, RolloutLog, saved_steps
from dapo_runner.run.folder import CONFIG_FILE
from dapo_runner.tools.page.html import contents, spread_steps, write_page
from dapo_runner.tools.page.serve import open_server
from dapo_runner.types import Group, Turn

pytest.importorskip("plotly")
SCRIPT = "</script><script>document.title='taken'</script>"
IMAGE = "<img src=x onerror=\"document.title='taken'\">"
HOSTILE_NAME = "<img src=x>"
PIECES = [SCRIPT, IMAGE, "\x1b[2J\x00\u202e", "<b>bold</b>\n"]  # the four tokens of every response
STEPS = (3, 5)
TURNS = (Turn("environment", 0, 1, SCRIPT), Turn("assistant", 1, 4, "".join(PIECES[1:]), "done", 0.5))
VALUES = TokenValues(  # after three tokens of the prompt; the first is clipped, the last one of high entropy
    logprobs=torch.tensor([0, 0, -0.1, -0.5, -2, -4]),
    entropy=torch.tensor([0, 0, 0.1, 0.2, 0.3, 1.5]),
    ratio=torch.tensor([0, 0, 1.4, 1, 0.9, 0.5]),
    clip_hit=torch.tensor([0, 0, 2, 0, 0, 0], dtype=torch.int8),
    high_entropy=torch.tensor([0, 0, 0, 0, 0, 1]).bool(),
    selected=None,
)


def log_metrics(run: Path, step: int, **figures: float) -> None:
    usual = {"batch/reward": step / 10, "sampling/reward": 0.5, "train/entropy": 0.5, "sampling/mixed": 0.5}
    MetricsLog(run / METRICS_FILE, keep_through=step - 1).write(step, "step", usual | figures)


def write_rollouts(run: Path, step: int, per_token: bool = True, first: int = 0, turns: tuple[Turn, ...] = ()) -> None:
    """A group of a correct, an incorrect and a truncated answer, and one that is all incorrect."""
    mask = torch.tensor([turn.role == "assistant" for turn in turns for _ in range(turn.start, turn.end)])

    def group(name: str, answer: str, *samples: Any) -> Group:
        said = {"text": "".join(PIECES), "turns": turns, "loss_mask": mask if turns else None}
        hostile = (
            replace(
                sample,
                completion=replace(sample.completion, **said),
                verdict=replace(sample.verdict, extracted=IMAGE),
                parts={"<i>brief": 0.5},
            )
            for sample in samples
        )
        return Group(make_prompt(name, answer=answer), tuple(hostile))

    truncated = make_sample(False, truncated=True, trains=False)
    groups = [
        group(SCRIPT, IMAGE, make_sample(True), make_sample(False), truncated),
        group("\u202e\ud800 & <i>", "\udfff", make_sample(False), make_sample(False)),
    ][first:]
    tokenizer = Tokenizer(models.WordLevel({piece: 10 + place for place, piece in enumerate(PIECES)}, unk_token=SCRIPT))
    tokenizer.decoder = decoders.Fuse()
    of_tokens = PreTrainedTokenizerFast(tokenizer_object=tokenizer) if per_token else None
    log = RolloutLog(run / ROLLOUTS, RolloutLogConfig(), keep_through=step - 1, tokenizer=of_tokens)
    values = {} if first else dict.fromkeys((0, 1, 3, 4), VALUES)
    log.write(step, groups, make_sequences(groups, AdvantageConfig(kind="group_mean")), values)


def write_run(folder: Path, name: str, per_token: bool = True, turns: tuple[Turn, ...] = ()) -> Path:
    run = folder / name
    for step in range(1, 7):
        log_metrics(run, step)
    for step in STEPS:
        write_rollouts(run, step, per_token, turns=turns)
    return run


@contextmanager
def served(*runs: Path) -> Iterator[ThreadingHTTPServer]:
    with open_server(runs, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, "a")


def scripts_of(page: str) -> list[tuple[str, str]]:
    """Attributes and content of every script element, as a parser of HTML finds them."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def data_of(page: Path) -> Any:
    return json.loads(scripts_of(page.read_text())[0][1])


def test_a_file_holds_curves_and_rollouts(run: Path, dapo: Dapo) -> None:
    dapo("report", run, "--html")
    data = data_of(run / "report.html")
    assert [panel["title"] for panel in data["panels"]] == ["Reward", "Entropy", "Dynamic sampling"]  # what it logs
    drawn = {curve["key"] for panel in data["panels"] for curve in panel["curves"]}
    assert all(len(data["meanings"][key]) > 20 for key in drawn)
    (shown,) = data["runs"]
    assert shown["curves"]["batch/reward"] == [[1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]
    assert (shown["name"], shown["steps"], shown["saved"], data["live"]) == ("a", list(STEPS), 2, False)
    files = saved_steps(run / ROLLOUTS)
    assert {int(step): base64.b64decode(text) for step, text in shown["rollouts"].items()} == {
        step: path.read_bytes() for step, path in files.items()
    }
    room = sum(path.stat().st_size for path in files.values()) - 1
    (shown,) = data_of(write_page([run], max_mb=room / 1e6))["runs"]
    assert (shown["steps"], shown["saved"]) == ([STEPS[-1]], 2)


def test_nothing_hostile_stands_in_the_file(tmp_path: Path) -> None:
    file = write_page([write_run(tmp_path, HOSTILE_NAME)], tmp_path / "page.html")
    page = file.read_text()
    assert [text for text in (IMAGE, SCRIPT, HOSTILE_NAME) if text in page] == []
    assert data_of(file)["runs"][0]["name"] == HOSTILE_NAME
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


def test_what_has_no_room_is_left_out_evenly() -> None:
    rooms = {100: [1, 2, 3, 4, 5], 30: [1, 3, 5], 20: [2, 5], 19: [5], 10: [5], 9: []}
    assert {room: spread_steps(dict.fromkeys(range(1, 6), 10), room) for room in rooms} == rooms


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


def get(server: ThreadingHTTPServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_data_change_when_the_run_begins_and_goes_on(tmp_path: Path) -> None:
    with served(tmp_path / "later") as server:
        data: dict[str, Any] = {"version": ""}

        def changed() -> Any:
            """The run in the newest data, which are not those of before."""
            status, body = get(server, "/data", **{"If-None-Match": data["version"]})
            assert status == 200
            data.update(json.loads(body))
            assert get(server, "/data", **{"If-None-Match": data["version"]}) == (304, b"")
            return data["runs"][0]

        shown = changed()
        assert (shown["curves"], shown["steps"]) == ({}, [])
        run = write_run(tmp_path, "later")
        assert changed()["curves"]["batch/reward"][0] == [1, 2, 3, 4, 5, 6]
        log_metrics(run, 7)
        assert changed()["curves"]["batch/reward"][0][-1] == 7
        write_rollouts(run, 7)
        assert changed()["steps"] == [*STEPS, 7]


def test_only_the_page_its_data_and_rollouts_are_served_and_only_here(run: Path, dapo: Dapo) -> None:
    with served(run) as server:
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
            dapo("watch", run, "--port", port, code=2)
