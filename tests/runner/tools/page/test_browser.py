"""The page in a real browser: it loads without a word on the console, and does what it is clicked for."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_page import IMAGE, PIECES, SCRIPT, TURNS, log_metrics, served, write_rollouts, write_run

from dapo_runner.run.folder import CONFIG_FILE
from dapo_runner.tools.page.html import write_page

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
# As root and in a container; and none of its own calls home.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

Open = Callable[[str], Any]


@pytest.fixture(scope="module")
def open_page() -> Iterator[Open]:
    """Opens an address. Nothing may be said on the console, and no script may run but the page's own."""
    said: list[str] = []
    pages: list[Any] = []

    def open_at(address: str) -> Any:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        page.wait_for_selector(".response")
        pages.append(page)
        return page

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield open_at
        assert said == []
        assert [page.title() for page in pages if page.title() == "taken"] == []
        browser.close()


@pytest.fixture(scope="module")
def loaded(open_page: Open, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page of two runs. The last step of the second one, without values per token, has the second prompt only."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder, "<img src=x>a"), write_run(folder, "b", per_token=False)]
    write_rollouts(runs[1], 5, per_token=False, first=1)
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
    assert list(curves) == ["Reward: trained on", "Reward: generated", "Entropy", "Dynamic sampling: mixed (accepted)"]
    first, smooth, *second = curves["Reward: trained on"]
    assert (first, second) == (raw, [raw, smooth])
    powers = 0.6 ** np.arange(6)[::-1]  # the weight of a value is a power of 0.6
    assert smooth == pytest.approx([np.average(raw[:n], weights=powers[-n:]) for n in range(1, 7)])
    chart = "document.querySelector('.panel').lastChild"
    assert len(set(report.evaluate(f"{chart}.data.map(trace => trace.line.color)"))) == 2  # one of each run
    report.fill("#smoothing", "0")
    assert curves_of(report)["Reward: trained on"] == [raw, raw]
    assert "batch/reward" in report.get_attribute(".panel h3", "title")


def test_a_page_of_one_run(open_page: Open, tmp_path: Path) -> None:
    """Its header, its charts, and that new points leave the zoom."""
    run = write_run(tmp_path, "<img src=x>a")
    (run / CONFIG_FILE).write_text('{algorithm: grpo, model: {path: "<b>m</b>"}, data: {path: d.jsonl}}')
    for step, accuracy in ((7, 0.25), (8, 0.75)):
        log_metrics(run, step, **{"eval/avg@4": accuracy, "reflection/en": 0.0})
    page = open_page(write_page([run], tmp_path / "page.html").as_uri())
    header = page.query_selector("#runs").text_content()
    for text in ("<img src=x>a", "<b>m</b>", "d.jsonl", "grpo", "avg@4", "25.0 %", "75.0 %", "8"):
        assert text in header
    assert page.query_selector("#runs img, #runs b") is None
    curves = curves_of(page)
    assert [len(found) for found in curves["Reward"]] == [8] * 4  # of one run, both curves in one chart
    assert not any("Reflection" in title for title in curves)
    assert "Reflection: English" in page.inner_text("#zero")
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
    for scheme, paper, ink in (("light", "rgb(255, 255, 255)", "#222"), ("dark", "rgb(22, 22, 22)", "#ddd")):
        page.emulate_media(color_scheme=scheme)
        until(page, f"document.querySelector('.chart').layout.font.color === '{ink}'")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper


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


def test_hostile_text_is_text_and_its_tokens_tell_their_values(report: Any) -> None:
    left, right = columns(report)
    assert SCRIPT in left.query_selector(".prompt").inner_text()
    response = left.query_selector(".response").text_content()
    assert response == f"{SCRIPT}{IMAGE}\\u001b[2J\\u0000\\u202e<b>bold</b>↵\n"
    assert right.query_selector(".response").text_content() == response.replace("↵", "")  # not token by token
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


def test_colours_follow_the_value_that_was_chosen(report: Any) -> None:
    """Red, green, blue and how much of them, behind each token of the first response."""
    blue, orange, pink, sky = "0, 114, 178", "213, 94, 0", "204, 121, 167", "86, 180, 233"
    expected = {
        "": [("", 0)] * 4,
        "entropy": [(pink, 0.043), (pink, 0.085), (pink, 0.128), (pink, 0.638)],  # of 2 nats
        "probability": [(orange, 0.081), (orange, 0.334), (orange, 0.735), (orange, 0.834)],  # of another token
        "ratio": [(blue, 0.85), (blue, 0), (orange, 0.298), (orange, 0.85)],  # log 1.4 and log 0.5 are off the scale
        "advantage": [(blue, 0.567)] * 4,
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
    report.click("#runs input >> nth=0")
    assert len(columns(report)) == 1


def test_watching_runs_with_turns_of_an_environment(open_page: Open, tmp_path: Path) -> None:
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
        log_metrics(run, 7)
        write_rollouts(run, 7)
        until(page, "document.querySelectorAll('.chart')[0].data[0].y.at(-1) === 0.7")
        until(page, "document.querySelector('.where select').value === '7'")
        page.click(".where button >> nth=0")
        until(page, "document.querySelector('.where select').value === '5'")
        page.wait_for_selector(".response .token")
