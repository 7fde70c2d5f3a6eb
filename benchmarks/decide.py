"""Which backend serves which rows on a GPU, from what ``make gpu`` measured: ``python -m benchmarks.decide FILE.json``
prints the rows of ``CUDA_DEFAULTS`` (dapo_kernels/backends/registry.py) for a person to look at and commit.

The cuda backend takes a dtype from the smallest vocabulary on where it is ahead of triton by MARGIN in every training
configuration from logits, there and above, and not behind in any from hidden states. Where nothing was measured, triton
stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARGIN = 0.03  # of the time: twice what runs of one kernel differ by
TRITON, CUDA, UNLIMITED = "dapo_kernels, triton", "dapo_kernels, cuda", "dapo_kernels, triton, a program a row"


class Row(NamedTuple):
    """Of ``CUDA_DEFAULTS``, with the ratios it stands on."""

    vocab: int
    dtypes: tuple[str, ...]
    ratios: tuple[float, ...]  # cuda's time over triton's, from logits


def ratios(records: Sequence[dict[str, Any]], over: str = TRITON, of: str = CUDA) -> dict[tuple[str, str, int], float]:
    """(level, dtype, V) → the largest ratio of medians among its training configurations in which both ran."""
    found: dict[tuple[str, str, int], float] = {}
    for record in records:
        fields = record.get("fields") or {}
        times = {row["name"]: row["median_ms"] for row in record["rows"] if row["status"] == "ok"}
        if fields.get("mode") == "train" and over in times and of in times:
            key = fields["level"], fields["dtype"], fields["vocab"]
            found[key] = max(found.get(key, 0.0), times[of] / times[over])
    return found


def decide(records: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows that stand before triton's, by vocabulary; none where cuda is not ahead."""
    measured = ratios(records)
    chosen: dict[int, list[tuple[str, list[float]]]] = {}
    for dtype in sorted({dtype for _, dtype, _ in measured}):
        ahead: list[tuple[int, float]] = []
        for vocab in sorted({v for level, d, v in measured if level == "logits" and d == dtype}, reverse=True):
            behind = measured.get(("hidden", dtype, vocab), 0.0) > 1 + MARGIN
            if behind or measured["logits", dtype, vocab] > 1 - MARGIN:
                break
            ahead.append((vocab, measured["logits", dtype, vocab]))
        if ahead:
            chosen.setdefault(ahead[-1][0], []).append((dtype, [ratio for _, ratio in ahead]))
    return [
        Row(vocab, tuple(dtype for dtype, _ in of), tuple(x for _, seen in of for x in seen))
        for vocab, of in sorted(chosen.items())
    ]


def text(results: dict[str, Any], name: str) -> str:
    """What to put into registry.py, and whether the limit of rows in flight is worth having."""
    gpu = results["machine"]["gpu"]
    capability = tuple(map(int, gpu["capability"].split(".")))
    lines = [f"# {gpu['name']}: benchmarks/results/{name}", "CUDA_DEFAULTS = ("]
    for row in decide(results["records"]):
        dtypes = ", ".join(f"torch.{dtype}" for dtype in row.dtypes)
        told = ", ".join(f"{x:.2f}" for x in row.ratios)
        lines.append(f"    # {told} of triton's time")
        lines.append(f'    Default("cuda", {capability}, {row.vocab}, ({dtypes},)),')
    lines += ['    Default("triton"),', ")"]
    lines += _told("rows in flight limited by the cache", ratios(results["records"], over=UNLIMITED, of=TRITON))
    return "\n".join(lines)


def _told(what: str, found: dict[tuple[str, str, int], float]) -> list[str]:
    return [
        f"# {what}, {dtype}, V={vocab}, from {level}: {ratio:.2f} of the time without"
        for (level, dtype, vocab), ratio in sorted(found.items())
    ]


def main(arguments: list[str]) -> None:
    (path,) = map(Path, arguments)
    print(text(json.loads(path.read_text()), path.name))


if __name__ == "__main__":
    main(sys.argv[1:])
