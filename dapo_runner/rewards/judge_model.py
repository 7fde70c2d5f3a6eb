"""A judge in this process: a transformers model, asked by one forward pass over a batch of questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from dapo_runner.config import ConfigError, JudgeConfig, ModelConfig
from dapo_runner.policy.model import load_model, load_tokenizer, resolve_device

Conversation = Sequence[dict[str, str]]


class JudgeModel:
    """Loads the model when it is first asked."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self._settings = ModelConfig(path=config.model, dtype=config.dtype)

    @torch.no_grad()
    def __call__(self, conversations: Sequence[Conversation]) -> list[tuple[float, float, bool]]:
        """Of each conversation the probabilities that the next message begins with the first and with the second of the
        answers, and whether either is the likeliest beginning. Of one that is too long for the model: 0, 0 and False.
        """
        device = resolve_device(self.config.device, "reward.judge.device")
        self._model.to(device)
        ids = [self._tokens_of(conversation) for conversation in conversations]
        answers = [torch.tensor(sorted(tokens), device=device) for tokens in self._answers]
        chances: list[tuple[float, float, bool]] = [(0.0, 0.0, False)] * len(ids)
        limit = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        fits = [index for index, tokens in enumerate(ids) if limit is None or len(tokens) <= limit]
        for batch in self._batches({index: len(ids[index]) for index in fits}):
            logprobs = self._next([ids[index] for index in batch], device)
            yes, no = (logprobs[:, tokens].logsumexp(1).exp().tolist() for tokens in answers)
            said = torch.isin(logprobs.argmax(1), torch.cat(answers)).tolist()
            for index, found in zip(batch, zip(yes, no, said, strict=True), strict=True):
                chances[index] = found
        return chances

    def check(self, conversation: Callable[[], Conversation]) -> None:
        """Raises ConfigError where the tokenizer, if it is on this machine, does not tell the answers apart or does not
        take the ``conversation``.
        """
        resolve_device(self.config.device, "reward.judge.device")
        if Path(self.config.model).is_dir():
            _ = self._answers
            self._text_of(conversation())

    def release(self) -> None:
        """Off the GPU until it is asked again."""
        if "_model" in self.__dict__:
            self._model.to("cpu")

    @property
    def tokens(self) -> set[str]:
        return tokens_kept_whole(self._tokenizer)

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
                f"reward.judge.answers: expected two words that the tokenizer of {self.config.model} tells apart by "
                f"their first token, got {' and '.join(self.config.answers)}"
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
                conversation, tokenize=False, add_generation_prompt=True, **self.config.chat_template_kwargs
            )
        except TemplateError as error:
            roles = " and ".join(message["role"] for message in conversation)
            raise ConfigError(
                f"reward.judge: expected a chat template of {self.config.model} that takes messages of {roles}, "
                f"got: {error}"
            ) from error
        return text

    def _tokens_of(self, conversation: Conversation) -> list[int]:
        plain = not self._tokenizer.chat_template  # a chat template writes the special tokens itself
        ids: list[int] = self._tokenizer(self._text_of(conversation), add_special_tokens=plain)["input_ids"]
        return ids

    def _batches(self, lengths: Mapping[int, int]) -> Iterator[list[int]]:
        """The keys of ``lengths``, those of like length together."""
        batch: list[int] = []
        for index in sorted(lengths, key=lengths.__getitem__):
            if batch and lengths[index] * (len(batch) + 1) > self.config.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _next(self, rows: Sequence[list[int]], device: torch.device) -> Tensor:
        """Log-probs of the token after each row, float32 [rows, V]."""
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1
        )
        return torch.log_softmax(output.logits[:, -1].float(), dim=-1)


def tokens_kept_whole(tokenizer: Any) -> set[str]:
    """What a tokenizer does not take apart, wherever it stands in a text."""
    return {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
