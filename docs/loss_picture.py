"""Draw time and memory of each side of two headline workloads: the picture of the README.

    python -m docs.loss_picture benchmarks/results/full-….json docs/loss.png

Time is that under the allocator where a side is fastest, over that of our default call under the same one. Memory is
the least of all allocators: the fast ones keep freed blocks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OURS = "dapo_kernels, new gradient"  # the default call, where there is another one
WORKLOADS = {
    "From hidden states (bf16, N = 2048, V = 49152, H = 576)": "hidden bfloat16 N=2048 V=49152 H=576",
    "From logits (bf16, N = 2048, V = 49152)": "logits bfloat16 N=2048 V=49152",
}
NAMES = {OURS: "dapo_kernels", "linear_cross_entropy": "torch linear_cross_entropy"}
NAMES["linear_cross_entropy, chunked"] = "torch linear_cross_entropy, chunked"


def sides(records: list[dict[str, Any]], workload: str) -> list[tuple[str, float, float]]:
    """Return (label, time ÷ ours, peak MiB) of each side, slowest first."""
    group = [record for record in records if record["workload"] == workload and record["rows"]]
    names = list(dict.fromkeys(row["name"] for row in group[0]["rows"] if row["kind"] != "denominator"))
    ours = OURS if OURS in names else "dapo_kernels"
    found = []
    for name in names:
        timed = [
            (record, row) for record in group for row in record["rows"] if row["name"] == name and "median_ms" in row
        ]
        if not timed or (ours == OURS and name == "dapo_kernels"):
            continue
        record, row = min(timed, key=lambda pair: pair[1]["median_ms"])
        own = next(other for other in record["rows"] if other["name"] == ours)
        least = min(other["peak_extra_bytes"] for _, other in timed)
        found.append((NAMES.get(name, name), row["median_ms"] / own["median_ms"], least / 2**20))
    return sorted(found, key=lambda side: -side[1])


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {title: sides(results["records"], workload) for title, workload in WORKLOADS.items()}
    heights = [len(rows) + 1.2 for rows in panels.values()]
    figure, axes = pyplot.subplots(len(panels), 2, figsize=(10, 0.33 * sum(heights)), height_ratios=heights)
    for (time, memory), (title, rows) in zip(axes, panels.items(), strict=True):
        labels = [label for label, _, _ in rows]
        colors = ["#c0392b" if label == "dapo_kernels" else "#7f8c8d" for label in labels]
        for axis, column, form in ((time, 1, "{:.2f}×"), (memory, 2, "{:.0f} MiB")):
            values = [row[column] for row in rows]
            axis.bar_label(axis.barh(labels, values, color=colors), [form.format(value) for value in values], padding=3)
            axis.set_xlim(0, 1.25 * max(values))
            axis.spines[["top", "right", "bottom"]].set_visible(False)
            axis.set_xticks([])
        memory.set_yticks([])
        time.set_title(f"{title}\ntime, over that of dapo_kernels", fontsize=10, loc="left")
        memory.set_title("\npeak memory beyond the inputs", fontsize=10, loc="left")
    here = results["machine"]
    figure.supxlabel(f"{here['cpu']}, {here['cores']} cores, {here['isa']}, commit {here['commit']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
