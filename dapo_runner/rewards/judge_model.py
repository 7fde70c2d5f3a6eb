"""A judge in this process: a transformers model that scores a batch of questions in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import ConfigError, JudgeConfig, ModelConfig
from dapo_runner.data.dataset import ends_with_eos, render
from dapo_runner.environments.template import TEMPLATE_ERRORS
from dapo_runner.policy.model import load_model, load_tokenizer, resolve_device

Conversation = Sequence[dict[str, str]]
BATCH_TOKENS = 16384  # per forward pass, padding included


class JudgeModel:
    """Load the model on first use, in bfloat16 on a GPU and float32 on a CPU, and score conversations."""

    def __init__(self, config: JudgeConfig, device: str) -> None:
        self.config = config
        self.device = resolve_device(device)
        self._settings = ModelConfig(path=config.model, dtype="float32" if self.device.type == "cpu" else "bfloat16")

    @torch.no_grad()
    def __call__(self, conversations: Sequence[Conversation]) -> list[float | None]:
        """Return the confidence in the first word. It is None if the likeliest first token of the reply begins neither
        word, or the conversation is too long for the model. Raises ValueError for NaN.
        """
        self._model.to(self.device)
        rows = [self._tokens_of(conversation) for conversation in conversations]
        answers = [torch.tensor(sorted(tokens), device=self.device) for tokens in self._answers]
        limit = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        fitting = [index for index, row in enumerate(rows) if limit is None or len(row) <= limit]
        longest_first = sorted(fitting, key=lambda index: -len(rows[index]))
        found: list[float | None] = [None] * len(rows)
        while longest_first:
            n = max(1, BATCH_TOKENS // len(rows[longest_first[0]]))
            batch, longest_first = longest_first[:n], longest_first[n:]
            logprobs = self._next([rows[index] for index in batch])
            yes, no = (logprobs[:, tokens].logsumexp(1).exp().tolist() for tokens in answers)
            is_clear = torch.isin(logprobs.argmax(1), torch.cat(answers)).tolist()
            for index, *chances in zip(batch, yes, no, is_clear, strict=True):
                found[index] = confidence_of(*chances)
        return found

    def check(self, conversation: Conversation) -> None:
        """Try the tokenizer on both words and a conversation if it is on this machine. Raises ConfigError."""
        if Path(self.config.model).is_dir():
            _ = self._answers
            self._tokens_of(conversation)

    def release(self) -> None:
        """Move the model off the GPU until it is used again."""
        if "_model" in self.__dict__:
            self._model.to("cpu")

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.config.model, self._settings)

    @cached_property
    def _model(self) -> Any:
        return load_model(self.config.model, self._settings, torch.device("cpu"), "sdpa")

    @cached_property
    def _answers(self) -> list[set[int]]:
        """The first tokens of each word in all spellings, without those that both words share."""
        yes, no = (self._first_tokens(word) for word in self.config.answers)
        if not yes - no or not no - yes:
            raise ConfigError(f"reward.judge.answers: expected first tokens that differ, got {self.config.answers}")
        return [yes - no, no - yes]

    def _first_tokens(self, word: str) -> set[int]:  # a tokenizer may put a space before each text, but not in a reply
        forms = (word, word.lower(), word.capitalize(), word.upper())
        texts = [before + form for form in forms for before in ("", " ")]
        words, firsts = self.tokenizer.get_vocab(), self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return {ids[0] for ids in firsts} | {words[form] for form in forms if form in words}

    def _tokens_of(self, conversation: Conversation) -> list[int]:
        chat, turns = bool(self.tokenizer.chat_template), [(one["role"], one["content"]) for one in conversation]
        try:
            text = render(turns, self.tokenizer, chat, enable_thinking=False)
        except TEMPLATE_ERRORS as error:
            raise ConfigError(f"reward.judge: requires a chat template for a user message, got: {error}") from error
        ids = self.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        return ids[:-1] if not chat and ends_with_eos(self.tokenizer) else ids

    def _next(self, rows: Sequence[list[int]]) -> Tensor:
        """Return the log-probs of the next token of each row, float32 [rows, V]."""
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        options = {"position_ids": positions, "use_cache": False, "logits_to_keep": 1}
        output = self._model(input_ids=ids, attention_mask=mask, **options)
        return torch.log_softmax(output.logits[:, -1].float(), dim=-1)


def special_tokens(tokenizer: Any) -> set[str]:
    """Return the tokens that a tokenizer does not split, wherever they are in a text."""
    return {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}


def confidence_of(p_yes: float, p_no: float, is_clear: bool) -> float | None:
    """Return p_yes / (p_yes + p_no); None for an unclear reply. Raises ValueError for NaN."""
    if not math.isfinite(p_yes + p_no) or (is_clear and p_yes + p_no <= 0):
        raise ValueError(f"expected the probabilities of two answers, got {p_yes} and {p_no}")
    return p_yes / (p_yes + p_no) if is_clear else None
