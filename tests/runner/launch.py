"""Programs on several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def torchrun(
    n: int, *arguments: str | Path, timeout: float = 300.0, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """``n`` ranks of a program, or ``-m`` a module; gloo, one thread each."""
    command = launcher(n, *arguments, python=python) if n > 1 else [python, *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)


def launcher(n: int, *arguments: str | Path, python: str = sys.executable) -> list[str]:
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return [*torchrun, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Of a process that is not launched yet, with the tests' helpers on its path."""
    paths = [str(TESTS.parent.parent), str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
