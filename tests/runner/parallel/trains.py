"""What a test starts on several ranks: `python trains.py RECIPE NAME...`: runs of a recipe, one after another. NAME is
`whole`, `background` for one with run.async_save, `killed`, where the other rank kills itself inside of a write,
`failing`, where the engine of the other rank fails when it is probed after a step, `saving`, where the other rank stops
with an error of its own while a save is under way, or `chain` or `tree` for one with the advantages of segments.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from launch import leave
from small import SEGMENTS

from dapo_runner.checkpoint import optimizer
from dapo_runner.cli import main
from dapo_runner.parallel import watch
from dapo_runner.rollout.client import RolloutError
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.run.steps import Run

KILLED_IN = 3  # the write of this checkpoint
FAILS_AFTER = 3  # this step


def die_in_a_write() -> None:
    write, calls = optimizer.HuggingFaceStorageWriter.write_data, iter(range(1, 100))

    def deadly(self: Any, *arguments: Any) -> Any:
        if next(calls) == KILLED_IN and os.environ["RANK"] != "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *arguments)

    optimizer.HuggingFaceStorageWriter.write_data = deadly  # type: ignore[method-assign]


def fail_in_a_probe() -> None:
    probe, calls = SyncProbe.__call__, iter(range(100))

    def generate(*arguments: Any) -> Any:
        raise RolloutError("unwell")

    def probed(self: SyncProbe, engine: Any, learner: Any) -> Any:
        if next(calls) == FAILS_AFTER and os.environ["RANK"] != "0":
            engine.generate = generate
        return probe(self, engine, learner)

    SyncProbe.__call__ = probed  # type: ignore[method-assign]


def stop_beside_a_save() -> None:
    """The save takes longer than ranks wait for each other to stop."""
    write, records, calls = optimizer.HuggingFaceStorageWriter.write_data, Run.training_records, iter(range(100))

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(3)
        return write(self, *arguments)

    def failing(self: Run, *arguments: Any) -> Any:
        if next(calls) == 1 and os.environ["RANK"] != "0":
            raise RolloutError("unwell")
        return records(self, *arguments)

    watch.MEETING = 0.1
    optimizer.HuggingFaceStorageWriter.write_data = slow  # type: ignore[method-assign]
    Run.training_records = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    recipe, *names = sys.argv[1:]
    for name in names:
        if name == "killed":
            die_in_a_write()
        if name == "failing":
            fail_in_a_probe()
            assert main(["train", recipe, "run.name=failing", "run.save_every=0"]) == 1
            break
        if name == "saving":
            stop_beside_a_save()
            assert main(["train", recipe, "run.name=saving", "run.async_save=true"]) == 1
            break
        in_background = name in ("background", "killed")
        overrides = [f"run.name={name}", f"run.async_save={str(in_background).lower()}", *SEGMENTS.get(name, [])]
        assert main(["train", recipe, *overrides]) == 0
    leave()
