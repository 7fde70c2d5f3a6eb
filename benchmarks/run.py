"""Measure a suite and write its results: ``python benchmarks/run.py [--suite full|sweep|long|smoke]``.

The configurations run in processes of their own, so that one that dies leaves the others' figures. One process measures
one configuration after another as long as they need the same environment; after it dies a new one goes on with the
next. The files of results are rewritten after each contestant. ``harness.py`` says how a figure is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import allocators, machine, report  # noqa: E402
from benchmarks.configs import REHEARSAL, SUITES, Config  # noqa: E402

THREADS = 1 if REHEARSAL else len(os.sched_getaffinity(0))
_LAST_LINES = 3  # of a process that died, for its record
_TRIES = 2  # a configuration that time or a crash stopped so often is not tried again
_MEMORY_SHARE = 0.85  # of the available memory, which a process may take

Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", choices=sorted(SUITES), default="full")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--worker", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = SUITES[args.suite]
    if args.worker is not None:
        return _work([chosen[index] for index in args.worker])
    if needs_gpu(chosen) and not torch.cuda.is_available():
        print(f"suite {args.suite!r} requires a CUDA device; torch finds none here", file=sys.stderr)
        return 2
    base = args.out / machine.file_name(args.suite, machine.describe(needs_gpu(chosen)))
    results = run_suite(args.suite, chosen, base)
    return 1 if any(map(report.is_failure, results["records"])) else 0


def needs_gpu(chosen: Sequence[Config]) -> bool:
    return any(config.tensor_device == "cuda" for config in chosen)


def run_suite(suite: str, chosen: Sequence[Config], base: Path, seconds: float = float("inf")) -> dict[str, Any]:
    """Measure configurations and write ``base``.json and ``base``.md after each contestant.

    Figures of these sources that ``base``.json has are kept, and the rest is measured; what was stopped comes last.
    """
    began, here, path = time.monotonic(), machine.describe(needs_gpu(chosen)), Path(f"{base}.json")
    results = json.loads(path.read_text()) if path.exists() else {"machine": {}}
    if results["machine"].get("sources") != here["sources"]:
        results = {"records": [], "wall_s": 0.0}
    records = {record["config"]: record for record in results["records"]}
    tries = {config.name: records.get(config.name, {}).get("tries", 0) for config in chosen}
    left = sorted((c for c in chosen if not _is_done(records.get(c.name))), key=lambda config: tries[config.name])
    print(f"{machine.slug(here)}; {len(left)} configurations → {base}.*", flush=True)
    before = results["wall_s"]
    for record in measured(suite, left, seconds):
        record["tries"] += tries[record["config"]]
        if not record["whole"]:  # the rows of an earlier try stay if they are more
            old = records.get(record["config"], record)
            kept = {key: value for key, value in old.items() if key not in ("error", "not_run")}
            record = {**kept, **record, "rows": max(record["rows"], old["rows"], key=_reached)}
        records[record["config"]] = record
        results["records"] = [records[config.name] for config in chosen if config.name in records]
        results |= {"suite": suite, "threads": THREADS, "machine": here}
        results["wall_s"] = round(before + time.monotonic() - began, 1)
        report.write(results, base)
        if record["whole"] or "not_run" in record or "error" in record:
            print(f"\n{record['config']}\n\n{report.table(record)}", flush=True)
    return results


def is_finished(results: dict[str, Any], chosen: Sequence[Config]) -> bool:
    """Return whether nothing is left to measure: every configuration has figures or was tried often enough."""
    records = {record["config"]: record for record in results["records"]}
    return all(_is_done(records.get(config.name)) for config in chosen)


def _is_done(record: Record | None) -> bool:
    return record is not None and (record["whole"] or record["tries"] >= _TRIES)


def _reached(rows: Sequence[Record]) -> int:
    return sum(row["status"] != "not reached" for row in rows)


def measured(suite: str, chosen: Sequence[Config], seconds: float) -> Iterator[Record]:
    """Yield the record of each configuration after each contestant.

    What is under way when the seconds are over is stopped; it and the rest have a "not_run" reason in place of figures.
    """
    deadline, left, tries = time.monotonic() + seconds, list(chosen), 0
    while left and time.monotonic() < deadline:
        served = list(itertools.takewhile(lambda config: _kind(config) == _kind(left[0]), left))
        for record in _in_worker(_command(suite, served), served, deadline - time.monotonic()):
            if record["whole"] or "error" in record:
                left.pop(0)
            yield {**record, "tries": 1}
        tries = 1
    for config in left:  # the first was under way
        why = f"the {seconds:.0f} s were over"
        yield {"config": config.name, "rows": [], "whole": False, "not_run": why, "tries": tries}
        tries = 0


def _in_worker(command: list[str], chosen: Sequence[Config], seconds: float) -> Iterator[Record]:
    """Yield records until the worker ends: of all configurations, or with an "error" for the one in which it died.

    A worker whose time is over is stopped, and the configuration under way has no record.
    """
    names = [config.name for config in chosen]
    if seconds < float("inf"):
        command = ["timeout", "--signal=KILL", f"{seconds:.1f}", *command]
    with tempfile.TemporaryFile("w+") as log:
        environment = _environment(chosen[0])
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=log)
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):  # libraries print too
                record = json.loads(line)
                names = names[record["whole"] :]
                yield record
        code = worker.wait()
        log.seek(0)
        last_words = " | ".join(log.read().splitlines()[-_LAST_LINES:])
    is_overdue = seconds < float("inf") and code in (137, -9)  # of ``timeout``, which may have killed itself too
    if names and not is_overdue:
        yield {"config": names[0], "rows": [], "whole": False, "error": f"worker ended with {code}: {last_words}"}


def _work(chosen: Sequence[Config]) -> int:
    """Measure in this process. Standard output has a record a line, as JSON."""
    from benchmarks.harness import measure

    if chosen[0].tensor_device == "cpu":  # a tensor that does not fit raises, instead of filling the machine's memory
        free = machine.bytes_of("/proc/self/status", "VmData") + machine.bytes_of("/proc/meminfo", "MemAvailable")
        resource.setrlimit(resource.RLIMIT_DATA, (int(_MEMORY_SHARE * free), resource.RLIM_INFINITY))
    for config in chosen:
        for record in measure(config, THREADS):
            print(json.dumps(record), flush=True)
    return 0


def _command(suite: str, chosen: Sequence[Config]) -> list[str]:
    indices = [str(SUITES[suite].index(config)) for config in chosen]
    return [sys.executable, "-m", "benchmarks.run", "--suite", suite, "--worker", *indices]


def _kind(config: Config) -> tuple[str, str]:
    """Configurations of one kind can share a process."""
    return config.device, config.allocator


def _environment(config: Config) -> dict[str, str]:
    environment = dict(os.environ) if config.device == "cuda" else allocators.environment(config.allocator)
    environment["OMP_NUM_THREADS"] = str(THREADS)
    # Inductor's pool of compiling processes would be forked from ours; there is one kernel to compile at a time.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    return environment


if __name__ == "__main__":
    sys.exit(main())
