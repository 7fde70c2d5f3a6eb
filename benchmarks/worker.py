"""Configurations in a process of their own: ``python -m benchmarks.worker SUITE THREADS INDEX…``.

Standard output carries JSON lines: {"progress": …} while it runs, {"record": …} after each configuration.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.gpu_configs import SUITES
from benchmarks.harness import measure


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    suite, threads = sys.argv[1], int(sys.argv[2])
    for index in sys.argv[3:]:
        record = measure(SUITES[suite][int(index)], threads, lambda text: _say({"progress": text}))
        _say({"record": record})


if __name__ == "__main__":
    main()
