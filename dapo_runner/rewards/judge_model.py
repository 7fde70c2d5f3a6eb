"""A judge in this process: a transformers model, asked by one forward pass over a batch of questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from dapo_runner.config import ConfigError, JudgeConfig, ModelConfig
from dapo_runner.policy.model import load_model, load_tokenizer, resolve_device

Conversation = Sequence[dict[str, str]]
BATCH_TOKENS = 16384  # of one forward pass, padding included


class JudgeModel:
    """Loads the model when it is first asked: bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.device = resolve_device("auto")
        on_cpu = self.device.type == "cpu"
        self._settings = ModelConfig(path=config.model, dtype="float32" if on_cpu else "bfloat16")

    @torch.no_grad()
    def __call__(self, conversations: Sequence[Conversation]) -> list[tuple[float, float, bool]]:
        """Return p(yes), p(no) and whether either is the likeliest first token of the next message.

        A conversation that is too long for the model gets 0, 0 and False.
        """
        self._model.to(self.device)
        ids = [self._tokens_of(conversation) for conversation in conversations]
        answers = [torch.tensor(sorted(tokens), device=self.device) for tokens in self._answers]
        found: list[tuple[float, float, bool]] = [(0.0, 0.0, False)] * len(ids)
        limit = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        lengths = {index: len(row) for index, row in enumerate(ids) if limit is None or len(row) <= limit}
        for batch in _batches(lengths):
            logprobs = self._next([ids[index] for index in batch])
            yes, no = (logprobs[:, tokens].logsumexp(1).exp().tolist() for tokens in answers)
            is_clear = torch.isin(logprobs.argmax(1), torch.cat(answers)).tolist()
            for index, *chances in zip(batch, yes, no, is_clear, strict=True):
                found[index] = tuple(chances)
        return found

    def check(self, conversation: Conversation) -> None:
        """Try the tokenizer, where it is on this machine, on the answers and a conversation. Raises ConfigError."""
        if Path(self.config.model).is_dir():
            _ = self._answers
            self._text_of(conversation)

    def release(self) -> None:
        """Move the model off the GPU until it is asked again."""
        if "_model" in self.__dict__:
            self._model.to("cpu")

    @property
    def tokens(self) -> set[str]:
        return special_tokens(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.config.model, self._settings)

    @cached_property
    def _model(self) -> Any:
        return load_model(self.config.model, self._settings, torch.device("cpu"), "sdpa")

    @cached_property
    def _answers(self) -> list[set[int]]:
        """The first tokens of either answer, however it is written, less those that both begin with."""
        yes, no = (self._first_tokens(word) for word in self.config.answers)
        if not yes - no or not no - yes:
            raise ConfigError(
                f"reward.judge.answers: expected two words whose first tokens differ for the tokenizer of "
                f"{self.config.model}, got {' and '.join(self.config.answers)}"
            )
        return [yes - no, no - yes]

    def _first_tokens(self, word: str) -> set[int]:
        forms = {form(word) for form in (str, str.lower, str.capitalize, str.upper)}
        texts = [before + form for form in sorted(forms) for before in ("", " ")]
        return {ids[0] for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]}

    def _text_of(self, conversation: Conversation) -> str:
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in conversation)
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except TemplateError as error:
            roles = " and ".join(message["role"] for message in conversation)
            raise ConfigError(
                f"reward.judge: expected a chat template of {self.config.model} with messages of {roles}, got {error}"
            ) from error
        return text

    def _tokens_of(self, conversation: Conversation) -> list[int]:
        plain = not self._tokenizer.chat_template  # a chat template writes the special tokens itself
        ids: list[int] = self._tokenizer(self._text_of(conversation), add_special_tokens=plain)["input_ids"]
        return ids

    def _next(self, rows: Sequence[list[int]]) -> Tensor:
        """Return the log-probs of the token after each row, float32 [rows, V]."""
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1
        )
        return torch.log_softmax(output.logits[:, -1].float(), dim=-1)


def _batches(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield the keys of ``lengths`` in batches of like length."""
    batch: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def special_tokens(tokenizer: Any) -> set[str]:
    """Return what a tokenizer keeps whole, wherever it stands in a text."""
    return {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
