"""`dapo show`: what a person reads of a step."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_prompt, make_sample
from rich.console import Console

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.cli import main
from dapo_runner.config import AdvantageConfig, RolloutLogConfig, SegmentsConfig
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS, RolloutLog
from dapo_runner.logging.show import load_step, page, printable
from dapo_runner.types import Group, Sample, Segment


def answering(sample: Sample, text: str) -> Sample:
    return replace(sample, completion=replace(sample.completion, text=text))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of three groups, two of which are kept."""
    samples = (
        answering(make_sample(True, extracted="7"), "Wait, no. [bold]3+4[/bold]\nAnswer: 7"),
        answering(make_sample(False, truncated=True, penalty=-0.5, trains=False), "\x1b]0;title\x07等等，\u202e"),
    )
    groups = [Group(make_prompt(name, answer="7"), samples) for name in ("first", "second", "third")]
    log = RolloutLog(tmp_path / ROLLOUTS, RolloutLogConfig(groups=2), keep_through=-1)
    for step in (3, 4):
        log.write(step, groups, make_sequences(groups, AdvantageConfig()))
    return tmp_path


def test_a_step_is_shown_with_rewards_and_advantages(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--step", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"step 3: 2 of 3 .* 4 reflection phrases in 4 responses", out)
    assert "step 3 · group 1 of 3 · 1 of 2 correct\ntest first · expected 7\nfirst\n" in out
    assert "sample 1 correct · reward +1 = answer +1 + length +0 · advantage +0.707 · 4 tokens · extracted 7" in out
    assert "sample 2 incorrect · reward -1.5 = answer -1 + length -0.5 · advantage -0.707 · 4 tokens, truncated" in out
    assert "extracted None (answer-line) · does not train" in out
    assert "Wait, no. [bold]3+4[/bold]\nAnswer: 7" in out  # markup of a response is text
    assert "\\x1b]0;title\\x07等等，\\u202e" in out  # and its control characters do nothing
    assert "third" not in out


def test_segments_are_shown_with_the_values_at_their_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = AdvantageConfig(segments=SegmentsConfig(kind="chain"))
    segments = (Segment(3, 0.25, 0.75, 0.5), Segment(1, 0.75, 0.75, 0.0, trains=False))
    groups = [Group(make_prompt(), (replace(make_sample(True), segments=segments),))]
    log = RolloutLog(tmp_path / ROLLOUTS, RolloutLogConfig(), keep_through=-1)
    log.write(1, groups, make_sequences(groups, config))
    assert main(["show", str(tmp_path), "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "length +0 · segments +0.25 → +0.75 over 3, (+0.75 → +0.75 over 1) · 4 tokens" in out


def test_one_group_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--step", "4", "--group", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 4 · group 2 of 3" in out
    assert "first" not in out
    assert main(["show", str(run), "--step", "4", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records == load_step(run, 4).groups
    assert main(["show", str(run), "--step", "4", "--group", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == records[1]


def test_without_a_step_there_is_a_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    assert capsys.readouterr().out.split() == ["steps:", "3", "4"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--step", "5"], ["--step", "3", "4", "5"]),
        (["--step", "3", "--group", "3"], ["--group", "1", "2", "3"]),
        (["--step", "3", "--group", "0"], ["--group", "0"]),
        (["--group", "1"], ["--step"]),
        (["now"], ["'now'"]),
    ],
)
def test_a_mistake_is_named(
    run: Path, arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == []


class Keyboard(Console):
    """A terminal at which keys are pressed."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
        self.keys = keys

    def input(self, *_: object, **__: object) -> str:
        return self.keys.pop(0)


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        (["", ""], ["1", "2"]),  # past the last one ends it
        (["q"], ["1"]),
        (["", "p", "q"], ["1", "2", "1"]),
        (["2", "1", "99", "q"], ["1", "2", "1", "2"]),
        (["p", "q"], ["1", "1"]),
    ],
)
def test_a_terminal_pages_by_group(run: Path, keys: list[str], groups: list[str]) -> None:
    console = Keyboard(keys)
    page(load_step(run, 3), console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split("group ")[1][0] for line in out.splitlines() if "· group" in line] == groups
    assert keys == []


def test_printable_keeps_what_is_text() -> None:
    assert printable("a\tb\n等 é 𝔸") == "a\tb\n等 é 𝔸"
    assert printable("\r\x00\x9b\x7f\ud800") == "\\r\\x00\\x9b\\x7f\\ud800"


def test_answers_to_held_out_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = replace(answering(make_sample(True, extracted="7"), "Answer: 7"), parts={"dapo": 1.0, "brief": 0.25})
    prompt = replace(make_prompt("p", answer="7"), eval_set="exam")
    log = RolloutLog(tmp_path / EVALUATIONS, RolloutLogConfig(groups=None), keep_through=-1)
    for step in (0, 5):
        log.write(step, [Group(prompt, (sample,))])
    assert main(["show", str(tmp_path), "--eval"]) == 0
    assert capsys.readouterr().out.split() == ["steps:", "0", "5"]
    assert main(["show", str(tmp_path), "--eval", "--step", "5"]) == 0
    out = capsys.readouterr().out
    assert "exam test p · expected 7" in out
    assert "reward +1 = answer +1 (dapo +1, brief +0.25) + length +0 · 4 tokens · extracted 7" in out
    assert main(["show", str(tmp_path), "--step", "5"]) == 2
    assert "logging.rollouts.groups" in capsys.readouterr().err
