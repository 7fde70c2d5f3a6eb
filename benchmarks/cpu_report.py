"""What a page about a CPU has beyond the others: the allocators, bars, and every side at its best of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import bars
from benchmarks.allocators import ALLOCATORS, HUGE_PAGES, spelled
from benchmarks.bars import (
    Bar,
    bandwidth,
    beyond_gradients,
    fastest_denominator,
    logprob_error,
    lora_over_plain,
    milliseconds,
    over_denominator,
    over_eager,
    over_fastest_pass,
)

Record = dict[str, Any]

METHOD = """\
Every contestant has a process of its own, in which the denominators and its call take turns (M A M A …): each ratio to
a denominator is one of medians from that process; the denominator's own row is of all of them. "÷ dapo_kernels"
compares two processes under the same allocator: contestants that overwrite the logits with our call in place, those
that do not with our default call, which returns a new gradient.
The same pass over memory takes up to twice as long in one process as in another, with nothing else running: which
pages a process was given decides. "÷ the fastest" is to the fastest pass that any process of the workload saw.

Each heading names the allocator that every process under it had from its start:
"""
_FOR_GPUS = "*written for GPUs:*"
SPREAD = 1.25  # medians of the denominator further apart than this are pointed out
_HEAD = {"n_tokens": 2048, "vocab": 49152, "allocator": HUGE_PAGES}


def _times(value: float) -> str:
    return f"{value:.3f} ×"


BARS = (
    Bar(
        "logits fp32, in place, huge pages: ≤ 1.35 × the fastest `mul_`",
        1.35,
        over_fastest_pass,
        _times,
        {**_HEAD, "level": "logits", "dtype": "float32"},
    ),
    Bar(
        "logits bf16, in place, huge pages: ≤ 1.6 × the fastest `mul_`",
        1.6,
        over_fastest_pass,
        _times,
        {**_HEAD, "level": "logits"},
    ),
    Bar(
        "hidden states bf16, huge pages: ≤ 1.05 × three GEMMs",
        1.05,
        over_denominator,
        _times,
        {**_HEAD, "level": "hidden", "hidden": 576},
    ),
    *(
        Bar(
            f"the same with {n} kept tokens each: ≤ 1.15 × that",
            1.15 * 1.05,
            over_denominator,
            _times,
            {**_HEAD, "level": "hidden", "hidden": 576, "kept": n},
        )
        for n in (64, 1000)
    ),
    Bar(
        "a call of 64 × 64: ≤ 1.7 × eager",
        1.7,
        over_eager,
        _times,
        {"level": "logits", "n_tokens": 64, "vocab": 64, "dtype": "float32"},
    ),
    Bar(
        "a call of 64 × 64: ≤ 0.2 ms, where eager takes 0.12",
        0.2,
        milliseconds,
        lambda ms: f"{ms:.3f} ms",
        {"level": "logits", "n_tokens": 64, "vocab": 64, "dtype": "float32"},
    ),
    Bar(
        "LoRA of rank 16 on a frozen head, bf16: ≤ 1.15 × the plain head that trains",
        1.15,
        lora_over_plain,
        _times,
        {**_HEAD, "level": "hidden", "hidden": 576, "lora": True},
    ),
    Bar(
        "20,480 tokens, V = 151,936, H = 896: ≤ 0.5 GiB beyond inputs and gradients",
        0.5,
        beyond_gradients,
        lambda gib: f"{gib:.3f} GiB",
        {"level": "hidden", "n_tokens": 20480, "vocab": 151936, "hidden": 896},
    ),
    Bar(
        "log-probs fp32, against float64: ≤ 2e-6",
        2e-6,
        logprob_error,
        lambda error: f"{error:.1e}",
        {"level": "logits", "dtype": "float32", "mode": "forward"},
    ),
)


def method() -> str:
    return METHOD + "\n" + "\n".join(f"- {name}: {spelled(name)}" for name in ALLOCATORS)


def sections(records: Sequence[Record]) -> list[str]:
    """Bars; then the headline workloads, every side under every allocator."""
    return [f"## Bars\n\n{bars.table(BARS, records)}", *(headline(group) for group in headlines(records))]


def headlines(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each headline workload, one for each allocator."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.get("fields", {}).get("headline") and record["rows"]:
            groups.setdefault(record["workload"], []).append(record)
    return list(groups.values())


def best_of(group: Sequence[Record], name: str) -> tuple[Record, Record] | None:
    """Record and row where that side was fastest."""
    found = [(r, row) for r in group for row in r["rows"] if row["name"] == name and "median_ms" in row]
    return min(found, key=lambda pair: pair[1]["median_ms"], default=None)


def headline(group: Sequence[Record]) -> str:
    """One workload: milliseconds under every allocator, and each side against ours where that side was fastest."""
    denominator = group[0]["denominators"][0]
    columns = [
        "side",
        *(f"{record['allocator']}: ms (÷ {denominator})" for record in group),
        "its best",
        "there: its time ÷ ours",
        "there: our time ÷ its",
        "there: GB/s, one read and one write of the logits",
        f"there: ÷ the fastest {denominator}",
        "there: peak beyond inputs, MiB",
    ]
    lines = [_line(columns), _line(["---"] + ["---:"] * len(group) + ["---"] + ["---:"] * 5)]
    rows = group[0]["rows"]
    lines += [_side(group, row["name"]) for row in rows if not row["for_gpus"]]
    if any(row["for_gpus"] for row in rows):
        lines.append(_line([_FOR_GPUS] + [""] * (len(columns) - 1)))
        lines += [_side(group, row["name"]) for row in rows if row["for_gpus"]]
    title = f"## {group[0]['workload']}: each side at its best\n\n"
    return title + "\n".join(lines) + "\n\n" + "\n".join(_spread(record) for record in group)


def _spread(record: Record) -> str:
    """How far the denominator's medians in the sides' processes lie apart: "÷ ours" compares two of them."""
    medians = [row["median_ms"] / row["over_denominator"] for row in record["rows"] if _has_its_own(row)]
    if not medians:
        return ""
    low, high = min(medians), max(medians)
    verdict = "" if high <= SPREAD * low else "; far apart: compare times with the fastest"
    name = record["denominators"][0]
    return f"- {record['allocator']}: {name} took {low:.3g} to {high:.3g} ms, medians of the sides' processes{verdict}"


def _has_its_own(row: Record) -> bool:
    return row["kind"] != "denominator" and "over_denominator" in row


def _side(group: Sequence[Record], name: str) -> str:
    rows = [next((row for row in record["rows"] if row["name"] == name), {}) for record in group]
    best = best_of(group, name)
    if best is None:
        why = next((f"{row['status']}: {row.get('reason')}" for row in rows if row), "")
        return _line([name, why, *[""] * (len(group) + 5)])
    record, row = best
    fastest = fastest_denominator(group)
    logits = record["fields"]["level"] == "logits"
    memory = f"{row['peak_extra_bytes'] / 2**20:.0f}" if "peak_extra_bytes" in row else ""
    ours = row.get("over_ours")
    return _line(
        [
            name,
            *(_cell(row) for row in rows),
            record["allocator"],
            f"{ours:.2f}" if ours else "",
            f"{1 / ours:.2f}" if ours else "",
            f"{bandwidth(record['fields'], row['median_ms']):.0f}" if logits else "",
            f"{row['median_ms'] / fastest:.2f}" if fastest else "",
            memory,
        ]
    )


def _cell(row: Record) -> str:
    if "median_ms" not in row:
        return row.get("status", "")
    over = f" ({row['over_denominator']:.2f})" if "over_denominator" in row else ""
    return f"{row['median_ms']:.3g}{over}" if row["median_ms"] < 1000 else f"{row['median_ms']:.0f}{over}"


def _line(values: list[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"
