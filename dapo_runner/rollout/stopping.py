"""Strings that end a response, looked for in the text of its last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# A token says at least one byte, so the bytes of a string bound the tokens it spans. More of them are decoded, because
# a decoder may treat what it takes for a beginning in its own way: a space is dropped, half a character replaced.
MARGIN = 4


class StopStrings:
    """Those of each row, false where no row has any."""

    def __init__(self, strings: Sequence[Sequence[str]], tokenizer: Any) -> None:
        self.strings = strings
        self.tokenizer = tokenizer
        self.window = MARGIN + max((len(string.encode()) for of_row in strings for string in of_row), default=0)

    def __bool__(self) -> bool:
        return any(self.strings)

    def completed(self, among: Tensor, tokens: Tensor) -> Tensor:
        """Which rows ``among`` (bool [R]) have one of their strings at the end of tokens (int64 [R, N]); int64."""
        rows = among.nonzero().squeeze(1)
        texts = self.tokenizer.batch_decode(tokens[rows, -self.window :].cpu(), skip_special_tokens=False)
        found = [any(map(text.__contains__, self.strings[row])) for row, text in zip(rows.tolist(), texts, strict=True)]
        return rows[torch.tensor(found, dtype=torch.bool, device=rows.device)]
