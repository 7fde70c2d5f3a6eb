"""The text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CUT = "\ufffd"  # what decoding makes of a character that is not whole
LONGEST = 4  # bytes of a character


class TokenText:
    """Spells tokens, special ones included; remembers each that stands for whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """A piece for each token; of a character spelled by several, the last has it and the others nothing."""
        pieces: list[str] = []
        begun: list[int] = []
        for place, token_id in enumerate(token_ids, start=1):
            begun.append(token_id)
            piece = self._piece(token_id) if len(begun) == 1 else self._decode(begun)
            unfinished = piece.endswith(CUT) and len(begun) < LONGEST and place < len(token_ids)
            pieces.append("" if unfinished else piece)
            if not unfinished:
                begun = []
        return pieces

    def _piece(self, token_id: int) -> str:
        if token_id not in self._known:
            # What it adds behind itself: some tokenizers drop the space before a text's first word.
            once, twice = self._decode([token_id]), self._decode([token_id, token_id])
            self._known[token_id] = twice[len(once) :]
        return self._known[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
