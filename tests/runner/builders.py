"""Small records for tests: a completion, a group, a sequence, without a model."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.losses import Output
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.packing import count_group_tokens, count_training_tokens, pack_shares
from dapo_runner.config import Config, TinyModelConfig, parse
from dapo_runner.types import (
    Completion,
    Group,
    PackedBatch,
    Prompt,
    Sample,
    TrainingSequence,
    TruncatedSupport,
    Verdict,
)

TINY = TinyModelConfig(layers=2, hidden_size=32, heads=2, intermediate_size=64)


def make_config(**sections: Any) -> Config:
    """A valid configuration of a small run; sections are merged over it one level deep."""
    raw: dict[str, Any] = {
        "model": {"tiny": {}},
        "data": {"format": "arithmetic"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 64},
        "sampler": {"prompts_per_step": 4},
        "reward": {"overlong": {"cache_length": 16}},
        "optimizer": {"mini_batch_size": None, "token_budget": 256},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return parse(raw, Config)


def make_prompt(name: str = "p", n_tokens: int = 3, answer: str = "7") -> Prompt:
    return Prompt(id=name, token_ids=tuple(range(1, n_tokens + 1)), text=name, answer=answer, source="test")


def make_completion(length: int = 4, text: str = "", truncated: bool = False) -> Completion:
    return Completion(
        token_ids=torch.arange(10, 10 + length),
        logprobs=-torch.arange(1, length + 1, dtype=torch.float32) / 8,
        finish_reason="length" if truncated else "stop",
        text=text,
    )


def make_sample(
    correct: bool,
    *,
    length: int = 4,
    extracted: str | None = None,
    truncated: bool = False,
    penalty: float = 0.0,
    trains: bool = True,
) -> Sample:
    return Sample(
        completion=make_completion(length, truncated=truncated),
        verdict=Verdict(correct, extracted, "answer-line"),
        base_reward=1.0 if correct else -1.0,
        length_penalty=penalty,
        trains=trains,
    )


def make_group(pattern: str, name: str = "p") -> Group:
    """One sample per letter: R right, W wrong, C right and truncated, T wrong and truncated."""
    samples = tuple(make_sample(letter in "RC", truncated=letter in "TC") for letter in pattern)
    return Group(make_prompt(name), samples)


def make_sequence(n_prompt: int, n_response: int, *, group_id: int = 0, first_token: int = 0) -> TrainingSequence:
    """Tokens count up from ``first_token``; each response token has an advantage of its own: its token id."""
    length = n_prompt + n_response
    token_ids = torch.arange(first_token, first_token + length)
    mask = torch.arange(length) >= n_prompt
    values = torch.where(mask, token_ids.float(), 0.0)
    return TrainingSequence(token_ids, advantages=values, mask=mask, rollout_logprobs=-values, group_id=group_id)


def random_sequences(count: int, seed: int = 0) -> list[TrainingSequence]:
    """Sequences of unlike lengths, some of whose response tokens do not train."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for index in range(count):
        n_prompt, n_response = 2 + index % 4, 3 + (7 * index) % 13
        length = n_prompt + n_response
        mask = torch.arange(length) >= n_prompt
        if index % 5 == 4:
            mask[:] = False  # overlong filtering
        advantage = torch.randn((), generator=generator)
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(3, 26, (length,), generator=generator),
                advantages=torch.where(mask, advantage, 0.0),
                mask=mask,
                rollout_logprobs=torch.where(mask, -3 * torch.rand(length, generator=generator), 0.0),
                group_id=index // 4,
            )
        )
    return sequences


def paired(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Those that train, two by two: a chosen and a rejected one."""
    live = [sequence for sequence in sequences if sequence.mask.any()]
    live = live[: len(live) // 2 * 2]
    signs = (1.0 if index % 2 == 0 else -1.0 for index in range(len(live)))
    return [
        replace(sequence, pair=index // 2, advantages=torch.where(sequence.mask, sign, 0.0))
        for index, (sequence, sign) in enumerate(zip(live, signs, strict=True))
    ]


def with_lists(sequences: list[TrainingSequence], vocab: int) -> list[TrainingSequence]:
    """Every third token of a response without a list, the others with their own id and some more."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, sequence in enumerate(sequences):
        lists = []
        for place, (token, trains) in enumerate(zip(sequence.token_ids.tolist(), sequence.mask.tolist(), strict=True)):
            others = torch.randint(vocab, (6,), generator=generator).tolist()
            lists.append(sorted({token, *others}) if trains and place % 3 else [])
        ids = torch.tensor([token for kept in lists for token in kept], dtype=torch.int32)
        kept = TruncatedSupport(ids, torch.tensor([len(kept) for kept in lists], dtype=torch.int32))
        made.append(sequence if number == 0 else replace(sequence, support=kept))
    return made


CUTS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"min_p": 0.2},
    {"top_k": 5, "min_p": 0.1},
    {"top_k": 4, "top_p": 0.7, "min_p": 0.05},
]


def what_is_left(
    probs: list[float], top_k: int | None = None, min_p: float = 0.0, top_p: float = 1.0
) -> dict[int, float]:
    """The tokens that ``SamplingParams`` leave, with their shares; by hand."""

    def shares(tokens: list[int]) -> dict[int, float]:
        return {token: probs[token] / sum(probs[other] for other in tokens) for token in tokens}

    order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)
    left = shares([token for token in order if probs[token] >= min_p * probs[order[0]]][:top_k])
    return shares([token for i, token in enumerate(left) if sum(list(left.values())[:i]) < top_p])


def save_model(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class CharTokenizer:
    """One token per character; the chat template wraps a message in its role."""

    eos_token_id = None

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        begin = [0] if add_special_tokens else []
        return {"input_ids": [begin + [ord(letter) for letter in item] for item in text]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        assert kwargs == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


@contextmanager
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Yield a function that lets no file of this process grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def snippets_of(page: str) -> dict[str, str]:
    """The marked snippets of a page in docs/, by the names in their marks."""
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- (.+?) -->\n```\w*\n(.+?)```", text, re.DOTALL))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pack(sequences: list[TrainingSequence], token_budget: int, multiple: int = 1) -> list[PackedBatch]:
    """The micro-batches of a single rank."""
    (batches,) = pack_shares(sequences, token_budget, multiple=multiple)
    return batches


def pack_mini_batch(learner: Learner, sequences: list[TrainingSequence], budget: int) -> MiniBatch:
    """One mini-batch in micro-batches of ``budget`` positions, without the log-probs that ``prepare`` adds."""
    n_tokens, denominator = count_training_tokens(sequences), learner.loss.denominator(sequences)
    return MiniBatch(pack(sequences, budget), n_tokens, denominator, group_tokens=count_group_tokens(sequences))


def backward(learner: Learner, mini: MiniBatch, batch: PackedBatch, selection: torch.Tensor | None = None) -> Output:
    """Add the gradient of one micro-batch to the policy's."""
    out = learner.compute_loss(mini, batch, selection)
    out.loss.backward()
    return out
