"""Data sets of five kinds, each through a whole run: read, asked, judged, trained on, evaluated and shown.

Rows of GSM8K (MIT), DAPO-Math-17k (Apache-2.0) and HumanEval (MIT; shortened, its check called at the end of the
tests); those of the chat and the multiple-choice set are made up in the schemas of the hub's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY, save_model, write_rows
from small import small_recipe

from dapo_runner.cli import main
from dapo_runner.config import parse_config
from dapo_runner.data.dataset import load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.run.tiny_model import make_model
from dapo_runner.train import train
from dapo_runner.types import Completion

GSM8K = [
    {
        "question": "Twice Angie's age, plus 4, is 20. How old is Angie?",
        "answer": "Twice Angie's age is 20-4=<<20-4=16>>16.\nAngie is 16/2=<<16/2=8>>8.\n#### 8",
    },
    {
        "question": "Tim buys 3 dozen eggs.  Eggs cost $.50 each.  How much did he pay for eggs?",
        "answer": "He bought 3*12=<<3*12=36>>36 eggs\nSo they cost 36*.5=$<<36*.5=18>>18\n#### 18",
    },
]
DAPO = [
    {
        "data_source": "DAPO-17k",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"answer": "", "index": index, "split": "train"},
    }
    for content, truth, index in [
        (r"$\frac{2020}{6063}$", "8083", 13432),
        ("9^{2022} 的末三位数是__________.", "881", 12568),
    ]
]
CHAT = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]},
    {
        "messages": [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Good day."},
            {"role": "user", "content": "A word for rain?"},
        ]
    },
]
CHOICE = [
    {"question": "Which is a metal?", "choices": ["wood", "iron", "glass"], "answer": 1, "subject": "chemistry"},
    {"question": "Which is a star?", "choices": ["Mars", "the Moon", "Vega"], "answer": 2, "subject": "astronomy"},
]
CODE = [
    {
        "prompt": 'def strlen(string: str) -> int:\n    """ Return length of given string"""\n',
        "tests": "def check(candidate):\n    assert candidate('') == 0\n    assert candidate('x') == 1\ncheck(strlen)",
    },
    {
        "prompt": 'def unique(l: list):\n    """Return sorted unique elements in a list"""\n',
        "tests": "def check(candidate):\n    assert candidate([5, 3, 5]) == [3, 5]\ncheck(unique)",
    },
]
# Rows, the keys of `data`, the rule, and for each row a response that is right.
SETS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str | None, list[str]]] = {
    "gsm8k": (GSM8K, {}, "gsm8k", ["#### 8", "so #### 18"]),
    "dapo": (DAPO, {}, "dapo", ["Answer: 8083", "Answer: 881"]),
    "chat": (CHAT, {"columns": {"prompt": "messages"}}, None, []),
    "choice": (
        CHOICE,
        {"columns": {"prompt": "question", "answer": "answer", "choices": "choices", "source": "subject"}},
        "choice",
        ["Answer: B", "Answer: C"],
    ),
    "code": (
        CODE,
        {"columns": {"prompt": "prompt", "answer": "tests"}},
        "code",
        ["def strlen(s): return len(s)", "```python\ndef unique(l): return sorted(set(l))\n```"],
    ),
}
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
    return save_model(make_model(TINY, tokenizer, max_positions=1024), tokenizer, tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("name", SETS)
def test_a_run_on(
    name: str, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, data, rule, right = SETS[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_vowels.py").write_text(REWARD)
    path = write_rows(tmp_path / ("d.parquet" if name == "dapo" else "d.jsonl"), rows)
    raw = small_recipe(output_dir=str(tmp_path), steps=1, name=name)
    raw["model"] = {"path": str(byte_model), "dtype": "float32"}
    raw["data"] = {"path": str(path), "eval_size": 1, **data}
    raw["rollout"] |= {"max_prompt_tokens": 700}
    raw["sampler"] = {"prompts_per_step": 2}
    raw["optimizer"] |= {"token_budget": 800}
    raw["reward"]["parts"] = [*([{"use": rule}] if rule else []), {"use": "of_vowels:vowels", "weight": 0.5}]
    config = parse_config(raw)

    folder = train(config, Progress())
    before, step, after = read_log(folder / "metrics.jsonl")
    assert step["train/updates"] == 1
    assert step["reward/vowels_std"] > 0
    assert {"eval/reward", "eval/reward_vowels"} <= before.keys() & after.keys()
    assert ("eval/cons@2" in after) == (rule not in ("code", None))
    assert main(["show", str(folder), "--eval", "--step", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["samples"]) == 2
    assert "vowels" in shown["samples"][0]["parts"]

    from transformers import AutoTokenizer

    dataset = load_data(config, AutoTokenizer.from_pretrained(byte_model))
    prompts = [*dataset.train, *dataset.heldout]
    assert all(prompt.row in rows and prompt.text.startswith("<") for prompt in prompts)
    if rule is not None:
        prompts.sort(key=lambda prompt: rows.index(dict(prompt.row)))
        said = [[Completion(torch.zeros(1), torch.zeros(1), "stop", text)] for text in right]
        assert [group.n_correct for group in Scorer(config)(prompts, said)] == [1, 1]
        assert [group.n_correct for group in Scorer(config)(prompts, said[::-1])] == [0, 0]
