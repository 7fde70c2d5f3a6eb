"""The results of a suite: everything as JSON, and a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.allocators import ALLOCATORS, spelled
from benchmarks.configs import OURS, REHEARSAL
from dapo_runner.files import atomic_write

Record = dict[str, Any]

METHOD = "How it is measured, and what the columns are: [docs/performance.md](../../docs/performance.md)."
REHEARSAL_WARNING = "**REHEARSAL on a CPU with tiny sizes: no figure on this page means anything.**"
_COLUMNS = ("contestant", "setting", "median ms", "min–max")
_MEMORY_COLUMNS = ("peak extra MiB", "of it gradients", "error: loss · gradient")


def write(results: dict[str, Any], base: Path) -> None:
    """Write ``base``.json and .md; each replaces the old file at once."""
    base.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(Path(f"{base}.json"), json.dumps(results, indent=1, ensure_ascii=False))
    atomic_write(Path(f"{base}.md"), markdown(results))


def is_failure(record: Record) -> bool:
    """Return whether figures are missing: the configuration died, or our own kernels failed or were wrong."""
    bad = (row["status"] in ("failed", "wrong") for row in record["rows"] if row["kind"] in OURS)
    return "error" in record or any(bad)


def markdown(results: dict[str, Any]) -> str:
    records: list[Record] = results["records"]
    parts = [f"# dapo_kernels benchmarks: {results['suite']}"]
    parts += [REHEARSAL_WARNING] if REHEARSAL else []
    took = f"- threads: {results['threads']}; took {results['wall_s']:.0f} s"
    settings = [f"- {name}: {spelled(name)}" for name in ALLOCATORS if "gpu" not in results["machine"]]
    parts += ["\n".join([machine.facts(results["machine"]), took, *settings]), METHOD]
    parts += [
        "## Where another contestant is faster\n\n" + losses(records),
        "## What did not run\n\n" + absent(records),
    ]
    parts += [f"## {record['config']}\n\n{table(record)}" for record in records]
    return "\n\n".join(part for part in parts if part) + "\n"


def losses(records: Sequence[Record]) -> str:
    lines = [
        f"- {record['config']}: {row['name']} takes {row['over_ours']:.2f} of our time"
        for record in records
        for row in record["rows"]
        if row["kind"] in ("eager", "compile", "peer") and row.get("over_ours", 1.0) < 1.0
    ]
    return "\n".join(lines) or "Nowhere in this run."


def absent(records: Sequence[Record]) -> str:
    """List contestants without figures by reason, then configurations that were not finished."""
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for row in record["rows"]:
            if row["status"] != "ok":
                key = (row["name"], f"{row['status']}: {row.get('reason')}")
                reasons[key] = reasons.get(key, 0) + 1
    lines = [f"- {name}, {count} configurations: {reason}" for (name, reason), count in reasons.items()]
    lines += [f"- {record['config']}: {why}" for record in records if (why := _why_incomplete(record))]
    return "\n".join(lines) or "Every contestant has figures everywhere."


def _why_incomplete(record: Record) -> str:
    return record.get("error") or record.get("not_run", "")


def _rates(record: Record) -> str:
    """Return GB/s of the passes over the logits and TFLOP/s of the matrix products."""
    parts = []
    for row in record["rows"]:
        if row["kind"] == "denominator" and _timed(row) and "live" not in row["name"]:
            fields, seconds = record["fields"], row["median_ms"] / 1e3
            work = 2 * fields["n_tokens"] * fields["vocab"]
            if row["name"] == "GEMMs":
                flops = work * fields["hidden"] * (3 if fields["mode"] == "train" else 1)
                parts.append(f"{row['name']} {flops / seconds / 1e12:.3g} TFLOP/s")
            else:
                moved = work * (4 if fields["dtype"] == "float32" else 2)
                parts.append(f"{row['name']} {moved / seconds / 1e9:.4g} GB/s (one read, one write)")
    return "; ".join(parts)


def table(record: Record) -> str:
    """Return one configuration as a Markdown table."""
    if not record["rows"]:
        return f"No figures: {_why_incomplete(record)}"
    denominators = record["denominators"]
    columns = [*_COLUMNS, *(f"÷ {name}" for name in denominators), "÷ dapo_kernels", *_MEMORY_COLUMNS]
    rows = [cells(row, denominators) for row in record["rows"]]
    reached = _rates(record)
    notes = [f"Reached: {reached}."] if reached else []
    notes += [f"Not finished: {why}"] if (why := _why_incomplete(record)) else []
    return "\n\n".join([markdown_table(columns, rows, texts=2), *notes])


def cells(row: Record, denominators: list[str]) -> list[str]:
    """Return a row of the table; without figures, with the reason."""
    if not _timed(row):
        return [row["name"], row["setting"], row["status"], row.get("reason") or "", *[""] * (4 + len(denominators))]
    errors = row.get("errors", {})
    gradient = [errors[name] for name in ("gradient", "dweight") if name in errors]
    shown = [errors[name] for name in ("loss", "logprob", "entropy") if name in errors]
    shown += [max(gradient)] if gradient else []
    return [
        row["name"],
        row["setting"],
        _ms(row["median_ms"]),
        f"{_ms(row['min_ms'])}–{_ms(row['max_ms'])}",
        *(f"{row['over'][name]:.2f}" if name in row.get("over", {}) else "" for name in denominators),
        f"{row['over_ours']:.2f}" if "over_ours" in row else "",
        _mib(row.get("peak_extra_bytes")),
        _mib(row.get("gradient_bytes")),
        " · ".join(f"{error:.0e}" for error in shown),
    ]


def _timed(row: Record) -> bool:
    return "median_ms" in row


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a table whose first columns are texts and the others figures."""
    rules = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return "\n".join("| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in (columns, rules, *rows))


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}" if value < 10 * 2**20 else f"{value / 2**20:.0f}"
