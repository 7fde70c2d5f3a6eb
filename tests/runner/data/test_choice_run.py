"""A whole run on questions with choices: read, asked, judged by two parts, trained on, evaluated and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY, make_completion, save_model, write_rows
from small import Dapo, Notes, config_in

from dapo_runner.data.dataset import load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.run.tiny_model import make_model
from dapo_runner.train import train

ROWS: list[dict[str, Any]] = [
    {"question": "Which is a metal?", "choices": ["wood", "iron", "glass"], "answer": 1, "subject": "a"},
    {"question": "Which is a star?", "choices": ["Mars", "the Moon", "Vega"], "answer": 2, "subject": "b"},
]
RIGHT = {"Which is a metal?": "Answer: B", "Which is a star?": "Answer: C"}
REWARD = """
def vowels(prompts, completions, rows):
    return [len(set(completion.text) & set("aeiou")) + completion.length / 100 for completion in completions]
"""


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads and writes bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"
    torch.manual_seed(0)
    return save_model(make_model(TINY, tokenizer, max_positions=512), tokenizer, tmp_path_factory.mktemp("bytes"))


def test_a_run_on_choices(byte_model: Path, tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_vowels.py").write_text(REWARD)
    columns = {"prompt": "question", "answer": "answer", "choices": "choices", "source": "subject"}
    path = str(write_rows(tmp_path / "d.parquet", ROWS))
    config = config_in(
        tmp_path,
        byte_model,
        run={"steps": 1},
        data={"format": "auto", "path": path, "eval_size": 1, "template": None, "columns": columns},
        rollout={"max_prompt_tokens": 400},
        sampler={"prompts_per_step": 2, "max_rounds": 8},
        reward={"parts": [{"use": "choice"}, {"use": "of_vowels:vowels", "weight": 0.5}]},
        optimizer={"token_budget": 512},
    )
    folder = train(config, Notes())
    before, step, after = read_log(folder / "metrics.jsonl")
    assert step["train/updates"] == 1
    assert step["reward/vowels_std"] > 0
    assert {"eval/reward_choice", "eval/reward_vowels", "eval/cons@2"} <= before.keys() & after.keys()
    shown = json.loads(dapo("show", folder, "--eval", "--step", 1, "--json"))
    assert [sample["parts"].keys() >= {"choice", "vowels"} for sample in shown["samples"]] == [True, True]
    dataset = load_data(config, load_tokenizer(byte_model, config.model))
    prompts = [*dataset.train, *dataset.heldout]
    right = [[make_completion(text=RIGHT[prompt.row["question"]])] for prompt in prompts]
    assert [group.n_correct for group in Scorer(config)(prompts, right)] == [1, 1]
    assert [group.n_correct for group in Scorer(config)(prompts, right[::-1])] == [0, 0]
