"""Print the rows of ``CUDA_DEFAULTS`` (dapo_kernels/backends/registry.py) that measurements on a GPU support.

    python -m benchmarks.decide FILE.json [FILE.json …]       files of the GPU suites, of one machine

Each call (``registry.CALLS``) is decided by dtype and by whether rows start on 16 bytes. The cuda backend takes it from
the smallest vocabulary on where it is faster than triton by MARGIN in each configuration, there and above. All ratios
follow, and the fastest launch of ``tuning.py`` beside the built-in one and the call with a new gradient.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import BACKENDS, NEW_GRADIENTS
from benchmarks.tuning import TUNINGS
from dapo_kernels.backends.registry import CLUSTER_ROW_BYTES, Default

MARGIN = 0.03  # of the time: twice what runs of one kernel differ by
# Of rows that take the kernel measured; none for other calls.
LONGEST = {("in place", True): CLUSTER_ROW_BYTES, ("in place with entropy", True): CLUSTER_ROW_BYTES}
TRITON, CUDA = BACKENDS
Kind = tuple[str, bool, str]  # the call, whether rows are aligned, the dtype


def _times(records: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield the fields and the medians of every configuration."""
    for record in records:
        if fields := record.get("fields"):
            yield fields, {row["name"]: row["median_ms"] for row in record["rows"] if row["status"] == "ok"}


def ratios(records: Sequence[dict[str, Any]]) -> dict[Kind, dict[int, float]]:
    """Return cuda's time divided by triton's by vocabulary: the worst of the configurations."""
    found: dict[Kind, dict[int, float]] = {}
    for fields, times in _times(records):
        vocab, dtype, trains = fields["vocab"], fields["dtype"], fields["mode"] == "train"
        aligned = fields["level"] == "hidden" or vocab * getattr(torch, dtype).itemsize % 16 == 0  # chunks are padded
        calls = {"hidden" if trains else "hidden, no gradient": BACKENDS}
        if fields["level"] == "logits":
            in_place = "in place with entropy" if fields["entropy"] else "in place"
            calls = {in_place: BACKENDS, "new gradient": NEW_GRADIENTS} if trains else {"no gradient": BACKENDS}
        for call, (triton, cuda) in calls.items():
            if triton in times and cuda in times:
                of_kind = found.setdefault((call, aligned, dtype), {})
                of_kind[vocab] = max(of_kind.get(vocab, 0.0), times[cuda] / times[triton])
    return dict(sorted(found.items()))


def decide(records: Sequence[dict[str, Any]], capability: tuple[int, int]) -> list[Default]:
    """Return the rows before triton's; none where cuda is not faster."""
    chosen: dict[tuple[str, bool, int], list[torch.dtype]] = {}
    for (call, aligned, dtype), of_kind in ratios(records).items():
        by_size = sorted(of_kind.items(), reverse=True)
        if faster := list(itertools.takewhile(lambda pair: pair[1] <= 1 - MARGIN, by_size)):
            chosen.setdefault((call, aligned, faster[-1][0]), []).append(getattr(torch, dtype))
    return [
        Default("cuda", capability, vocab, tuple(dtypes), (call,), aligned, LONGEST.get((call, aligned)))
        for (call, aligned, vocab), dtypes in chosen.items()
    ]


def text(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the source for registry.py and, as comments, all ratios and the fastest launch parameters."""
    gpu = results[0]["machine"].get("gpu", {"name": "no GPU", "capability": "0.0"})
    records = [record for one in results for record in one["records"]]
    major, minor = map(int, gpu["capability"].split("."))
    lines = [f"# {gpu['name']}: {', '.join(f'benchmarks/results/{name}' for name in names)}", "CUDA_DEFAULTS = ("]
    lines += [f"    Default{tuple(row)!r}," for row in decide(records, (major, minor))]
    lines += ['    Default("triton"),', ")", "# cuda's time divided by triton's:"]
    for (call, aligned, dtype), of_kind in ratios(records).items():
        shown = ", ".join(f"V={vocab} {ratio:.2f}" for vocab, ratio in sorted(of_kind.items()))
        lines.append(f"# {call}, {'aligned' if aligned else 'other'} rows, {dtype}: {shown}")
    tuned = {tuning.name for tuning in TUNINGS}
    for fields, times in _times(records):
        if TRITON in times and tuned & times.keys():
            tried = sorted((ms, name) for name, ms in times.items() if name in tuned | {NEW_GRADIENTS[0]})
            best = ", ".join(f"{ms / times[TRITON]:.2f} {name}" for ms, name in tried[:3])
            lines.append(f"# {fields['dtype']}, V={fields['vocab']}, ÷ the built-in launch in place: {best}")
    return "\n".join(lines)


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:]]
    print(text([json.loads(path.read_text()) for path in files], [path.name for path in files]))
