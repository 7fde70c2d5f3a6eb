"""What ends a command in one line. Needs no package of the runner's."""

from __future__ import annotations

import os
import sys


def complain(text: str) -> None:
    """To standard error; once, where several ranks have the same to say."""
    if "RANK" in os.environ:
        from dapo_runner.parallel.watch import Watch

        if not Watch().is_first_to_print(text):
            return
    print(f"dapo: {text}", file=sys.stderr, flush=True)
