"""Run a suite and write what it found: ``python benchmarks/run.py [--suite quick|full]``.

Every configuration has a process of its own. The files under ``benchmarks/results/`` are rewritten after each, so that
an interrupted run leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine, report  # noqa: E402
from benchmarks.configs import SUITES, Config  # noqa: E402

_LOG_EVERY_S = 5.0
# The instruction set an older processor would give: to dapo_kernels, to eager PyTorch and to torch.compile.
_ISA_ENVIRONMENT = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_CPP_SIMDLEN": "256"},
    "portable": {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CPP_SIMDLEN": "1"},
}


def main() -> int:
    args = _arguments()
    threads = args.threads or len(os.sched_getaffinity(0))
    configs = [c for c in SUITES[args.suite] if args.only is None or args.only in c.name]
    if not configs:
        known = "\n  ".join(c.name for c in SUITES[args.suite])
        print(f"no configuration of {args.suite!r} contains {args.only!r}; there are\n  {known}", file=sys.stderr)
        return 2
    here = machine.describe()
    started = datetime.now(timezone.utc)
    results: dict[str, Any] = {
        "suite": args.suite,
        "command": shlex.join(["python", *sys.argv]),
        "started": started.isoformat(timespec="seconds"),
        "threads": threads,
        "machine": here,
        "records": [],
    }
    base = args.out / f"{args.suite}-{machine.slug(here)}-{started:%Y%m%d-%H%M}"
    print(f"{here['cpu']}, {here['cores']} cores, {here['isa']}, load {here['load_average'][0]}; → {base}.*")
    failed = 0
    for number, config in enumerate(configs, 1):
        head = f"[{number}/{len(configs)}] {config.name}"
        record = _in_worker(args.suite, config, threads, head)
        failed += "error" in record
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
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def _in_worker(suite: str, config: Config, threads: int, head: str) -> dict[str, Any]:
    """The record of a configuration; one that died has an "error" instead of rows."""
    index = SUITES[suite].index(config)
    command = [sys.executable, "-m", "benchmarks.worker", suite, str(index), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # Inductor's pool of compiling processes would be forked from ours; there is one kernel to compile at a time.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(ROOT) if not path else f"{ROOT}{os.pathsep}{path}"
    if config.isa is not None:
        environment |= {"DAPO_KERNELS_ISA": config.isa, **_ISA_ENVIRONMENT[config.isa]}
    began = time.time()
    record: dict[str, Any] | None = None
    shown = 0.0
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=log)
        assert worker.stdout is not None
        for line in worker.stdout:
            message: dict[str, Any] = json.loads(line) if line.startswith("{") else {"progress": line.strip()}
            record = message.get("record")
            # A terminal has one line, rewritten; a log gets one line every few seconds.
            if record is None and (sys.stdout.isatty() or time.time() - shown > _LOG_EVERY_S):
                shown = time.time()
                _progress(f"{head}  {shown - began:4.0f} s  {message['progress']}")
        code = worker.wait()
        log.seek(0)
        last_words = " | ".join(log.read().splitlines()[-3:])
    return record or {"config": config.name, "rows": [], "error": f"worker ended with {code}: {last_words}"}


def _progress(text: str) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)
    else:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
