"""What a test starts on several ranks: `python trains.py RECIPE NAME...`: runs of a recipe, one after another. NAME is
`whole`, `background` for one with run.async_save, `killed`, where the other rank kills itself inside of a write, or
`chain` or `tree` for one with the advantages of segments.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from launch import leave
from small import SEGMENTS

from dapo_runner.checkpoint import sharded
from dapo_runner.cli import main

KILLED_IN = 3  # the write of this checkpoint


def die_in_a_write() -> None:
    write, calls = sharded.HuggingFaceStorageWriter.write_data, iter(range(1, 100))

    def deadly(self: Any, *arguments: Any) -> Any:
        if next(calls) == KILLED_IN and os.environ["RANK"] != "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *arguments)

    sharded.HuggingFaceStorageWriter.write_data = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    recipe, *names = sys.argv[1:]
    for name in names:
        if name == "killed":
            die_in_a_write()
        in_background = name in ("background", "killed")
        overrides = [f"run.name={name}", f"run.async_save={str(in_background).lower()}", *SEGMENTS.get(name, [])]
        assert main(["train", recipe, *overrides]) == 0
    leave()
