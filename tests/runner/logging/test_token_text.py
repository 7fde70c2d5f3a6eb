"""The text of tokens: whole characters, spaces where they were."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dapo_runner.logging.token_text import TokenText
from dapo_runner.run.tiny_model import make_tokenizer


def byte_level() -> Any:
    """Every byte is a token, as a rare character is in the vocabularies of large models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> Any:
    tokenizer = Tokenizer(models.WordLevel({"▁to": 0, "▁be": 1, "ing": 2}, unk_token="ing"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["plain", "é 等 😀!", "\x1b[31m\n", "😀"])
def test_a_character_of_several_tokens_stands_with_its_last(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    pieces = TokenText(tokenizer).pieces(ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_half_a_character_takes_nothing_with_it() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("😀")
    spell = TokenText(tokenizer).pieces
    assert spell([*ids[:2], *tokenizer.encode("abcd")])[-3:] == ["b", "c", "d"]
    assert "\ufffd" in spell(ids[:3])[-1]  # at the end of a response that was cut
    assert spell([]) == []


def test_a_space_before_a_word_is_kept_and_so_is_the_end() -> None:
    assert TokenText(metaspace()).pieces([0, 1, 2]) == [" to", " be", "ing"]
    tokenizer = make_tokenizer()
    assert TokenText(tokenizer).pieces([*tokenizer.encode("Answer: 7"), 1]) == ["Answer: ", "7", "<eos>"]
