"""The results of a suite: everything as JSON, and a Markdown page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allocators import ALLOCATORS, spelled

Record = dict[str, Any]

METHOD = """\
"train" calls compute the loss and `torch.autograd.grad` with respect to leaf logits, or leaf hidden states and head,
without accumulation into `.grad`. "forward" calls run under `no_grad`. Inputs are restored before each call. That, and
freeing the results, is outside the clock.

Errors are those against float64 eager on the same rounded inputs, over sampled rows: of the loss absolute, of the
gradient ‖error‖/‖truth‖ (the larger of hidden states and head), of forward log-probs and entropies the largest. A
contestant whose errors exceed what its rounding explains has no figure. Every contestant that was faster is listed.
"""
CPU_METHOD = """\
Every contestant runs in a process of its own, where its calls take turns with those of the denominators (M A M A …).
Each ratio to a denominator is one of medians from that process; the denominator's own row is of all processes.
"÷ dapo_kernels" compares two processes under the same allocator: contestants that overwrite the logits with our call in
place, the others with our default call, which returns a new gradient. The same pass over memory takes up to twice as
long in one process as in another, with nothing else running, because of the pages that a process was given.

Peak extra is the resident high-water mark of one call minus what was resident before it: beyond the inputs, returned
gradients included (their share is in the next column).

Each heading names the allocator that every process under it had from its start:
"""
CUDA_METHOD = """\
One process measures one configuration after another; the contestants take turns. Time is that between two CUDA events
around the call, after the L2 cache was overwritten and while the device waits 5 ms for the host to queue the call.
Peak extra is the most that torch's allocator gave out during a call minus what it had before: to the byte, returned
gradients included (their share is in the next column).
"""
REHEARSAL_WARNING = "**REHEARSAL on a CPU with tiny sizes: no figure on this page means anything.**"
_COLUMNS = ("contestant", "setting", "median ms", "min–max")
_MEMORY_COLUMNS = ("peak extra MiB", "of it gradients", "error: loss · gradient")


def write(results: dict[str, Any], base: Path) -> None:
    """Write ``base``.json and .md; each replaces the old file at once."""
    base.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(results, indent=1, ensure_ascii=False)), (".md", markdown(results))):
        fresh = Path(f"{base}{suffix}.new")
        fresh.write_text(text)
        os.replace(fresh, f"{base}{suffix}")


def is_failure(record: Record) -> bool:
    """Return whether figures are missing: the configuration died, or our own kernels failed or were wrong."""
    bad = (row["status"] in ("failed", "wrong") for row in record["rows"] if row["kind"] == "ours")
    return "error" in record or any(bad)


def markdown(results: dict[str, Any]) -> str:
    records: list[Record] = results["records"]
    on_gpu = any(record["rows"] and record["allocator"] is None for record in records)
    parts = [f"# dapo_kernels benchmarks: {results['suite']}"]
    parts += [REHEARSAL_WARNING] if results.get("rehearsal") else []
    parts += [_facts(results), METHOD]
    if on_gpu:
        parts += [CUDA_METHOD, "## What this card reaches\n\n" + rates_of_card(records), _published(records)]
    else:
        parts += [CPU_METHOD + "\n" + "\n".join(f"- {name}: {spelled(name)}" for name in ALLOCATORS)]
    parts += [
        "## Where another contestant is faster\n\n" + losses(records),
        "## What did not run\n\n" + absent(records),
    ]
    parts += [f"## {record['config']}\n\n{table(record)}" for record in records]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(results: dict[str, Any]) -> str:
    here = results["machine"]
    lines = []
    if gpu := here.get("gpu"):
        size = f"{gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors, capability {gpu['capability']}"
        lines.append(f"- device: {gpu['name']}, {size}, driver {gpu['driver']}, CUDA {gpu['cuda']}")
        lines.append(f"- backends: {', '.join(f'{name}: {state}' for name, state in gpu['backends'].items())}")
    isa = f"dapo_kernels {here['isa']}, torch {here['torch_isa']}, oneDNN {here['onednn_isa'] or 'as it chooses'}"
    load = f"{here['load_average'][0]:.2f} at the start, {results['load_average_at_end'][0]:.2f} at the end"
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    lines += [
        f"- machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB",
        f"- instruction set: {isa}",
        f"- threads: {results['threads']}; load average {load} (this benchmark included)",
        f"- versions: {versions}, Python {here['python']}",
        f"- commit: {here['commit']}",
        f"- command: `{results['command']}`, started {results['started']}, took {results['wall_s']:.0f} s",
    ]
    return "\n".join(lines)


# --- sections ---------------------------------------------------------------------------------------------------------


def losses(records: Sequence[Record]) -> str:
    lines = [
        f"- {record['config']}: {row['name']} takes {row['over_ours']:.2f} of our time"
        for record in records
        for row in record["rows"]
        if row["kind"] in ("eager", "compile", "peer") and row.get("over_ours", 1.0) < 1.0
    ]
    return "\n".join(lines) or "Nowhere in this run."


def absent(records: Sequence[Record]) -> str:
    """List contestants without figures by reason, then configurations without any."""
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for row in record["rows"]:
            if row["status"] != "ok":
                key = (row["name"], f"{row['status']}: {row.get('reason')}")
                reasons[key] = reasons.get(key, 0) + 1
    lines = [f"- {name}, {count} configurations: {reason}" for (name, reason), count in reasons.items()]
    lines += [f"- {record['config']}: {_why_empty(record)}" for record in records if not record["rows"]]
    return "\n".join(lines) or "Every contestant has figures everywhere."


def _why_empty(record: Record) -> str:
    return record.get("error") or record["not_run"]


def _published(records: Sequence[Record]) -> str:
    """Return published figures beside those of this run."""
    rows = []
    for record in records:
        best = sorted(
            (row["median_ms"], row["name"]) for row in record["rows"] if row["kind"] == "ours" and _timed(row)
        )
        found = f"{best[0][1]} {_ms(best[0][0])} ms" if best else "no figure"
        for what, figure, source in record.get("fields", {}).get("published", ()):
            rows.append((record["config"], found, f"{what}: {figure}", source))
    columns = ("configuration", "here, our fastest", "published, not ours", "source")
    return "## Beside published figures\n\n" + markdown_table(columns, rows, texts=4) if rows else ""


def rates_of_card(records: Sequence[Record]) -> str:
    """Return what the denominators reached."""
    lines = [f"- {record['config']}: {found}" for record in records if (found := _rates(record))]
    return "\n".join(lines) or "No figures."


def _rates(record: Record) -> str:
    """Return GB/s of the passes over the logits and TFLOP/s of the matrix products."""
    parts = []
    for row in record["rows"]:
        if row["kind"] == "denominator" and _timed(row) and "live" not in row["name"]:
            fields, seconds = record["fields"], row["median_ms"] / 1e3
            if row["name"].endswith(("GEMM", "GEMMs")):
                count = 3 if row["name"] == "three GEMMs" else 1
                flops = 2 * count * fields["n_tokens"] * fields["vocab"] * fields["hidden"]
                parts.append(f"{row['name']} {flops / seconds / 1e12:.3g} TFLOP/s")
            else:
                rate = bandwidth(fields, row["median_ms"])
                parts.append(f"{row['name']} {rate:.4g} GB/s (one read, one write)")
    return "; ".join(parts)


def bandwidth(fields: dict[str, Any], ms: float) -> float:
    """Return GB/s if the logits are read once and written once in that time."""
    return 2 * fields["n_tokens"] * fields["vocab"] * (4 if fields["dtype"] == "float32" else 2) / ms / 1e6


# --- the headline workloads of a CPU: docs/loss_picture.py shows each side under the allocator where it was fastest ---


def headlines(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each headline workload, one for each allocator."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.get("fields", {}).get("headline") and record["rows"]:
            groups.setdefault(record["workload"], []).append(record)
    return list(groups.values())


def best_of(group: Sequence[Record], name: str) -> tuple[Record, Record] | None:
    """Return the record and the row where that side was fastest."""
    found = [(record, row) for record in group for row in record["rows"] if row["name"] == name and _timed(row)]
    return min(found, key=lambda pair: pair[1]["median_ms"], default=None)


# --- one configuration ------------------------------------------------------------------------------------------------


def table(record: Record) -> str:
    """Return one configuration as a Markdown table."""
    if not record["rows"]:
        return f"No figures: {_why_empty(record)}"
    denominators = record["denominators"]
    columns = [*_COLUMNS, *(f"÷ {name}" for name in denominators), "÷ dapo_kernels", *_MEMORY_COLUMNS]
    rows = [cells(row, denominators) for row in record["rows"]]
    reached = _rates(record)
    notes = [f"Reached: {reached}."] if reached else []
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


def console(record: Record) -> str:
    """Return the medians and ratios for a terminal."""
    if not record["rows"]:
        return f"\n{record['config']}\n  {_why_empty(record)}"
    lines = [f"\n{record['config']}   ({record['wall_s']:.0f} s, ÷ {', ÷ '.join(record['denominators'])}, ÷ ours)"]
    for row in record["rows"]:
        shown = cells(row, record["denominators"])
        figures = [shown[2], "ms", *shown[4:-3]] if _timed(row) else shown[2:4]
        lines.append(f"  {row['name']:34} " + "  ".join(f"{figure:>7}" for figure in figures))
    return "\n".join(lines)


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
