"""Load and tokenize examples: prompt/completion data, chat data, or the verdicts of a judge.

Prompt and completion are tokenized separately, as in rollouts. An end-of-sequence token follows the completion. In a
conversation only the last message trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dapo_runner.config.commands import SftColumnsConfig, SftConfig, SftDataConfig
from dapo_runner.data.dataset import IN_HELDOUT, DataReport, cut_heldout, tokenize, uses_chat_template
from dapo_runner.data.reading import as_messages, convert_rows, get_column
from dapo_runner.environments.template import common_length
from dapo_runner.errors import ConfigError
from dapo_runner.rewards.judge import Question, Questioner
from dapo_runner.rewards.judge_model import special_tokens
from dapo_runner.types import Prompt, TrainingSequence

VERDICT_COLUMNS = {*Question._fields, "verdict"}
Turns = tuple[tuple[str, str], ...]


class Pair(NamedTuple):
    prompt: Turns
    completion: str
    is_verdict: bool = False


class Examples(NamedTuple):
    """``train`` and ``heldout`` define the order of examples; ``sequences`` has their training records by prompt id."""

    train: list[Prompt]
    heldout: list[Prompt]
    sequences: dict[str, TrainingSequence]
    report: DataReport
    note: str | None  # what the chat template writes, if it is not what trains


def load_examples(config: SftConfig, tokenizer: Any) -> Examples:
    """Read and tokenize the examples. Raises ConfigError with the file, the row and what was expected."""
    data, report = config.data, DataReport()
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: requires a tokenizer with an EOS token, got that of {config.model.path}")
    questioner = Questioner(data.judge, special_tokens(tokenizer))

    def read(path: Path, split: str, limit: int | None = None) -> list[Pair]:
        rows = convert_rows(path, data.subset, split, lambda row: _pair(row, data, questioner))
        found = list(islice(rows, limit))
        pairs = [pair for pair in found if pair is not None]
        report.update({"rows": len(found), "without a verdict": len(found) - len(pairs)})
        return pairs

    train = read(data.path, data.split, data.limit)
    if data.eval_path is None:
        heldout = cut_heldout(train, data.eval_size, "data.eval_path")
        report[IN_HELDOUT] -= len(heldout)
    else:
        heldout = read(data.eval_path, data.eval_split, data.eval_size)
    held = {pair.prompt for pair in heldout}
    kept = [pair for pair in train if pair.prompt not in held]
    report[IN_HELDOUT] += len(train) - len(kept)
    forms = (_other_form(pair, tokenizer, data) for pair in kept[:100])
    examples = Examples([], [], {}, report, next(filter(None, forms), None))
    for pairs, prompts in ((kept, examples.train), (heldout, examples.heldout)):
        for _, alike in groupby(pairs, lambda pair: pair.is_verdict):
            _tokenize(list(alike), prompts, examples, tokenizer, data)
    report.update({"train": len(examples.train), "heldout": len(examples.heldout)})
    if not examples.train:
        raise ConfigError(f"data.path: expected training examples, got none: {report.describe('examples')}")
    return examples


def _pair(row: Mapping[str, Any], data: SftDataConfig, questioner: Questioner) -> Pair | None:
    """Return a row's pair, None for a row without a verdict. Raises KeyError, TypeError, ValueError."""
    columns = data.columns or _columns_of(row)
    if columns is None:
        if row["verdict"] is None:
            return None
        messages = questioner.messages(Question(row["problem"], row["reference"], row["response"]))
        turns, target = as_messages(messages, data.system), str(row["verdict"])
        if target not in data.judge.answers:
            raise ValueError(f"expected a verdict of data.judge.answers={data.judge.answers}, got {target!r}")
    else:
        turns = as_messages(get_column(row, columns.messages or columns.prompt), data.system)
        if columns.messages is None:
            completion = get_column(row, columns.completion)
            learned = [("assistant", completion)] if isinstance(completion, str) else as_messages(completion)
            if len(learned) > 1:
                raise ValueError("expected one message as completion; data.columns.messages takes conversations")
            turns += learned
        (role, target) = turns.pop()
        if role != "assistant" or not turns:
            raise ValueError(f"the last message must be the assistant's and follow others, got one of {role}")
    if not target.strip():
        raise ValueError("the row has no completion: leave it out")
    "".join([*(text for _, text in turns), target]).encode()  # refuses half of a surrogate pair
    return Pair(tuple(turns), target, is_verdict=columns is None)


def _columns_of(row: Mapping[str, Any]) -> SftColumnsConfig | None:
    """Return the columns of a row with common names, or None for a judge's verdicts. Raises ValueError."""
    if "messages" in row:
        return SftColumnsConfig(messages="messages")
    if {"prompt", "completion"} <= row.keys():
        if "label" in row:
            raise ValueError("label (KTO) is not read: keep the rows to learn, without it, or name data.columns")
        return SftColumnsConfig()
    if row.keys() >= VERDICT_COLUMNS:
        return None
    raise ValueError("no columns prompt and completion, messages or of verdicts.jsonl; data.columns names others")


def _tokenize(pairs: list[Pair], prompts: list[Prompt], found: Examples, tokenizer: Any, data: SftDataConfig) -> None:
    rendered = tokenize([pair.prompt for pair in pairs], tokenizer, data, **_thinking(pairs[0]))
    found.report.find_unknown(rendered, tokenizer)
    targets = tokenizer([pair.completion for pair in pairs], add_special_tokens=False)["input_ids"]
    for pair, (text, before), after in zip(pairs, rendered, targets, strict=True):
        end = [] if after[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]
        length = len(token_ids := torch.tensor([*before, *after, *end]))
        if length > data.max_tokens:
            found.report["longer than data.max_tokens"] += 1
            continue
        name = hashlib.sha256(f"{text}\0{pair.completion}".encode("utf-8", "backslashreplace")).hexdigest()[:16]
        mask = torch.arange(length) >= len(before)
        found.sequences[name] = TrainingSequence(token_ids, mask.float(), mask, torch.zeros(length), group_id=0)
        prompts.append(Prompt(name, before, text, pair.completion))


def _thinking(pair: Pair) -> dict[str, Any]:
    return {"enable_thinking": False} if pair.is_verdict else {}  # as a judge in this process is asked


def _other_form(pair: Pair, tokenizer: Any, data: SftDataConfig) -> str | None:
    """Return what the chat template writes for an example, if it is not what trains, spaces of tokens included."""
    if not uses_chat_template(tokenizer, data):
        return None
    ((_, opened),) = tokenize([pair.prompt], tokenizer, data, **_thinking(pair))
    turns, options = [*pair.prompt, ("assistant", pair.completion)], _thinking(pair) | {"add_generation_prompt": False}
    ((_, whole),) = tokenize([turns], tokenizer, data, **options)
    completion = tokenizer(pair.completion, add_special_tokens=False)["input_ids"]
    written, said = tokenizer.decode(whole), tokenizer.decode([*opened, *completion]).removesuffix(tokenizer.eos_token)
    n = common_length(written, trained := said + tokenizer.eos_token)
    if n == len(trained) or written == said:  # some templates end no turn
        return None
    here = slice(max(n - 20, 0), n + 20)
    return f"the chat template writes {written[here]!r} where the examples train {trained[here]!r}"
