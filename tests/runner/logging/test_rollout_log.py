"""Rollouts on the disk: what is kept, what goes, and that it is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_group, make_prompt, make_sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import AdvantageConfig, RolloutLogConfig
from dapo_runner.logging.rollout_log import RolloutLog, read_step, saved_steps, token_texts
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import Group

GROUPS = [make_group("RWW", "a"), make_group("RRWW", "b"), make_group("RT", "c")]


def write(log: RolloutLog, step: int, groups: list[Group] | None = None) -> None:
    chosen = GROUPS if groups is None else groups
    log.write(step, chosen, make_sequences(chosen, AdvantageConfig(kind="group_mean")))


def open_log(folder: Path, keep_through: int = -1, **settings: object) -> RolloutLog:
    return RolloutLog(folder, RolloutLogConfig.model_validate(settings), keep_through=keep_through)


def test_everything_about_a_sample_comes_back(tmp_path: Path) -> None:
    sample = make_sample(True, length=4, extracted="7", penalty=-0.25, trains=False)
    sample = replace(sample, completion=replace(sample.completion, text="一\n\x1b[31m2"))
    write(open_log(tmp_path / "r"), 12, [Group(make_prompt("p", answer="7"), (sample, make_sample(False)))])
    saved = read_step(saved_steps(tmp_path / "r")[12])
    assert (saved.step, saved.n_groups) == (12, 1)
    (group,) = saved.groups
    assert group["prompt"] == {"id": "p", "source": "test", "eval_set": "", "text": "p", "answer": "7"}
    assert group["samples"][0] == {
        "sample": 1, "response": "一\n\x1b[31m2", "tokens": 4, "finish_reason": "stop", "correct": True,
        "extracted": "7", "rule": "answer-line", "base_reward": 1.0, "length_penalty": -0.25, "reward": 0.75,
        "advantage": 0.875, "trains": False, "mean_logprob": -(1 + 2 + 3 + 4) / 8 / 4,
    }  # fmt: skip


def test_only_so_many_groups_are_kept_and_the_header_counts_all(tmp_path: Path) -> None:
    write(open_log(tmp_path / "two", groups=2), 1)
    saved = read_step(saved_steps(tmp_path / "two")[1])
    assert (saved.step, saved.n_groups) == (1, 3)
    assert [group["prompt"]["id"] for group in saved.groups] == ["a", "b"]
    write(open_log(tmp_path / "all", groups=None), 1)
    assert len(read_step(saved_steps(tmp_path / "all")[1]).groups) == 3
    write(open_log(tmp_path / "none", groups=0), 1)
    write(open_log(tmp_path / "empty"), 1, [])
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "empty").exists()


def test_the_oldest_steps_are_removed_and_that_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(open_log(tmp_path / "one"), 1)
    size = saved_steps(tmp_path / "one")[1].stat().st_size
    folder = tmp_path / "rollouts"
    log = open_log(folder)
    log.most_bytes = int(3.5 * size)
    for step in range(1, 8):
        write(log, step)
        assert (capsys.readouterr().out != "") == (step == 4)
    assert list(saved_steps(folder)) == [5, 6, 7]
    again = open_log(folder, keep_through=6)  # the files of the first attempt count as well
    again.most_bytes = size // 2  # a step larger than the limit is still kept
    assert list(saved_steps(folder)) == [5, 6]
    write(again, 7)
    assert list(saved_steps(folder)) == [7]


def test_the_same_steps_give_the_same_bytes_and_half_a_file_is_none(tmp_path: Path) -> None:
    write(open_log(tmp_path / "a"), 3)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step_000003.jsonl.gz.unfinished").write_bytes(b"torn")
    assert saved_steps(tmp_path / "b") == {}
    write(open_log(tmp_path / "b"), 3)
    assert saved_steps(tmp_path / "a")[3].read_bytes() == saved_steps(tmp_path / "b")[3].read_bytes()


def test_what_json_does_not_know_is_null(tmp_path: Path) -> None:
    sample = replace(make_sample(True, length=1), base_reward=math.inf)
    write(open_log(tmp_path), 1, [Group(make_prompt(), (sample, make_sample(False)))])
    saved = read_step(saved_steps(tmp_path)[1])
    assert [saved.groups[0]["samples"][0][key] for key in ("reward", "advantage")] == [None, None]
    json.dumps(saved.groups, allow_nan=False)


def test_tokens_are_kept_where_asked_for(tmp_path: Path) -> None:
    """Three prompt tokens, four of the response; the second sample was left out of the loss and has no values."""
    group = Group(make_prompt(n_tokens=3), (make_sample(True), make_sample(False, trains=False)))
    sequences = make_sequences([group], AdvantageConfig(kind="group_mean"))
    values = TokenValues(
        logprobs=torch.tensor([0, 0, -0.123456, -1, math.nan, -3]),
        entropy=torch.tensor([0, 0, 0.5, 0.25, 1, 2]),
        ratio=torch.tensor([0, 0, 1, 1.5, 0.5, 100]),
        clip_hit=torch.tensor([0, 0, 0, 2, 1, 3], dtype=torch.int8),
        high_entropy=torch.tensor([0, 0, 0, 0, 0, 1]).bool(),
        selected=None,
    )
    log = RolloutLog(tmp_path, RolloutLogConfig(), keep_through=-1, tokenizer=make_tokenizer())
    log.write(1, [group], sequences, {0: values})
    first, second = (sample["per_token"] for sample in read_step(saved_steps(tmp_path)[1]).groups[0]["samples"])
    of_engine = {"text": list("6789"), "engine_logprob": [-0.125, -0.25, -0.375, -0.5]}
    assert first == {
        **of_engine, "advantage": [1, 1, 1, 1], "trains": [True] * 4, "logprob": [-0.1235, -1, None, -3],
        "entropy": [0.5, 0.25, 1, 2], "ratio": [1, 1.5, 0.5, 100], "clip": [None, "high", "low", "dual"],
        "high_entropy": [False, False, False, True],
    }  # fmt: skip
    assert second == {**of_engine, "advantage": [-1, -1, -1, -1], "trains": [False] * 4}


def byte_level() -> Any:
    """Every byte is a token, as a rare character is in the vocabularies of large models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["plain", "é 等 😀!", "\x1b[31m\n", "😀"])
def test_a_character_of_several_tokens_stands_with_its_last(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_half_a_character_takes_nothing_with_it() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("😀")
    assert token_texts(tokenizer, [*ids[:2], *tokenizer.encode("abcd")])[-3:] == ["b", "c", "d"]
    assert token_texts(tokenizer, ids[:3]) == [""] * 3  # a response that was cut


def test_spaces_before_words_and_special_tokens_are_kept() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁to": 0, "▁be": 1, "ing": 2}, unk_token="ing"))
    tokenizer.decoder = decoders.Metaspace()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [0, 1, 2]) == ["to", " be", "ing"]
    tiny = make_tokenizer()
    assert token_texts(tiny, [*tiny.encode("Answer: 7"), 1]) == ["Answer: ", "7", "<eos>"]


def test_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    write(open_log(tmp_path), 1, [Group(make_prompt(answer="\ud800"), (make_sample(True), make_sample(False)))])
    assert read_step(saved_steps(tmp_path)[1]).groups[0]["prompt"]["answer"] == "\ud800"
