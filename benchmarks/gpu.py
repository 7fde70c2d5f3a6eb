"""The first hour on a GPU, in stages; ``make gpu`` calls this after it made the environment (``gpu.sh``).

    python -m benchmarks.gpu [--stage 2,3] [--seconds 540] [--results FOLDER]

1 card       the gpu-marked tests
2 logits     the kernels from logits against the peers: vocabularies from 32k to 262k, 4096 to 65536 tokens
3 hidden     from hidden states, at the shapes of published figures too
4 tuning     launch parameters of the Triton loss; which backend should serve which kind of call (``decide.py``)
5 runner     a training run and the trainer alone: tokens per second; the gap between sampler and trainer
6 sanitizer  the CUDA kernels under compute-sanitizer
7 profile    one call of each row kernel under Nsight Compute: what limits it

Each call goes on with what is not finished while time is left. A stage writes its files into the folder of results as
it goes; ``gpu-state.json`` there has the commands that were run. Other sources start anew; another commit with the same
sources does not. What failed or was left out is tried again by each call. ``make gpu-rehearsal`` runs all of it on a
CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import decide, machine, trainer
from benchmarks.configs import REHEARSAL, SUITES
from benchmarks.machine import ROOT
from benchmarks.report import is_failure
from benchmarks.run import is_finished, run_suite
from dapo_runner.files import atomic_write
from dapo_runner.packages import missing_for_runner

LEAST_S = 5 if REHEARSAL else 30  # a stage is not started with less time
TRIES = 2  # what was stopped so often is not tried again
ALIKE = slice(1 if REHEARSAL else None)  # the first of commands whose tests a rehearsal would skip all
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZED = ("tests/kernels/test_gpu_execution.py", "-k", "every_kernel_of_the_cuda_backend and 32003")
STOPPED = (124, 137)  # exit statuses of ``timeout``
PASSED = (0, 5)  # 5: pytest ran no test


class LeftOutError(Exception):
    """Something that a stage needs is absent."""


@dataclass
class State:
    """The commands that were run with these sources, by the file of their output: tries and exit status."""

    folder: Path
    commands: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> State:
        path = folder / "gpu-state.json"
        saved = json.loads(path.read_text()) if path.exists() else {}
        return cls(folder, saved["commands"] if saved.get("sources") == machine.sources() else {})

    def save(self) -> None:
        saved = {"commit": machine.commit(), "sources": machine.sources(), "commands": self.commands}
        atomic_write(self.folder / "gpu-state.json", json.dumps(saved, indent=1))

    def is_done(self, name: str) -> bool:
        """Return whether a command passed, or was stopped too often. One that failed is run again by the next call."""
        tried = self.commands.get(name, {"tries": 0, "status": STOPPED[0]})
        return tried["status"] in PASSED or (tried["status"] in STOPPED and tried["tries"] >= TRIES)

    def run_logged(self, commands: dict[str, list[str]], seconds: float) -> bool:
        """Run the commands that are not done, each with its share of the time that is left. Return whether all are."""
        deadline = time.monotonic() + seconds
        left = [name for name in commands if not self.is_done(name)]
        for number, name in enumerate(left):
            share = (deadline - time.monotonic()) / (len(left) - number)
            if share > 1:
                self._log(name, commands[name], share)
        return all(map(self.is_done, commands))

    def _log(self, name: str, command: list[str], seconds: float) -> None:
        """Run a command with its output in a file. It is interrupted, so that pytest shows its failures."""
        # Saved before: the machine may go away.
        tried = self.commands.setdefault(name, {"tries": 0})
        tried |= {"tries": tried["tries"] + 1, "status": STOPPED[0]}
        self.save()
        path = self.folder / name
        with path.open("w") as log:
            command = ["timeout", "--signal=INT", "--kill-after=15", f"{seconds:.1f}", *command]
            tried["status"] = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        self.save()
        last = " | ".join(path.read_text().strip().splitlines()[-3:])
        print(f"{name}: exit status {tried['status']}: {last}", flush=True)

    def failures(self) -> list[str]:
        """Return the files that show failing tests, or kernels of ours that failed or were wrong."""
        status = {name: tried["status"] for name, tried in self.commands.items()}
        stopped = {name for name in status if status[name] in STOPPED and not self.is_done(name)}  # it is resumed
        failed = [name for name in status.keys() - stopped if status[name] not in PASSED]
        for path in self.folder.glob("gpu-*.json"):
            if any(map(is_failure, json.loads(path.read_text()).get("records", ()))):
                failed.append(path.name)
        return sorted(failed)


Stage = Callable[[State, float], bool]  # whether it is finished


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *arguments]


def card(state: State, seconds: float) -> bool:
    """Run each file with GPU tests; those of the runner where its packages are installed."""
    folders = ["kernels"] + ([] if missing_for_runner() else ["runner"])
    files = [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    marked = [path for path in files if "mark.gpu" in path.read_text()]
    return state.run_logged({f"gpu-1-{path.stem}.txt": _pytest(str(path)) for path in marked[ALIKE]}, seconds)


def _slug() -> str:
    return machine.slug(machine.describe(gpu=not REHEARSAL))


def measure(suite: str, state: State, seconds: float) -> bool:
    base = state.folder / f"{suite}-{_slug()}"
    return is_finished(run_suite(suite, SUITES[suite], base, seconds), SUITES[suite])


def tuning(state: State, seconds: float) -> bool:
    finished = measure("gpu-tuning", state, seconds)
    files = {
        path.name: json.loads(path.read_text()) for path in sorted(state.folder.glob(f"gpu-[lht]*-{_slug()}.json"))
    }
    same = {name: found for name, found in files.items() if found["machine"]["sources"] == machine.sources()}
    if same:
        text = decide.text(list(same.values()), list(same))
        (state.folder / "gpu-4-defaults.txt").write_text(f"{text}\n")
        print(text, flush=True)
    return finished


def runner(state: State, seconds: float) -> bool:
    """Measure the trainer alone, and a run."""
    if absent := missing_for_runner():
        raise LeftOutError(f"{', '.join(absent)} not installed")
    command = [sys.executable, "-m", "benchmarks.trainer"]
    return state.run_logged({f"gpu-5-{name}.txt": [*command, name] for name in (*trainer.ROWS, "run")}, seconds)


def sanitizer(state: State, seconds: float) -> bool:
    """Run the CUDA kernels on rows of two and four slices under each checker of the toolkit."""
    if not REHEARSAL and shutil.which("compute-sanitizer") is None:
        raise LeftOutError("compute-sanitizer is not on the PATH")
    commands = {}
    for tool in SANITIZER_TOOLS[ALIKE]:
        checked = ["compute-sanitizer", "--error-exitcode", "1", "--print-limit", "20", "--tool", tool]
        commands[f"gpu-6-{tool}.txt"] = [*([] if REHEARSAL else checked), *_pytest(*SANITIZED)]
    return state.run_logged(commands, seconds)


def profile(state: State, seconds: float) -> bool:
    """Run the row kernels under Nsight Compute, which toolkits do not put on the PATH."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *sorted(glob.glob("/opt/nvidia/nsight-compute/*"))])
    profiler = shutil.which("ncu", path=places)
    if not REHEARSAL and profiler is None:
        raise LeftOutError("ncu is neither on the PATH nor in /opt/nvidia/nsight-compute")
    under = [str(profiler), "--clock-control", "none", "--set", "full", "--print-details", "all"]
    under += ["--kernel-name", "regex:row_|cluster_|sweep_|slice_"]
    command = [*([] if REHEARSAL else under), sys.executable, "-m", "benchmarks.profiled"]
    return state.run_logged({"gpu-7-profile.txt": command}, seconds)


STAGES: dict[str, Stage] = {
    "card": card,
    "logits": lambda state, seconds: measure("gpu-logits", state, seconds),
    "hidden": lambda state, seconds: measure("gpu-hidden", state, seconds),
    "tuning": tuning,
    "runner": runner,
    "sanitizer": sanitizer,
    "profile": profile,
}


def run_stages(
    state: State, seconds: float, only: Sequence[int] | None = None, stages: Mapping[str, Stage] = STAGES
) -> dict[str, str]:
    """Run the stages, or those named, in that order. What a stage has finished it does not do again.

    Return how each ended: finished, unfinished, not started, left out or failed, these two with the reason.
    """
    deadline = time.monotonic() + seconds
    ended = dict.fromkeys(stages, "not started")
    for number in only or range(1, 1 + len(stages)):
        name, left = list(stages)[number - 1], deadline - time.monotonic()
        if left < LEAST_S:
            break
        print(f"\n=== stage {number}, {name}: {left:.0f} s left", flush=True)
        try:
            ended[name] = "finished" if stages[name](state, left) else "unfinished"
        except LeftOutError as error:
            ended[name] = f"left out: {error}"
        except Exception as error:
            traceback.print_exc()
            ended[name] = f"failed: {type(error).__name__}: {error}"
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=lambda text: [int(x) for x in text.split(",")], help="only these, in order")
    parser.add_argument("--seconds", type=float, default=540, help="of this call")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    state = State.load(options.results)
    ended = run_stages(state, options.seconds, options.stage)
    print()
    failed = state.failures()
    for number, (name, how) in enumerate(ended.items(), 1):
        files = ", ".join(file for file in failed if file.startswith((f"gpu-{number}-", f"gpu-{name}-")))
        print(f"stage {number} {name:10} {f'failed: see {files}' if files else how}")
    print(f"files in {options.results}; the same command goes on with what is not finished")
    return 1 if failed or any(how.startswith("failed") for how in ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
