"""The page as a file, as `dapo watch` serves it, and in a real browser, where it does what it is clicked for.

The model and the data set of its run are out to break the page.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import re
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_prompt, make_sample
from small import Dapo
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import AdvantageConfig, RolloutLogConfig
from dapo_runner.config.reading import CONFIG_FILE
from dapo_runner.errors import ConfigError
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, MetricsLog
from dapo_runner.logging.rollout_log import ROLLOUTS, RolloutLog, saved_steps
from dapo_runner.tools.page import serve
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


def log_seconds(run: Path, step: int, **seconds: float) -> None:
    figures = {f"seconds/{phase}": value for phase, value in seconds.items()}
    MetricsLog(run / TIMINGS_FILE, keep_through=step - 1).write(step, "step", figures)


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
    room = sum(map(len, shown["rollouts"].values()))
    for mb, steps in ((room / 1e6, list(STEPS)), ((room - 9) / 1e6, [STEPS[-1]])):  # at most two = in each text
        (shown,) = data_of(write_page([run], max_mb=mb))["runs"]
        assert (shown["steps"], shown["saved"]) == (steps, 2)


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
    (runs[1] / CONFIG_FILE).write_text("{run: {name: b}, loss: {objective: cispo, clip_high: 0.28}}")
    one, two = contents(runs)["runs"]
    assert (one["differences"], two["differences"]) == ({"loss.clip_high": ".inf"}, {"loss.clip_high": "0.28"})


def test_a_link_has_the_name_that_the_user_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "best").symlink_to(write_run(tmp_path, "a", per_token=False))
    monkeypatch.chdir(tmp_path / "best")
    for runs in ([tmp_path / "best", tmp_path / "a"], [Path("../best"), Path("../a")]):
        assert [run["name"] for run in contents(runs)["runs"]] == ["best", "a"]


def test_what_has_no_room_is_left_out_evenly() -> None:
    rooms = {100: [1, 2, 3, 4, 5], 30: [1, 3, 5], 20: [2, 5], 19: [5], 10: [5], 9: []}
    assert {room: spread_steps(dict.fromkeys(range(1, 6), 10), room) for room in rooms} == rooms


def test_a_mistake_is_one_line(run: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    MetricsLog(run.parent / "sft" / METRICS_FILE).write(1, "step", {"train/loss": 0.5})  # as dapo sft does
    broken = run.parent / "broken" / METRICS_FILE
    MetricsLog(broken).write(1, "step", {"train/loss": 0.5})
    broken.write_bytes(broken.read_bytes() + bytes(9) + b"\n")  # as after a power cut
    dapo.refuses("RUN: dapo sft", "report", run, run.parent / "sft", "--html")
    with pytest.raises(ConfigError, match=r"broken.metrics\.jsonl:2"):
        open_server([broken.parent], 0)
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


def test_a_browser_that_leaves_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered, errors = threading.Event(), list[object]()
    with served(run) as server:
        monkeypatch.setattr(server, "handle_error", lambda *_: errors.append(sys.exception()))
        monkeypatch.setattr(server, "shutdown_request", lambda _: answered.set())
        monkeypatch.setattr(serve, "contents", lambda _: left.close() or {"curves": []})
        left = socket.create_connection(("127.0.0.1", server.server_port))
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets it
        left.sendall(b"GET /data HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answered.wait(20)
    assert errors == []


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


# In a browser


@pytest.fixture(scope="module")
def open_page() -> Iterator[Any]:
    """Opens an address. Nothing may be said on the console, and no script may run but the page's own."""
    said: list[str] = []
    pages: list[Any] = []

    def open_at(address: str, **device: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **device})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        page.wait_for_selector(".response")
        pages.append(page)
        return page

    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    # As root and in a container; and none of its own calls home.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield open_at
        assert said == []
        assert [page.title() for page in pages if page.title() == "taken"] == []
        browser.close()


@pytest.fixture(scope="module")
def loaded(open_page: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page of two runs. The last step of the second one, without values per token, has the second prompt only."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder, "<img src=x>a"), write_run(folder, "b", per_token=False)]
    write_rollouts(runs[1], 5, per_token=False, first=1)
    for run, value in zip(runs, ("<b>0.3</b>", "0.2"), strict=True):
        (run / CONFIG_FILE).write_text(f"data: {{path: d}}\nloss: {{clip_high: {value}}}")
        for step in range(1, 7):
            log_seconds(run, step, evaluate=3.0 * (step == 5))
    return open_page(write_page(runs, folder / "page.html").as_uri())


@pytest.fixture
def report(loaded: Any) -> Any:
    loaded.goto(loaded.url)
    return loaded


def until(page: Any, condition: str) -> None:
    """Playwright's own wait evaluates strings in the page, which its policy forbids."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def columns(page: Any) -> list[Any]:
    """The rollouts of each run, drawn to their end."""
    until(page, "[...document.querySelectorAll('.run')].every(run => run.querySelector('.where .note'))")
    return page.query_selector_all(".run")


def curves_of(page: Any) -> dict[str, list[list[float]]]:
    """The values of every curve, by the title of its chart."""
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.panel')].map(panel => "
        "[panel.firstChild.textContent, panel.lastChild.data.map(trace => trace.y)]))"
    )


def test_runs_have_a_chart_per_curve_and_smooth_lines_over_raw_ones(report: Any) -> None:
    raw = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    curves = curves_of(report)
    others = ["Reward: generated", "Entropy", "Dynamic sampling: mixed", "Time: held-out"]
    assert list(curves) == ["Reward: trained on", *others]
    assert curves["Time: held-out"] == [[0, 0, 0, 0, 3, 0]] * 2  # no time is shown where none was spent
    first, smooth, *second = curves["Reward: trained on"]
    assert (first, second) == (raw, [raw, smooth])
    powers = 0.6 ** np.arange(6)[::-1]  # the weight of a value is a power of 0.6
    assert smooth == pytest.approx([np.average(raw[:n], weights=powers[-n:]) for n in range(1, 7)])
    chart = "document.querySelector('.panel').lastChild"
    assert len(set(report.evaluate(f"{chart}.data.map(trace => trace.line.color)"))) == 2  # one of each run
    report.fill("#smoothing", "0")
    assert curves_of(report)["Reward: trained on"] == [raw, raw]
    assert "batch/reward" in report.get_attribute(".panel h3", "title")
    chart = report.get_by_role("img", name="Reward: trained on").get_attribute("aria-label")
    assert "<img src=x>a 0.6, b 0.6" in chart  # what a screen reader has of it


def test_a_page_of_one_run(open_page: Any, tmp_path: Path) -> None:
    """Its header, its charts, and that new points leave the zoom."""
    run = write_run(tmp_path, "<img src=x>a")
    (run / CONFIG_FILE).write_text('{algorithm: grpo, model: {path: "<b>m</b>"}, data: {path: d.jsonl}}')
    for step, accuracy in ((7, 0.25), (20_000, 0.75)):
        others = {"reflection/en": 0.0, "train/grad_norm": math.nan, "train/lr": 2e-4}
        log_metrics(run, step, **{"eval/avg@4": accuracy, **others})
    page = open_page(write_page([run], tmp_path / "page.html").as_uri())
    header = page.query_selector("#runs").text_content()
    for text in ("<img src=x>a", "<b>m</b>", "d.jsonl", "grpo", "avg@4", "25.0 %", "75.0 %", "20000"):
        assert text in header
    assert "10,000" in page.locator(".chart").first.locator(".xaxislayer-above").text_content()
    assert page.query_selector("#runs img, #runs b") is None
    curves = curves_of(page)
    assert [len(found) for found in curves["Reward"]] == [8] * 4  # of one run, both curves in one chart
    charts = "[...document.querySelectorAll('.panel')].map(panel => panel.lastChild.layout.yaxis.range)"
    ranges = dict(zip(curves, page.evaluate(charts), strict=True))
    assert ranges["Learning rate"] == pytest.approx([1.8e-4, 2.2e-4])  # it is constant
    assert not any("Reflection" in title for title in curves)
    assert page.inner_text("#zero") == "0 at every step: Reflection: English"  # not the norm, which was never finite
    shown = "document.querySelector('.panel').lastChild.layout.xaxis.range"
    box = page.query_selector(".chart >> nth=0 >> .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    first, last = page.evaluate(shown)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.7 * box["height"], steps=5)
    page.mouse.up()
    low, high = page.evaluate(shown)
    assert first < low < high < last
    page.fill("#smoothing", "0.3")
    assert page.evaluate(shown) == [low, high]
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('#runs')).position") == "static"  # not on each sheet
    assert not page.is_visible("#token")
    page.emulate_media(media="screen")
    for scheme, paper, ink in (("light", "rgb(255, 255, 255)", "#222"), ("dark", "rgb(22, 22, 22)", "#ddd")):
        page.emulate_media(color_scheme=scheme)
        until(page, f"document.querySelector('.chart').layout.font.color === '{ink}'")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper


def test_eight_runs_look_different_and_leave_room_on_a_narrow_screen(open_page: Any, tmp_path: Path) -> None:
    """There are seven colours. Names are not written in them, which may be too bright to read."""
    write_run(tmp_path, "0", per_token=False)
    for run in range(1, 8):
        log_metrics(tmp_path / f"{run}", 1)
    page = open_page(write_page([tmp_path / f"{run}" for run in range(8)], tmp_path / "page.html").as_uri())
    curves = page.evaluate("document.querySelector('.chart').data.map(trace => [trace.line.color, trace.line.dash])")
    assert len(set(map(tuple, curves))) == 8
    first, last = curves[0], curves[-1]
    assert (first[0], first[1], last[1]) == (last[0], "solid", "dash")
    names = page.query_selector_all(".name, .run h3")
    styles = [name.evaluate("name => [getComputedStyle(name).borderBottom, name.style.color]") for name in names]
    assert len(styles) == 16
    assert styles[:8] == styles[8:]
    assert len({line for line, _ in styles}) == 8
    assert {color for _, color in styles} == {""}
    page.set_viewport_size({"width": 375, "height": 700})  # where the header would take all of it
    assert page.query_selector("#runs").bounding_box()["height"] < 200
    assert all(run.bounding_box()["width"] > 280 for run in page.query_selector_all(".run"))


def test_the_first_step_on_a_narrow_screen(open_page: Any, tmp_path: Path) -> None:
    log_metrics(tmp_path / "a", 1, **{"reward/brief": 0.5, "reward/brief_std": 0.1, "train/lr": 1e-4})
    write_rollouts(tmp_path / "a", 1, per_token=False)
    file = write_page([tmp_path / "a"], tmp_path / "page.html")
    page = open_page(file.as_uri(), viewport={"width": 375, "height": 700}, has_touch=True, is_mobile=True)
    until(page, "document.querySelector('.chart svg').clientWidth < 360")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    drawn = "[...document.querySelectorAll('.panel')].map(panel => panel.querySelectorAll('.point').length > 0)"
    assert all(page.evaluate(drawn))
    titles = page.evaluate("[...document.querySelectorAll('.panel h3')].map(title => title.title)")
    assert not any("seconds" in title for title in titles)
    assert any(title.startswith("reward/brief: ") for title in titles)
    assert not page.is_visible("#token")  # nothing can be clicked
    box = page.query_selector(".chart >> nth=0 >> .nsewdrag").bounding_box()
    place, shown = {"x": box["x"] + 100, "y": box["y"] + 150}, "document.querySelector('.chart').layout.yaxis.range"
    limits = page.evaluate(shown)
    finger = page.context.new_cdp_session(page)
    for kind, up in (("touchStart", 0), *(("touchMove", up) for up in range(15, 121, 15)), ("touchEnd", None)):
        points = [] if up is None else [place | {"y": place["y"] - up}]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    until(page, "scrollY > 20")
    assert page.evaluate(shown) == limits  # a finger scrolls the page; it does not zoom


def test_the_same_prompt_is_found_in_every_run(report: Any) -> None:
    def shown() -> tuple[list[str], int]:
        """The step of each run, and how many prompts there are."""
        found = columns(report)
        until(report, "document.querySelectorAll('.run .prompt').length === 2")
        steps = [column.query_selector("select").input_value() for column in found]
        return steps, len({column.query_selector(".prompt").text_content() for column in found})

    assert shown() == (["5", "3"], 1)
    report.select_option(".run >> nth=0 >> .where select >> nth=1", "2")
    assert shown() == (["5", "5"], 1)
    report.select_option(".run >> nth=0 >> .where select >> nth=1", "1")
    report.uncheck("#same")
    assert shown() == (["5", "5"], 2)
    report.check("#same")
    change = "groups.forEach((group) => group.samples.forEach((sample) => (sample.correct = group.group === 2)))"
    report.evaluate(f"load(1, 3).then(({{ groups }}) => {change})")
    report.select_option(".run >> nth=0 >> .where select >> nth=0", "3")
    report.select_option("#groups", "all-incorrect")
    until(report, "document.querySelector('.run:last-child').textContent.includes('the filters leave out')")
    assert shown() == (["3", "3"], 2)


def test_hostile_text_is_text_and_its_tokens_tell_their_values(report: Any) -> None:
    left, right = columns(report)
    assert SCRIPT in left.query_selector(".prompt").inner_text()
    response = left.query_selector(".response").text_content()
    assert response == f"{SCRIPT}{IMAGE}\\u001b[2J\\u0000\\u202e<b>bold</b>↵\n"
    assert right.query_selector(".response").text_content() == response.replace("↵", "")  # not token by token
    assert "loss.clip_high: <b>0.3</b>" in report.query_selector("#runs").text_content()
    summary = left.query_selector("summary").text_content()
    assert [part for part in ("+1 ", "<i>brief +0.5", "+1.33", "4 ", IMAGE) if part not in summary] == []
    assert report.query_selector("#rollouts img, #rollouts script, #rollouts b, #rollouts i") is None
    tokens = left.query_selector_all("details >> nth=0 >> .token")
    marks = [set(token.get_attribute("class").split()) - {"token", "assistant"} for token in tokens]
    assert marks == [{"clipped"}, set(), set(), {"high"}]
    masked = left.query_selector_all("details >> nth=2 >> .token.masked")  # the third answer does not train
    assert len(masked) == len(PIECES)
    tokens[0].click()
    told = report.inner_text("#token")
    for value in ("token 1", "entropy 0.1", "ratio 1.4", "logprob -0.1", "engine logprob -0.125", 'clip "high"'):
        assert value in told
    report.select_option("#groups", "all-incorrect")
    prompt = columns(report)[0].query_selector(".prompt").text_content()
    assert prompt == "\\u202e\\ud800 & <i>"


def test_hebrew_is_read_from_the_right_token_by_token(report: Any) -> None:
    columns(report)
    pieces = "['של', 'ום', '.'].map((text) => make('span', 'token', text))"
    report.evaluate(f"document.querySelector('.response').replaceChildren(...{pieces})")
    lefts = [token.bounding_box()["x"] for token in report.query_selector_all(".response >> nth=0 >> .token")]
    assert lefts == sorted(lefts, reverse=True)
    assert len(lefts) == 3


def test_colours_follow_the_value_that_was_chosen(report: Any) -> None:
    """Red, green, blue and how much of them, behind each token of the first response."""
    blue, orange, pink, sky = "0, 114, 178", "213, 94, 0", "204, 121, 167", "86, 180, 233"
    expected = {  # at most 0.6 of a colour, so that the text on it has a contrast of 4.5
        "": [("", 0)] * 4,
        "entropy": [(pink, 0.03), (pink, 0.06), (pink, 0.09), (pink, 0.45)],  # of 2 nats
        "probability": [(orange, 0.057), (orange, 0.236), (orange, 0.519), (orange, 0.589)],  # of another token
        "ratio": [(blue, 0.6), (blue, 0), (orange, 0.211), (orange, 0.6)],  # log 1.4 and log 0.5 are off the scale
        "advantage": [(blue, 0.4)] * 4,
        "clip": [(sky, 1), *[("", 0)] * 3],
    }
    for name, colours in expected.items():
        report.select_option("#colour", name)
        columns(report)
        tokens = report.query_selector_all(".run >> nth=0 >> details >> nth=0 >> .token")
        found = [token.evaluate("token => token.style.backgroundColor") for token in tokens]
        for text, (colour, share) in zip(found, colours, strict=True):
            rgb, alpha = re.fullmatch(r"(?:rgba?\((\d+, \d+, \d+)(?:, ([\d.]+))?\))?", text).groups("")
            assert rgb == colour, name
            assert float(alpha or bool(rgb)) == pytest.approx(share, abs=0.01), name


def test_the_keyboard_keeps_its_place(report: Any) -> None:
    def press(key: str) -> None:
        report.keyboard.press(key)
        until(report, "document.activeElement !== document.body && document.querySelector('.run .prompt')")

    columns(report)
    names = [control.get_attribute("aria-label") for control in report.query_selector_all(".where >> nth=0 >> button")]
    assert names == ["previous step", "next step", "previous group", "next group"]
    assert [report.get_by_role("combobox", name=name, exact=True).count() for name in ("step", "group")] == [2, 2]
    report.focus("[aria-label='next group']")
    press("Enter")
    assert report.input_value(".where select >> nth=1") == "2"
    report.focus(".where select >> nth=1")
    press("ArrowUp")
    assert report.evaluate("document.activeElement.value") == "1"
    report.focus("#runs input >> nth=1")
    for is_shown in (False, True):
        press("Space")
        assert report.is_checked("#runs input >> nth=1") == is_shown


def test_filters_leave_what_was_asked_for(report: Any) -> None:
    def left(responses: str) -> list[str]:
        report.select_option("#responses", responses)
        summaries = columns(report)[0].query_selector_all("summary")
        return [summary.inner_text().split(" · ")[0] for summary in summaries]

    samples = ["sample 1 correct", "sample 2 incorrect", "sample 3 incorrect"]
    assert [left(name) for name in ("", "correct", "incorrect")] == [samples, samples[:1], samples[1:]]
    assert left("truncated") == samples[2:]
    report.select_option("#groups", "all-incorrect")
    assert left("truncated") == []  # nothing in it was truncated
    assert left("") == ["sample 1 incorrect", "sample 2 incorrect"]
    assert report.is_visible("#legend")
    report.click("#runs input >> nth=0")
    assert len(columns(report)) == 1
    assert not report.is_visible("#legend")  # the other run has no values per token


def test_watching_runs_with_turns_of_an_environment(open_page: Any, tmp_path: Path) -> None:
    """Turns of the environment are grey, token by token and as text. New steps are shown without a reload."""
    run, text = (write_run(tmp_path, name, per_token=name == "tokens", turns=TURNS) for name in ("tokens", "text"))
    colour = "element => getComputedStyle(element).color"
    with served(run, text) as server:
        page = open_page(f"http://127.0.0.1:{server.server_port}")
        left, right = columns(page)
        for column in (left, right):
            response = column.query_selector("details >> nth=0 >> .response")
            grey, own = (response.query_selector_all(f".{role}") for role in ("environment", "assistant"))
            assert {one.evaluate(colour) for one in grey}.isdisjoint({one.evaluate(colour) for one in own})
            assert "".join(one.text_content() for one in grey) == SCRIPT
            assert "done +0.5" in column.query_selector("summary").text_content()
        assert len(left.query_selector_all("details >> nth=0 >> .token.assistant")) == len(PIECES) - 1
        assert len(right.query_selector_all("details >> nth=0 >> .response .assistant")) == 1
        assert page.input_value(".where select") == "5"
        page.focus(".where select >> nth=0")
        log_metrics(run, 7)
        write_rollouts(run, 7)
        until(page, "document.querySelectorAll('.chart')[0].data[0].y.at(-1) === 0.7")
        until(page, "document.activeElement.value === '7'")  # who has the keyboard in the list keeps it there
        page.click(".where button >> nth=0")
        until(page, "document.querySelector('.where select').value === '5'")
        page.wait_for_selector(".response .token")
        page.evaluate("document.querySelector('.run').id = 'read'")
        page.focus("#runs input >> nth=1")
        log_metrics(text, 7)
        until(page, "document.querySelectorAll('.chart')[0].data[2].y.at(-1) === 0.7")
        assert page.evaluate("document.activeElement === document.querySelectorAll('#runs input')[1]")
        assert page.query_selector("#read") is not None  # who reads an earlier step goes on reading
