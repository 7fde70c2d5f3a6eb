"""Data sets without a format of their own, each through a whole run: read, asked, judged, trained on, evaluated and
shown. Rows of HumanEval (MIT), shortened; the others are made up in the schemas of the hub's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY, save_model, write_rows
from small import Notes, config_in

from dapo_runner.cli import main
from dapo_runner.data.dataset import load_data
from dapo_runner.logging.metrics import read_log
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.run.tiny_model import make_model
from dapo_runner.train import train
from dapo_runner.types import Completion

# Each row with a response that is right, the columns and the rule.
SETS: dict[str, tuple[list[dict[str, Any]], list[str], dict[str, str], str | None]] = {
    "chat": (
        [
            {"messages": [{"role": role, "content": "Be brief."} for role in ("system", "user")]},
            {"messages": [{"role": role, "content": "Hello!"} for role in ("user", "assistant", "user")]},
        ],
        [],
        {"prompt": "messages"},
        None,
    ),
    "choice": (
        [
            {"question": "Which is a metal?", "choices": ["wood", "iron", "glass"], "answer": 1, "subject": "a"},
            {"question": "Which is a star?", "choices": ["Mars", "the Moon", "Vega"], "answer": 2, "subject": "b"},
        ],
        ["Answer: B", "Answer: C"],
        {"prompt": "question", "answer": "answer", "choices": "choices", "source": "subject"},
        "choice",
    ),
    "code": (
        [
            {
                "prompt": 'def strlen(string: str) -> int:\n    """ Return length of given string"""\n',
                "tests": "def check(candidate):\n    assert candidate('x') == 1\ncheck(strlen)",
            },
            {
                "prompt": 'def unique(l: list):\n    """Return sorted unique elements in a list"""\n',
                "tests": "def check(candidate):\n    assert candidate([5, 3, 5]) == [3, 5]\ncheck(unique)",
            },
        ],
        ["def strlen(s): return len(s)", "```python\ndef unique(l): return sorted(set(l))\n```"],
        {"prompt": "prompt", "answer": "tests"},
        "code",
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
    return save_model(make_model(TINY, tokenizer, max_positions=512), tokenizer, tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("name", SETS)
def test_a_run_on(
    name: str, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, right, columns, rule = SETS[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_vowels.py").write_text(REWARD)
    path = write_rows(tmp_path / ("d.parquet" if name == "choice" else "d.jsonl"), rows)
    data = {"format": "auto", "path": str(path), "eval_size": 1, "template": None, "columns": columns or None}
    parts = [*([{"use": rule}] if rule else []), {"use": "of_vowels:vowels", "weight": 0.5}]
    config = config_in(
        tmp_path,
        byte_model,
        run={"steps": 1, "name": name},
        data=data,
        rollout={"max_prompt_tokens": 400},
        sampler={"prompts_per_step": 2, "max_rounds": 8},
        reward={"parts": parts},
        optimizer={"token_budget": 512},
    )

    folder = train(config, Notes())
    before, step, after = read_log(folder / "metrics.jsonl")
    assert step["train/updates"] == 1
    assert step["reward/vowels_std"] > 0
    assert {"eval/reward", "eval/reward_vowels"} <= before.keys() & after.keys()
    assert ("eval/cons@2" in after) == (rule not in ("code", None))
    assert main(["show", str(folder), "--eval", "--step", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["samples"]) == 2
    assert "vowels" in shown["samples"][0]["parts"]

    dataset = load_data(config, load_tokenizer(byte_model, config.model))
    prompts = [*dataset.train, *dataset.heldout]
    assert all(prompt.row in rows and prompt.text.startswith("<") for prompt in prompts)
    if right:
        prompts.sort(key=lambda prompt: rows.index(dict(prompt.row)))
        responses = [[Completion(torch.zeros(1), torch.zeros(1), "stop", text)] for text in right]
        assert [group.n_correct for group in Scorer(config)(prompts, responses)] == [1, 1]
        assert [group.n_correct for group in Scorer(config)(prompts, responses[::-1])] == [0, 0]
