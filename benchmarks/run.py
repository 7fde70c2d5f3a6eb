"""Run a suite and write what it found: ``python benchmarks/run.py [--suite quick|full|gpu] [--seconds S]``.

The files under ``benchmarks/results/`` are rewritten after each configuration, so that an interrupted run leaves what
it has. ``workers.py`` says which process measures what.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine, report, workers  # noqa: E402
from benchmarks.configs import Config  # noqa: E402
from benchmarks.gpu_configs import SUITES  # noqa: E402

_LOG_EVERY_S = 5.0


def main() -> int:
    args = _arguments()
    threads = args.threads or len(os.sched_getaffinity(0))
    configs = [c for c in SUITES[args.suite] if args.only is None or args.only in c.name]
    if not configs:
        known = "\n  ".join(c.name for c in SUITES[args.suite])
        print(f"no configuration of {args.suite!r} contains {args.only!r}; there are\n  {known}", file=sys.stderr)
        return 2
    devices = {c.device for c in configs}
    why = _cannot_run(devices)
    if why is not None:
        print(f"suite {args.suite!r}: {why}", file=sys.stderr)
        return 2
    here = machine.describe(gpu="cuda" in devices)
    started = datetime.now(timezone.utc)
    results: dict[str, Any] = {
        "suite": args.suite,
        "command": machine.command("python", "benchmarks/run.py"),
        "started": started.isoformat(timespec="seconds"),
        "threads": threads,
        "machine": here,
        "records": [],
    }
    base = args.out / f"{args.suite}-{machine.slug(here)}-{started:%Y%m%d-%H%M}"
    print(f"{machine.headline(here)}, load {here['load_average'][0]}; → {base}.*")
    failed = 0
    for record in workers.measured(args.suite, configs, threads, args.seconds, _Progress(configs)):
        failed += report.is_failure(record)
        results["records"].append(record)
        results["load_average_at_end"] = [round(x, 2) for x in os.getloadavg()]
        results["wall_s"] = round((datetime.now(timezone.utc) - started).total_seconds(), 1)
        report.write(results, base)
        print(report.console(record), flush=True)
    print(f"{results['wall_s']:.0f} s; wrote {base}.json, .md, .png")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", choices=sorted(SUITES), default="full")
    parser.add_argument("--only", help="only configurations whose name contains this")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--seconds", type=float, help="stop by then; the report names what was not run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def _cannot_run(devices: set[str]) -> str | None:
    if "cuda" not in devices:
        return None
    return None if torch.cuda.is_available() else "torch finds no CUDA device here"


class _Progress:
    """What a worker does: one line, rewritten, on a terminal; in a log one line every few seconds."""

    def __init__(self, configs: list[Config]) -> None:
        self._configs = configs
        self._began: dict[str, float] = {}
        self._shown = 0.0

    def __call__(self, config: Config, text: str) -> None:
        now = time.time()
        began = self._began.setdefault(config.name, now)
        number = self._configs.index(config) + 1
        line = f"[{number}/{len(self._configs)}] {config.name}  {now - began:4.0f} s  {text}"
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="", flush=True)
        elif now - self._shown > _LOG_EVERY_S:
            self._shown = now
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
