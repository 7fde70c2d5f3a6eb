"""Rollouts on the disk, and what `dapo show` prints of them."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_group, make_prompt, make_sample
from rich.console import Console
from small import Dapo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import AdvantageConfig, ConfigError, RolloutLogConfig, SegmentsConfig
from dapo_runner.logging.metrics import METRICS_FILE, MetricsLog, batch_metrics
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS, RolloutLog, read_step, saved_steps, token_texts
from dapo_runner.logging.show import load_step, page, printable
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import Group, Sample, Segment, Turn

GROUPS = [make_group("RWW", "a"), make_group("RRWW", "b"), make_group("RT", "c")]
GROUP_MEAN = AdvantageConfig(kind="group_mean")


def open_log(folder: Path, keep_through: int = -1, tokenizer: Any = None, **settings: object) -> RolloutLog:
    return RolloutLog(folder, RolloutLogConfig.model_validate(settings), keep_through, tokenizer=tokenizer)


def write(log: RolloutLog, step: int, groups: list[Group], config: AdvantageConfig = GROUP_MEAN, **more: Any) -> None:
    log.write(step, groups, make_sequences(groups, config), **more)


def answering(sample: Sample, text: str) -> Sample:
    return replace(sample, completion=replace(sample.completion, text=text))


# The files


def test_everything_about_a_sample_comes_back(tmp_path: Path) -> None:
    sample = answering(make_sample(True, length=4, extracted="7", penalty=-0.25, trains=False), "一\n\x1b[31m2")
    broken = replace(make_sample(False, length=1), base_reward=math.inf)
    groups = [Group(make_prompt("p", answer="7"), (sample, make_sample(False)))]
    groups.append(Group(make_prompt("q", answer="\ud800"), (broken, make_sample(False))))
    write(open_log(tmp_path), 12, groups)
    saved = read_step(saved_steps(tmp_path)[12])
    assert (saved.step, saved.n_groups) == (12, 2)
    first, second = saved.groups
    assert first["prompt"] == {"id": "p", "source": "test", "eval_set": "", "text": "p", "answer": "7"}
    assert first["samples"][0] == {
        "sample": 1, "response": "一\n\x1b[31m2", "tokens": 4, "finish_reason": "stop", "correct": True,
        "extracted": "7", "rule": "answer-line", "base_reward": 1.0, "length_penalty": -0.25, "reward": 0.75,
        "advantage": 0.875, "trains": False, "mean_logprob": -(1 + 2 + 3 + 4) / 8 / 4,
    }  # fmt: skip
    assert second["prompt"]["answer"] == "\ud800"  # half a surrogate pair
    assert [second["samples"][0][key] for key in ("reward", "advantage")] == [None, None]  # not finite
    json.dumps(saved.groups, allow_nan=False)
    write(open_log(tmp_path / "none", groups=0), 12, groups)
    assert not (tmp_path / "none").exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(open_log(tmp_path), 1, GROUPS)
    (path,) = saved_steps(tmp_path).values()
    whole = path.read_bytes()
    flipped = bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]])
    for content in (b"", whole[:-20], b"x" + whole, flipped, gzip.compress(b"{}\n")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=path.name):
            read_step(path)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{path.name}: .* got an error: \[Errno 2\]"):
        read_step(path)


def test_steps_that_are_not_kept_are_removed(tmp_path: Path) -> None:
    for step in range(1, 5):
        write(open_log(tmp_path, keep_through=step - 1), step, GROUPS)
    (tmp_path / "step_000009.jsonl.gz.unfinished").write_bytes(b"")  # what a kill leaves
    assert list(saved_steps(tmp_path)) == [1, 2, 3, 4]
    open_log(tmp_path, keep_through=2)
    assert list(saved_steps(tmp_path)) == [1, 2]


def test_values_per_token_are_saved(tmp_path: Path) -> None:
    """Three prompt tokens, four of the response; the second sample was left out of the loss and has no values."""
    group = Group(make_prompt(n_tokens=3), (make_sample(True), make_sample(False, trains=False)))
    values = TokenValues(
        logprobs=torch.tensor([0, 0, -0.123456, -1, math.nan, -3]),
        entropy=torch.tensor([0, 0, 0.5, 0.25, 1, 2]),
        ratio=torch.tensor([0, 0, 1, 1.5, 0.5, 100]),
        clip_hit=torch.tensor([0, 0, 0, 2, 1, 3], dtype=torch.int8),
        high_entropy=torch.tensor([0, 0, 0, 0, 0, 1]).bool(),
        selected=torch.tensor([0, 0, 1, 0, 1, 0]).bool(),
    )
    write(open_log(tmp_path, tokenizer=make_tokenizer()), 1, [group], values={0: values})
    first, second = (sample["per_token"] for sample in read_step(saved_steps(tmp_path)[1]).groups[0]["samples"])
    of_engine = {"text": list("6789"), "engine_logprob": [-0.125, -0.25, -0.375, -0.5]}
    assert first == {
        **of_engine, "advantage": [1, 1, 1, 1], "trains": [True] * 4, "logprob": [-0.1235, -1, None, -3],
        "entropy": [0.5, 0.25, 1, 2], "ratio": [1, 1.5, 0.5, 100], "clip": [None, "high", "low", "dual"],
        "high_entropy": [False, False, False, True], "selected": [True, False, True, False],
    }  # fmt: skip
    assert second == {**of_engine, "advantage": [-1, -1, -1, -1], "trains": [False] * 4}


def test_tokens_have_their_text_and_a_character_of_several_stands_with_its_last() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # every byte is a token, as for rare characters
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    of_bytes = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for text in ("plain", "é 等 😀!", "\x1b[31m\n", "😀"):
        pieces = token_texts(of_bytes, of_bytes.encode(text))
        assert (len(pieces), "".join(pieces)) == (len(text.encode()), text)
        assert all(len(piece) <= 1 for piece in pieces)
    half = of_bytes.encode("😀")[:3]
    assert token_texts(of_bytes, half) == [""] * 3  # a response that was cut
    assert token_texts(of_bytes, [*half[:2], *of_bytes.encode("abcd")])[-3:] == ["b", "c", "d"]
    words = Tokenizer(models.WordLevel({"▁to": 0, "▁be": 1, "ing": 2}, unk_token="ing"))
    words.decoder = decoders.Metaspace()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=words), [0, 1, 2]) == ["to", " be", "ing"]
    tiny = make_tokenizer()
    assert token_texts(tiny, [*tiny.encode("Answer: 7"), 1]) == ["Answer: ", "7", "<eos>"]


def test_texts_of_tokens_go_on_behind_bytes_of_no_character() -> None:
    """With a sentencepiece tokenizer, whose stream of tokens raises there."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"ok": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    pieces = token_texts(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [*b"\n\xe4", 256, *"é".encode(), 256])
    assert pieces == ["\n", "", "ok", "", "é", "ok"]


def test_a_tokenizer_in_python_gives_the_text_of_each_token() -> None:
    tokenizer = ByT5Tokenizer()
    assert token_texts(tokenizer, [*tokenizer.encode("ok\n")]) == ["o", "k", "\n", "</s>"]


# `dapo show`


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of three groups, two of which are saved, and an evaluation."""
    samples = (
        answering(make_sample(True, extracted="7"), "Wait, no. [bold]3+4[/bold]\nAnswer: 7"),
        answering(make_sample(False, truncated=True, penalty=-0.5, trains=False), "\x1b]0;title\x07等等，\u202e\ud800"),
    )
    groups = [Group(make_prompt(name, answer="7"), samples) for name in ("first", "second", "third")]
    log = open_log(tmp_path / ROLLOUTS, groups=2)
    for step in (3, 4):
        write(log, step, groups, AdvantageConfig())
    sample = replace(answering(make_sample(True, extracted="7"), "Answer: 7"), parts={"dapo": 1.0, "brief": 0.25})
    prompt = replace(make_prompt("p", answer="7"), eval_set="exam")
    open_log(tmp_path / EVALUATIONS, groups=None).write(5, [Group(prompt, (sample,))])
    return tmp_path


SHOWN = {
    "--step 3": [
        "step 3: 2 of 3",
        " 4 reflection phrases in 4 ",
        "step 3 · group 1 of 3 · 1 of 2 correct\ntest first · expected 7\nfirst\n",
        "sample 1 correct · reward +1 = answer +1 + length penalty +0 · advantage +0.707 · 4 tokens · extracted 7",
        "sample 2 incorrect · reward -1.5 = answer -1 + length penalty -0.5 · advantage -0.707 · 4 tokens, truncated",
        "4 tokens, truncated · rule answer-line · does not train",
        "Wait, no. [bold]3+4[/bold]\nAnswer: 7",  # markup of a response is text
        "\\x1b]0;title\\x07等等，\\u202e\\ud800",  # and its control characters do nothing
        "second",
    ],
    "--step 4 --group 2": ["step 4 · group 2 of 3"],
    "--eval --step 5": [
        "exam test p · expected 7",
        "answer +1 (unweighted: dapo +1, brief +0.25) + length penalty +0 · 4 tokens",
    ],
    "": ["3", "4"],
    "--eval": ["5"],
}


@pytest.mark.parametrize("arguments", SHOWN)
def test_what_is_saved_is_shown(run: Path, arguments: str, dapo: Dapo) -> None:
    out = dapo("show", run, *arguments.split())
    assert [part for part in SHOWN[arguments] if part not in out] == []
    assert "third" not in out
    assert "first" not in out or arguments == "--step 3"


def test_colours_make_no_terminal_of_a_file(run: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = dapo("show", run, "--step", "3")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = dapo("show", run, "--step", "3")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown != coloured  # all groups


def test_many_steps_are_counted(tmp_path: Path, dapo: Dapo) -> None:
    (tmp_path / ROLLOUTS).mkdir()
    for step in range(7, 107):
        (tmp_path / ROLLOUTS / f"step_{step:06d}.jsonl.gz").touch()
    assert dapo("show", tmp_path).split()[1:] == list(map(str, range(7, 107)))
    (tmp_path / ROLLOUTS / "step_020000.jsonl.gz").touch()
    assert re.findall(r"\d+", dapo("show", tmp_path)) == ["101", "7", "20000"]


def test_segments_and_turns_are_shown_with_their_values(tmp_path: Path, dapo: Dapo) -> None:
    segments = (Segment(3, 0.25, 0.75, 0.5), Segment(1, 0.75, 0.75, 0.0, trains=False))
    sample = replace(make_sample(True), segments=segments)
    turns = (Turn("environment", 0, 1, "Wait, no."), Turn("assistant", 1, 2, "Hold on. Wait!"))
    turns += (Turn("assistant", 2, 4, "b", "done", 0.5),)
    groups = [Group(make_prompt(answer=""), (replace(sample, completion=replace(sample.completion, turns=turns)),))]
    write(open_log(tmp_path / ROLLOUTS), 1, groups, AdvantageConfig(segments=SegmentsConfig(kind="chain")))
    out = dapo("show", tmp_path, "--step", "1")
    assert re.search(r"\+0\.25\D+0\.75\D+3\D+\(\+0\.75\D+0\.75\D+1\)", out)
    assert "environment 1, assistant 1, assistant 2 done +0.5" in out
    assert " 2 reflection phrases in 1 " in out
    assert batch_metrics(groups, 1)["reflection/en"] == 2
    assert "expected" not in out


def test_json_is_what_was_saved(run: Path, dapo: Dapo) -> None:
    records = [json.loads(line) for line in dapo("show", run, "--step", "4", "--json").splitlines()]
    assert records == load_step(run, 4).groups
    assert json.loads(dapo("show", run, "--step", "4", "--group", "2", "--json")) == records[1]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("RUN --step 5", ["--step", "3", "4", "5"]),
        ("RUN --step 0", ["--step", "--eval"]),
        ("RUN --step 3 --group 3", ["--group", "1", "2", "3"]),
        ("RUN --step 3 --group 0", ["--group", "0"]),
        ("RUN --group 1", ["--step"]),
        ("RUN now", ["'now'"]),
        ("RUN/nowhere", ["no such folder"]),
    ],
)
def test_a_mistake_is_named(run: Path, arguments: str, parts: list[str], dapo: Dapo) -> None:
    dapo("show", *arguments.replace("RUN", str(run)).split(), code=2)
    assert [part for part in parts if part not in dapo.err] == []


def test_a_run_without_rollouts_is_named(tmp_path: Path, dapo: Dapo) -> None:
    for kind in ("eval", "step"):  # no step has finished; one has
        MetricsLog(tmp_path / METRICS_FILE).write(1, kind, {})
        dapo("show", tmp_path, "--step", "1", code=2)
        assert ("logging.rollouts.groups" in dapo.err) == (kind == "step")


class Keyboard(Console):
    """A terminal at which keys are pressed."""

    def __init__(self, keys: list[str]) -> None:
        file = io.StringIO()
        file.isatty = lambda: True  # type: ignore[method-assign]
        super().__init__(file=file, width=200, color_system=None)
        self.keys = keys

    def input(self, *_: object, **__: object) -> str:
        if (key := self.keys.pop(0)) == "end of file":
            raise EOFError
        return key


@pytest.mark.parametrize(
    ("keys", "groups"),
    [(",", "12"), ("q", "1"), (",p,q", "121"), ("2,1,99,q", "1212"), ("p,q", "11"), ("end of file", "1")],
)
def test_a_terminal_pages_by_group(run: Path, keys: str, groups: str) -> None:
    console = Keyboard(keys.split(","))
    page(load_step(run, 3), console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split("group ")[1][0] for line in out.splitlines() if "· group" in line] == list(groups)
    assert console.keys == []


def test_printable_keeps_what_is_text() -> None:
    assert printable("a\tb\n等 é 𝔸") == "a\tb\n等 é 𝔸"
    assert printable("\r\x00\x9b\x7f\ud800") == "\\r\\x00\\x9b\\x7f\\ud800"
