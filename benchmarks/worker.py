"""One configuration in a process of its own: ``python -m benchmarks.worker SUITE INDEX THREADS``.

Standard output carries JSON lines: {"progress": …} while it runs, {"record": …} at the end.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.configs import SUITES
from benchmarks.harness import measure


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    suite, index, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    record = measure(SUITES[suite][index], threads, lambda text: _say({"progress": text}))
    _say({"record": record})


if __name__ == "__main__":
    main()
