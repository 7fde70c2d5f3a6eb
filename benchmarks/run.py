"""Measure a suite and write its results: ``python benchmarks/run.py [--suite quick|full|…] [--seconds S]``.

The configurations run in processes of their own, so that one that dies leaves the others' figures. One process measures
one configuration after another as long as they need the same environment; after it dies a new one goes on with the
next. The files of results are rewritten after each configuration. ``harness.py`` says how a figure is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import allocators, configs, machine, report  # noqa: E402
from benchmarks.configs import SUITES, Config  # noqa: E402

_LAST_LINES = 3  # of a process that died, for its record
_TRIES = 2  # a configuration that time or a crash stopped so often is not tried again
_LOG_EVERY_S = 5.0

Record = dict[str, Any]
Progress = Callable[[Config, str], None]
Command = Callable[[str, Sequence[Config], int], list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", choices=sorted(SUITES), default="full")
    parser.add_argument("--only", help="only configurations whose name contains this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, help="stop after this time; the report names what was not run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--worker", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return _work(args.suite, args.threads, args.worker)
    chosen = [c for c in SUITES[args.suite] if args.only is None or args.only in c.name]
    if not chosen:
        known = "\n  ".join(c.name for c in SUITES[args.suite])
        print(f"no configuration of {args.suite!r} contains {args.only!r}; expected one of\n  {known}", file=sys.stderr)
        return 2
    if needs_gpu(chosen) and not torch.cuda.is_available():
        print(f"suite {args.suite!r} requires a CUDA device; torch finds none here", file=sys.stderr)
        return 2
    base = args.out / f"{args.suite}-{machine.slug(machine.describe(needs_gpu(chosen)))}-{_now():%Y%m%d-%H%M}"
    results = run_suite(args.suite, chosen, base, args.seconds, args.threads)
    return 1 if any(map(report.is_failure, results["records"])) else 0


def needs_gpu(chosen: Sequence[Config]) -> bool:
    return any(config.device == "cuda" for config in chosen) and not configs.REHEARSAL


def run_suite(
    suite: str,
    chosen: Sequence[Config],
    base: Path,
    seconds: float | None = None,
    threads: int | None = None,
    command: Command | None = None,
) -> dict[str, Any]:
    """Measure configurations and write ``base``.json and ``base``.md after each.

    Figures of these sources that ``base``.json has are kept, and the rest is measured; what was stopped comes last.
    """
    threads = threads or len(os.sched_getaffinity(0))
    here, started, path = machine.describe(needs_gpu(chosen)), _now(), Path(f"{base}.json")
    old = json.loads(path.read_text()) if path.exists() else {"machine": {}}
    if old["machine"].get("sources") != here["sources"]:
        old = {"records": [], "wall_s": 0.0}
    records = {record["config"]: record for record in old["records"]}
    tries = {name: record.get("tries", 0) for name, record in records.items()}
    left = [c for c in chosen if not records.get(c.name, {}).get("rows") and tries.get(c.name, 0) < _TRIES]
    left.sort(key=lambda config: tries.get(config.name, 0))
    results: dict[str, Any] = {
        "suite": suite,
        "command": machine.command("python", f"benchmarks/{Path(sys.argv[0]).name}"),
        "started": started.isoformat(timespec="seconds"),
        "threads": threads,
        "machine": here,
        "rehearsal": configs.REHEARSAL,
    }
    print(f"{machine.headline(here)}; {len(left)} configurations → {base}.*", flush=True)
    for record in measured(suite, left, threads, seconds, _log_progress([c.name for c in left]), command):
        record["tries"] = tries.get(record["config"], 0) + record.get("tries", 1)
        records[record["config"]] = record
        results["records"] = [records[c.name] for c in chosen if c.name in records]
        results["load_average_at_end"] = [round(x, 2) for x in os.getloadavg()]
        results["wall_s"] = round(old["wall_s"] + (_now() - started).total_seconds(), 1)
        report.write(results, base)
        print(report.console(record), flush=True)
    return results if "records" in results else json.loads(path.read_text())


def is_finished(base: Path, chosen: Sequence[Config]) -> bool:
    """Return whether nothing is left to measure: every configuration has figures or was tried often enough."""
    path = Path(f"{base}.json")
    records = {r["config"]: r for r in json.loads(path.read_text())["records"]} if path.exists() else {}
    return all(c.name in records and (records[c.name]["rows"] or records[c.name]["tries"] >= _TRIES) for c in chosen)


def measured(
    suite: str,
    chosen: Sequence[Config],
    threads: int,
    seconds: float | None,
    progress: Progress,
    command: Command | None = None,
) -> Iterator[Record]:
    """Yield the record of each configuration as soon as it exists.

    Args:
        seconds: time for all of them. What is under way then is stopped; it and the rest have a "not_run" reason in
            place of figures. ``None``: no limit.
        progress: called with what a process is doing.
        command: the process for some configurations; by default this module as a worker.
    """
    began = time.monotonic()
    left = list(chosen)
    tries = 0  # of the configuration that time stopped
    while left:
        remaining = None if seconds is None else seconds - (time.monotonic() - began)
        if remaining is not None and remaining <= 0:
            break
        served = sum(1 for _ in itertools.takewhile(lambda config: _kind(config) == _kind(left[0]), left))
        for record in _in_worker(
            (command or _command)(suite, left[:served], threads), left[:served], threads, remaining, progress
        ):
            left.pop(0)
            yield record
        tries = 1
    for config in left:
        yield {
            "config": config.name,
            "rows": [],
            "not_run": f"the {seconds:.0f} s of this run were over",
            "tries": tries,
        }
        tries = 0


def _in_worker(
    command: list[str], chosen: Sequence[Config], threads: int, seconds: float | None, progress: Progress
) -> Iterator[Record]:
    """Yield records until the worker ends: of all configurations, or with an "error" for the one in which it died.

    A worker whose time is over is stopped, and the configuration under way has no record.
    """
    done = 0
    if seconds is not None:
        command = ["timeout", "--signal=KILL", f"{seconds:.1f}", *command]
    environment = _environment(chosen[0], threads)
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=log)
        assert worker.stdout is not None
        for line in worker.stdout:
            message: dict[str, Any] = json.loads(line) if line.startswith("{") else {"progress": line.strip()}
            if "record" in message:
                done += 1
                yield message["record"]
            else:
                progress(chosen[min(done, len(chosen) - 1)], message["progress"])
        code = worker.wait()
        log.seek(0)
        last_words = " | ".join(log.read().splitlines()[-_LAST_LINES:])
    is_overdue = seconds is not None and code in (137, -9)  # of ``timeout``, which may have killed itself too
    if done < len(chosen) and not is_overdue:
        yield {"config": chosen[done].name, "rows": [], "error": f"worker ended with {code}: {last_words}"}


def _work(suite: str, threads: int, indices: Sequence[int]) -> int:
    """Measure in this process. Standard output has a JSON object a line: {"progress": …} or {"record": …}."""
    from benchmarks.harness import measure

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    for index in indices:
        send({"record": measure(SUITES[suite][index], threads, lambda text: send({"progress": text}))})
    return 0


def _command(suite: str, chosen: Sequence[Config], threads: int) -> list[str]:
    indices = [str(SUITES[suite].index(config)) for config in chosen]
    options = ["--suite", suite, "--threads", str(threads)]
    return [sys.executable, "-m", "benchmarks.run", *options, "--worker", *indices]


def _kind(config: Config) -> tuple[str, ...]:
    """Configurations of one kind can share a process."""
    return ("cuda",) if config.device == "cuda" else (config.allocator,)


def _environment(config: Config, threads: int) -> dict[str, str]:
    environment = dict(os.environ) if config.device == "cuda" else allocators.environment(config.allocator)
    environment["OMP_NUM_THREADS"] = str(threads)
    # Inductor's pool of compiling processes would be forked from ours; there is one kernel to compile at a time.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(ROOT) if not path else f"{ROOT}{os.pathsep}{path}"
    return environment


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _log_progress(names: Sequence[str]) -> Progress:
    """Return a function that prints what a worker does, a line every few seconds."""
    shown = 0.0

    def log(config: Config, text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown > _LOG_EVERY_S:
            shown = time.monotonic()
            print(f"[{names.index(config.name) + 1}/{len(names)}] {config.name}  {text}", flush=True)

    return log


if __name__ == "__main__":
    sys.exit(main())
