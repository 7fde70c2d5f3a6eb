"""Print the rows of ``CUDA_DEFAULTS`` (dapo_kernels/backends/registry.py) that measurements on a GPU support.

    python -m benchmarks.decide FILE.json [FILE.json …]       files of the GPU suites, of one machine

The cuda backend takes a dtype from the smallest vocabulary on where it is faster than triton by MARGIN in each training
configuration from logits, there and above, and not slower in any from hidden states. Where nothing was measured, triton
stays. Below that stand the fastest launch parameters of ``tuning.py`` beside the built-in ones. A person commits both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.configs import BACKENDS, TUNINGS

MARGIN = 0.03  # of the time: twice what runs of one kernel differ by
TRITON, CUDA = BACKENDS


class Row(NamedTuple):
    """A row of ``CUDA_DEFAULTS``, with cuda's time divided by triton's, from logits."""

    vocab: int
    dtypes: tuple[str, ...]
    ratios: tuple[float, ...]


def _times(records: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, int], dict[str, float]]]:
    """Yield (level, dtype, V) and the medians of every training configuration."""
    for record in records:
        fields = record.get("fields") or {}
        if fields.get("mode") == "train":
            key = fields["level"], fields["dtype"], fields["vocab"]
            yield key, {row["name"]: row["median_ms"] for row in record["rows"] if row["status"] == "ok"}


def decide(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows before triton's, by vocabulary; none where cuda is not faster."""
    measured: dict[tuple[str, str, int], float] = {}
    for key, times in _times(records):
        if TRITON in times and CUDA in times:
            measured[key] = max(measured.get(key, 0.0), times[CUDA] / times[TRITON])
    chosen: dict[int, list[tuple[str, list[float]]]] = {}
    for dtype in sorted({dtype for _, dtype, _ in measured}):
        faster: list[tuple[int, float]] = []
        for vocab in sorted({v for level, d, v in measured if level == "logits" and d == dtype}, reverse=True):
            is_slower = measured.get(("hidden", dtype, vocab), 0.0) > 1 + MARGIN
            if is_slower or measured["logits", dtype, vocab] > 1 - MARGIN:
                break
            faster.append((vocab, measured["logits", dtype, vocab]))
        if faster:
            chosen.setdefault(faster[-1][0], []).append((dtype, [ratio for _, ratio in faster]))
    return [
        Row(vocab, tuple(dtype for dtype, _ in rows), tuple(x for _, ratios in rows for x in ratios))
        for vocab, rows in sorted(chosen.items())
    ]


def text(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the source for registry.py and, as comments, the fastest launch parameters."""
    gpu = results[0]["machine"].get("gpu", {"name": "no GPU", "capability": "0.0"})
    records = [record for one in results for record in one["records"]]
    capability = tuple(map(int, gpu["capability"].split(".")))
    lines = [f"# {gpu['name']}: {', '.join(f'benchmarks/results/{name}' for name in names)}", "CUDA_DEFAULTS = ("]
    for row in decide(records):
        dtypes = ", ".join(f"torch.{dtype}" for dtype in row.dtypes)
        lines.append(f"    # {', '.join(f'{x:.2f}' for x in row.ratios)} of triton's time")
        lines.append(f'    Default("cuda", {capability}, {row.vocab}, ({dtypes},)),')
    lines += ['    Default("triton"),', ")"]
    tuned = {tuning.name for tuning in TUNINGS}
    for (_, dtype, vocab), times in _times(records):
        found = sorted((ms, name) for name, ms in times.items() if name in tuned)
        if found and TRITON in times:
            best, name = found[0]
            lines.append(f"# {dtype}, V={vocab}: {best / times[TRITON]:.2f} of the built-in launch's time: {name}")
    return "\n".join(lines)


def main(paths: Sequence[Path]) -> None:
    print(text([json.loads(path.read_text()) for path in paths], [path.name for path in paths]))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
