"""Programs on several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def torchrun(n: int, *arguments: str | Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """``n`` ranks of a program, or ``-m`` a module; gloo, one thread each, with the tests' helpers on their path."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    paths = [str(TESTS.parent.parent), str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    given = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
    command = [python, *launcher, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=300)
