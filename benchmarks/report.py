"""What was measured, as JSON (everything), a Markdown page and one plot."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from benchmarks import cpu_report, gpu_report, machine

Record = dict[str, Any]

_COLUMNS = ("contestant", "setting", "median ms", "min–max")
_MEMORY_COLUMNS = ("peak extra MiB", "of it gradients", "error: loss · gradient")
_METHOD = """\
Every call is one of a round in which it takes turns with others; inputs are restored before each, outside the clock.
"train" calls are the loss and `torch.autograd.grad` with respect to leaf logits, or leaf hidden states and head: no
accumulation into `.grad`. "forward" calls run under `no_grad`. Freeing the results is outside.

Peak extra, on a CPU: resident high-water mark of one call, alone in a process, minus what was resident before it:
beyond the inputs, returned gradients included (their share in the next column).

Errors are against float64 eager on the same rounded inputs, over sampled rows: of the loss absolute, of the gradient
‖error‖/‖truth‖ (of hidden states and head the larger), of forward log-probs and entropies the largest. A contestant
whose errors exceed what its rounding explains has no figure. No table leaves out a contestant that was faster.
"""


def write(results: dict[str, Any], base: Path) -> None:
    """``base``.json, .md and, with matplotlib, .png; each replaced whole."""
    base.parent.mkdir(parents=True, exist_ok=True)
    _replace(Path(f"{base}.json"), json.dumps(results, indent=1, ensure_ascii=False))
    _replace(Path(f"{base}.md"), markdown(results))
    if importlib.util.find_spec("matplotlib") is not None:
        _plot(results, Path(f"{base}.png"))


def is_failure(record: Record) -> bool:
    """No figures where there should be some: the configuration died, or our own kernels failed or were wrong."""
    bad = (row["status"] in ("failed", "wrong") for row in record["rows"] if row["kind"] == "ours")
    return "error" in record or any(bad)


def markdown(results: dict[str, Any]) -> str:
    here = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    load = f"{here['load_average'][0]:.2f} at the start, {results['load_average_at_end'][0]:.2f} at the end"
    facts = [
        *(gpu_report.facts(here["gpu"]) if "gpu" in here else []),
        f"- machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB",
        f"- instruction set: dapo_kernels {here['isa']}, torch {here['torch_isa']}, oneDNN "
        f"{here.get('onednn_isa') or 'as it chooses'}",
        f"- threads: {results['threads']}; load average {load} (own work included)",
        f"- versions: {versions}, Python {here['python']}",
        f"- commit: {here['commit']}",
        f"- command: `{results['command']}`, started {results['started']}, took {results['wall_s']:.0f} s",
    ]
    parts = [f"# dapo_kernels benchmarks: {results['suite']}", "\n".join(facts), _METHOD]
    if "gpu" in here:
        parts += [gpu_report.METHOD, *gpu_report.sections(results["records"])]
    else:
        parts += [cpu_report.method(), *cpu_report.sections(results["records"])]
    parts += [_losses(results["records"])]
    parts += [f"## {record['config']}\n\n{table(record)}" for record in results["records"]]
    return "\n\n".join(parts) + "\n"


def _losses(records: list[Record]) -> str:
    """Where somebody else's median is below ours, said first."""
    lines = []
    for record in records:
        for row in record["rows"]:
            if row["kind"] in ("eager", "compile", "peer") and row.get("over_ours", 1.0) < 1.0:
                lines.append(f"- {record['config']}: {row['name']} takes {row['over_ours']:.2f} of our time")
    found = "\n".join(lines) if lines else "Nowhere in this run."
    return f"## Where another contestant is faster\n\n{found}"


def table(record: Record) -> str:
    """One configuration as a Markdown table."""
    if not record["rows"]:
        return f"No figures: {_why_empty(record)}"
    denominators = record["denominators"]
    columns = [*_COLUMNS, *(f"÷ {name}" for name in denominators), "÷ dapo_kernels", *_MEMORY_COLUMNS]
    lines = [_line(columns), _line(["---", "---"] + ["---:"] * (len(columns) - 2))]
    apart = [row for row in record["rows"] if row.get("for_gpus") and record["allocator"] is not None]
    lines += [_line(cells(row, denominators)) for row in record["rows"] if row not in apart]
    if apart:
        lines += [_line(["*written for GPUs:*", *[""] * (len(columns) - 1)])]
        lines += [_line(cells(row, denominators)) for row in apart]
    return "\n".join(lines) + gpu_report.rates(record) + _faults(record)


def _faults(record: Record) -> str:
    """What the allocator was seen to do: the setting's name alone would be a claim."""
    found = record.get("page_faults_per_mib")
    if found is None:
        return ""
    return (
        f"\n\nAllocator: {record['allocator']}. Page faults for each MiB: of a block that glibc had before "
        f"{found['malloc']}, of a tensor in fresh pages {found['fresh_tensor']}."
    )


def _why_empty(record: Record) -> str:
    return record.get("error") or record["not_run"]


def cells(row: Record, denominators: list[str]) -> list[str]:
    """A row of the table; without figures, the reason."""
    if "median_ms" not in row:
        return [row["name"], row["setting"], row["status"], row.get("reason") or "", *[""] * (4 + len(denominators))]
    errors = row.get("errors", {})
    gradient = [errors[name] for name in ("gradient", "dweight") if name in errors]
    shown = [errors[name] for name in ("loss", "logprob", "entropy") if name in errors]
    shown += [max(gradient)] if gradient else []
    ours = f"{row['over_ours']:.2f}" if "over_ours" in row else ""
    return [
        row["name"],
        row["setting"],
        _ms(row["median_ms"]),
        f"{_ms(row['min_ms'])}–{_ms(row['max_ms'])}",
        *(f"{row['over'][name]:.2f}" if name in row.get("over", {}) else "" for name in denominators),
        ours,
        _mib(row.get("peak_extra_bytes")) or row.get("memory_reason", ""),
        _mib(row.get("gradient_bytes")),
        " · ".join(f"{error:.0e}" for error in shown),
    ]


def console(record: Record) -> str:
    """The table for a terminal: names and the figures that matter, aligned."""
    if not record["rows"]:
        return f"\n{record['config']}\n  {_why_empty(record)}"
    lines = [f"\n{record['config']}   ({record['wall_s']:.0f} s, ÷ {', ÷ '.join(record['denominators'])}, ÷ ours)"]
    for row in record["rows"]:
        if "median_ms" not in row:
            lines.append(f"  {row['name']:34} {row['status']}: {row.get('reason')}")
            continue
        name, _, median, spread, *ratios, ours, memory, _, error = cells(row, record["denominators"])
        shown = "  ".join(f"{ratio:>7}" for ratio in ratios)
        lines.append(f"  {name:34} {median:>9} ms  {spread:>17}  {shown}  {ours:>7}  {memory:>7}  {error}")
    return "\n".join(lines)


def _line(values: list[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}" if value < 10 * 2**20 else f"{value / 2**20:.0f}"


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def _panels(records: list[Record]) -> list[tuple[str, list[tuple[str, str, float, float]]]]:
    """(title, (label, kind, value, ms) of each side, slowest first) of the headline workloads.

    On a GPU the value is the time over the denominator's; on a CPU over ours under the allocator where that side was
    fastest.
    """
    panels = []
    for record in records:
        if record.get("allocator") is None and record["rows"] and record["fields"]["headline"]:
            rows = [row for row in record["rows"] if row["kind"] != "denominator" and "over_denominator" in row]
            sides = [(row["name"], row["kind"], row["over_denominator"], row["median_ms"]) for row in rows]
            panels.append((f"{record['config']}: time ÷ {record['denominators'][0]}", sides))
    for group in cpu_report.headlines([record for record in records if record.get("allocator") is not None]):
        sides = []
        for name in dict.fromkeys(row["name"] for row in group[0]["rows"]):
            best = cpu_report.best_of(group, name)
            if best is not None and "over_ours" in best[1]:
                label = f"{name} ({best[0]['allocator']})"
                sides.append((label, best[1]["kind"], best[1]["over_ours"], best[1]["median_ms"]))
        panels.append((f"{group[0]['workload']}: time ÷ dapo_kernels under the same allocator", sides))
    return [(title, sorted(sides, key=lambda side: -side[2])) for title, sides in panels if sides]


def _plot(results: dict[str, Any], path: Path) -> None:
    """One panel for each headline workload, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"denominator": "#bdc3c7", "ours": "#c0392b", "eager": "#7f8c8d", "compile": "#2c3e50", "peer": "#2980b9"}
    panels = _panels(results["records"])
    if not panels:
        return
    heights = [len(sides) + 1.0 for _, sides in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 1.2 + 0.32 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (title, sides) in zip(axes[:, 0], panels, strict=True):
        values = [value for _, _, value, _ in sides]
        drawn = axis.barh([side[0] for side in sides], values, color=[colours[kind] for _, kind, _, _ in sides])
        axis.bar_label(drawn, [f"{value:.2f}×  ({_ms(ms)} ms)" for _, _, value, ms in sides], padding=3, fontsize=8)
        axis.set_xscale("log")
        axis.set_xlim(0.8 * min(1.0, *values), max(values) * 4)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.tick_params(axis="y", labelsize=8)
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    here = results["machine"]
    figure.suptitle(f"{machine.headline(here)}, {here['commit']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
