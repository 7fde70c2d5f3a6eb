"""What a page about a CUDA device has beyond the others: the device, rates, bars, who was absent, what was not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import bars
from benchmarks.bars import Bar, bandwidth, beyond_gradients, over_denominator

Record = dict[str, Any]

METHOD = """\
On the device one process serves one configuration after another. Time is that between two CUDA events around the
call, after the second-level cache was overwritten; the first launch is hidden behind that, later gaps are in the
figure. Peak extra is the most that torch's allocator gave out during a call, minus what it had before: to the byte,
returned gradients included (their share in the next column).
"""

_BIG_HEAD = {"level": "hidden", "n_tokens": 8192, "hidden": 4096, "vocab": 151936}
BARS = (
    Bar(
        "≥ 85 % of the copy's bandwidth, one read and one write",
        1 / 0.85,
        over_denominator,
        lambda ratio: f"{1 / ratio:.1%}",
        {"level": "logits"},
    ),
    Bar("≤ 1.10 × the three GEMMs", 1.10, over_denominator, lambda ratio: f"{ratio:.3f}", _BIG_HEAD),
    Bar("≤ 3 GiB beyond inputs and gradients", 3.0, beyond_gradients, lambda gib: f"{gib:.2f} GiB", _BIG_HEAD),
)


def facts(gpu: dict[str, Any]) -> list[str]:
    backends = ", ".join(f"{name}: {state}" for name, state in gpu["backends"].items())
    return [
        f"- device: {gpu['name']}, {gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors, capability "
        f"{gpu['capability']}, driver {gpu['driver']}, CUDA {gpu['cuda']}",
        f"- backends: {backends}",
    ]


def sections(records: Sequence[Record]) -> list[str]:
    """Bars, absent contestants and what was not run, each under a heading."""
    return [f"## Bars\n\n{bars.table(BARS, records)}", f"## Who did not run\n\n{absent(records)}"]


def absent(records: Sequence[Record]) -> str:
    """Contestants without figures, by reason; then configurations that time did not allow."""
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for row in record["rows"]:
            if row["status"] != "ok":
                key = (row["name"], f"{row['status']}: {row.get('reason')}")
                reasons[key] = reasons.get(key, 0) + 1
    lines = [f"- {name}, {count} configurations: {reason}" for (name, reason), count in reasons.items()]
    lines += [f"- {record['config']}: {record['not_run']}" for record in records if "not_run" in record]
    return "\n".join(lines) if lines else "Everybody ran everywhere."


def rates(record: Record) -> str:
    """What the denominators reached: bytes of a pass over the logits, operations of the GEMMs."""
    fields = record.get("fields")
    parts = []
    for row in record["rows"]:
        if row["kind"] == "denominator" and "median_ms" in row and fields is not None:
            parts.append(f"{row['name']} {_rate(row['name'], fields, row['median_ms'] / 1e3)}")
    return f"\n\nReached: {'; '.join(parts)}." if parts else ""


def _rate(name: str, fields: dict[str, Any], seconds: float) -> str:
    entries = fields["n_tokens"] * fields["vocab"]
    if name.endswith(("GEMM", "GEMMs")):
        count = 3 if name == "three GEMMs" else 1
        return f"{2 * count * entries * fields['hidden'] / seconds / 1e12:.3g} TFLOP/s"
    return f"{bandwidth(fields, 1e3 * seconds):.4g} GB/s (one read, one write)"
