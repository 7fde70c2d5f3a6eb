"""Environments and a chat tokenizer for tests of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'judge' %}{{ raise_exception('role') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROOM = ["rollout.max_response_tokens=60", "optimizer.token_budget=128", "sampler.filter_groups=null"]  # for turns


def chat_tokenizer(template: str = CHATML) -> Any:
    """Every character is a token, and so is `ab`, which its two letters sampled one by one are not."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "ab", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def sentencepiece_spaces(tokenizer: Any) -> None:
    """Let a ``chat_tokenizer`` put a space before each text, and write it as `~`."""
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    first = pre_tokenizers.Metaspace(replacement="~", prepend_scheme="first", split=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, backend.pre_tokenizer])
    backend.decoder = decoders.Sequence([decoders.Replace("~", " "), decoders.Fuse()])


class Talker:
    """Answers three turns with `n+`, pays 0.25 for each, and 1 more at the end."""

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.heard: list[str] = []
        return "1+"

    def step(self, text: str) -> tuple[str, float | None, bool]:
        self.heard.append(text)
        return f"{len(self.heard)}+", 0.25, len(self.heard) == 3

    def get_reward(self) -> float | None:
        return 1.0


class Silent(Talker):
    """Gives no reward, so that a rule does."""

    def step(self, text: str) -> tuple[str, float | None, bool]:
        self.heard.append(text)
        return "=", None, len(self.heard) == 2

    def get_reward(self) -> float | None:
        return None


class Digits(Talker):
    """Pays for the digits that it hears: rewards vary, and no clock is asked."""

    def step(self, text: str) -> tuple[str, float | None, bool]:
        self.heard.append(text)
        paid = sum(map(str.isdigit, text)) / 8
        return f"{len(text) % 10}+", paid, len(self.heard) == 2

    def get_reward(self) -> float | None:
        return 0.0
