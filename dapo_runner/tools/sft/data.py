"""Examples to imitate, of any prompt/completion or chat data, and of what a judge said, tokenized.

Prompt and completion are tokenized apart, as a policy sees its own responses, and an end-of-sequence token follows the
completion. Of a conversation the last message trains.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dapo_runner.config import ConfigError, SftColumnsConfig, SftConfig, SftDataConfig
from dapo_runner.data.dataset import render
from dapo_runner.data.reading import as_messages, get_column, read_rows, shorten
from dapo_runner.rewards.judge_model import special_tokens
from dapo_runner.rewards.shield import Shield, conversation_of
from dapo_runner.rewards.verdicts import Judgement, Question
from dapo_runner.types import Prompt, Sequence

VERDICT_COLUMNS = {*Question._fields, *Judgement._fields}
Turns = tuple[tuple[str, str], ...]


class Pair(NamedTuple):
    prompt: Turns
    completion: str


class ExampleReport(Counter[str]):
    """Where the rows went: ``rows`` = the sum of everything else."""

    def describe(self) -> str:
        dropped = [f"{count} {what}" for what, count in self.items() if count and what not in ("rows", TRAIN, HELDOUT)]
        return f"{self['rows']} rows → {self[TRAIN]} training and {self[HELDOUT]} held-out examples" + (
            f"; dropped {', '.join(dropped)}" if dropped else ""
        )


TRAIN, HELDOUT = "train", "heldout"
NO_VERDICT, IN_HELDOUT, TOO_LONG, BEYOND_SIZE = (
    "without a verdict",
    "with a held-out prompt",
    "longer than data.max_tokens",
    "held-out rows past data.eval_size",
)


@dataclass(frozen=True, slots=True)
class Examples:
    """``train`` and ``heldout`` are walked over as prompts; ``sequences`` has, by their ids, what trains."""

    train: list[Prompt]
    heldout: list[Prompt]
    sequences: dict[str, Sequence]
    report: ExampleReport = field(default_factory=ExampleReport)


def load_examples(config: SftConfig, tokenizer: Any) -> Examples:
    """Read and tokenize the examples. Raises ConfigError naming the file, the row and what was expected."""
    data, report = config.data, ExampleReport(dict.fromkeys(("rows", NO_VERDICT, IN_HELDOUT, TOO_LONG, BEYOND_SIZE), 0))
    shield = Shield(data.judge.template, special_tokens(tokenizer))
    train = list(_read(data.path, data, shield, report, data.limit))
    if data.eval_path is None:
        heldout = _cut_heldout(train, data.eval_size)
        report[IN_HELDOUT] -= len(heldout)
    else:
        heldout = list(_read(data.eval_path, data, shield, report))
        report[BEYOND_SIZE] = max(0, len(heldout) - data.eval_size)
        heldout = heldout[: data.eval_size]
    held = {pair.prompt for pair in heldout}
    kept = [pair for pair in train if pair.prompt not in held]
    report[IN_HELDOUT] += len(train) - len(kept)
    examples = Examples([], [], {}, report)
    for pairs, prompts in ((kept, examples.train), (heldout, examples.heldout)):
        _tokenize(pairs, prompts, examples, tokenizer, data)
    report[TRAIN], report[HELDOUT] = len(examples.train), len(examples.heldout)
    if not examples.train:
        raise ConfigError(f"data: no training example is left: {report.describe()}")
    return examples


def _cut_heldout(pairs: list[Pair], size: int) -> list[Pair]:
    """Choose held-out pairs, the same for every seed."""
    if size >= len(pairs) > 0:
        raise ConfigError(
            f"data.eval_size: expected fewer than the {len(pairs)} examples of the training file, got {size}; lower "
            "it, or name an eval_path"
        )
    return random.Random("held-out").sample(pairs, size if pairs else 0)


def _read(
    path: Path, data: SftDataConfig, shield: Shield, report: ExampleReport, limit: int | None = None
) -> Iterator[Pair]:
    for number, row in enumerate(islice(read_rows(path, data.subset, data.split), limit), start=1):
        report["rows"] += 1
        try:
            pair = _pair(row, data, shield)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, row {number}: expected data.columns to fit ({type(error).__name__}: {error}), got "
                f"{shorten(row)}"
            ) from error
        if pair is None:
            report[NO_VERDICT] += 1
        else:
            yield pair


def _pair(row: Mapping[str, Any], data: SftDataConfig, shield: Shield) -> Pair | None:
    """Return a row's pair, None where a judge gave no verdict. Raises KeyError, TypeError, ValueError."""
    columns = data.columns or _columns_of(row)
    if columns is None:
        if row["verdict"] is None:
            return None
        asked = conversation_of(data.judge, Question(row["problem"], row["reference"], row["response"]), shield)
        turns: list[tuple[str, str]] = as_messages(asked)
        said = str(row["verdict"])
    else:
        turns = as_messages(get_column(row, columns.messages or columns.prompt))
        if columns.messages is None:
            completion = get_column(row, columns.completion)
            turns += [("assistant", completion)] if isinstance(completion, str) else as_messages(completion)
        (role, said) = turns.pop()
        if role != "assistant" or not turns:
            raise ValueError(f"the last message must be the assistant's, after others, it is of {role}")
    if data.system is not None and turns[0][0] != "system":
        turns.insert(0, ("system", data.system))
    return Pair(tuple(turns), said)


def _columns_of(row: Mapping[str, Any]) -> SftColumnsConfig | None:
    """Return the columns of a row with common names, None for a judge's verdicts. Raises ValueError."""
    if "messages" in row:
        return SftColumnsConfig(messages="messages")
    if {"prompt", "completion"} <= row.keys():
        return SftColumnsConfig()
    if row.keys() >= VERDICT_COLUMNS:
        return None
    raise ValueError(
        "the columns prompt and completion, messages, or those of verdicts.jsonl; data.columns names others"
    )


def _tokenize(
    pairs: list[Pair], prompts: list[Prompt], examples: Examples, tokenizer: Any, data: SftDataConfig
) -> None:
    chat = bool(tokenizer.chat_template) and data.chat_template != "never"
    if data.chat_template == "always" and not chat:
        raise ConfigError("data.chat_template: expected a tokenizer with a chat template for 'always', it has none")
    texts = [render(pair.prompt, tokenizer, chat, **data.chat_template_kwargs) for pair in pairs]
    # A chat template writes its own special tokens; adding them again would double the first one.
    asked = tokenizer(texts, add_special_tokens=not chat)["input_ids"] if texts else []
    said = tokenizer([pair.completion for pair in pairs], add_special_tokens=False)["input_ids"] if pairs else []
    for pair, text, before, after in zip(pairs, texts, asked, said, strict=True):
        length = len(before) + len(after) + 1
        if length > data.max_tokens:
            examples.report[TOO_LONG] += 1
            continue
        name = hashlib.sha256(f"{text}\0{pair.completion}".encode("utf-8", "backslashreplace")).hexdigest()[:16]
        mask = torch.arange(length) >= len(before)
        token_ids = torch.tensor([*before, *after, tokenizer.eos_token_id])
        examples.sequences[name] = Sequence(token_ids, mask.float(), mask, torch.zeros(length), group_id=0)
        prompts.append(Prompt(name, tuple(before), text, pair.completion))
