"""The first hour on a GPU, in stages; ``make gpu`` calls this after it made the environment (``gpu.sh``).

    python -m benchmarks.gpu [--stage 2,3] [--seconds 540] [--results FOLDER]

1 card       the gpu-marked tests; bandwidth of a copy and rates of matrix products on this card
2 logits     the kernels from logits against the peers: vocabularies from 32k to 262k, 4096 to 65536 tokens
3 hidden     from hidden states, at the shapes of published figures too
4 tuning     launch parameters of the Triton loss; which backend should serve which kind of call (``decide.py``)
5 runner     a training run and the trainer alone: tokens per second; the gap between sampler and trainer
6 sanitizer  the CUDA kernels under compute-sanitizer

Each call resumes the stages that are not finished and goes on while time is left. A stage writes its files into the
folder of results as it goes; ``gpu-state.json`` there has the states. Other sources start anew; another commit with the
same sources does not. What is left out because something is absent is tried again by each call. ``make gpu-rehearsal``
runs all of it on a CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import decide, machine, trainer
from benchmarks.bench_ranks import events_of, recipe, train
from benchmarks.configs import REHEARSAL, SUITES
from benchmarks.report import REHEARSAL_WARNING, is_failure
from benchmarks.run import ROOT, is_finished, run_suite

MODEL = ROOT / "models" / "smollm2-135m"
LEAST_S = 5 if REHEARSAL else 30  # a stage is not started with less time
TRIES = 2  # what failed or was stopped so often is not tried again
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZED = ("tests/kernels/test_gpu_execution.py", "-k", "every_kernel_of_the_cuda_backend and 32003")
RUNNER_PACKAGES = ("transformers", "datasets", "pydantic", "pyyaml", "rich", "safetensors", "matplotlib", "aiohttp")
STOPPED = 124  # the exit status of what time stopped, as ``timeout`` gives it

Finished = bool
Stage = Callable[[Path, float], Finished]


class LeftOutError(Exception):
    """Something that a stage needs is absent."""


def _absent(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if machine.version(package) == "absent"]


def _log(command: list[str], path: Path, seconds: float) -> None:
    """Run a command with its output in a file. The first line has the sources, the last one the exit status."""
    tries = 1 + _tries(path)
    with path.open("w") as log:
        log.write(f"sources {machine.sources()}, commit {machine.commit()}, try {tries}\n")
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _stop(process)
            log.write(f"\nstopped after {seconds:.0f} s")
            status = STOPPED
        log.write(f"\nexit status {status}\n")
    print(f"{path.name}: {' | '.join(path.read_text().strip().splitlines()[-3:])}", flush=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and those that it started, so that pytest shows its failures; end them 15 seconds later."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tries(path: Path) -> int:
    """Return how often a command was run with these sources."""
    first = path.read_text().partition("\n")[0] if path.exists() else ""
    return int(first.split()[-1]) if first.startswith(f"sources {machine.sources()},") else 0


def _status(path: Path) -> int:
    """Return the exit status in a log; that of a stopped command where the machine went away before it was written."""
    status = path.read_text().rpartition("\nexit status ")[2].strip()
    return int(status) if status.lstrip("-").isdigit() else STOPPED


def _is_done(path: Path) -> bool:
    """Return whether a logged command of these sources ended by itself, or was stopped too often."""
    tries = _tries(path)
    return tries > 0 and (_status(path) != STOPPED or tries >= TRIES)


def failures(results: Path) -> list[str]:
    """Return the files that show failing tests, or kernels of ours that failed or were wrong."""
    logs = [path for path in results.glob("gpu-*.txt") if "\nexit status " in path.read_text()]
    # 5: pytest ran no test. What was stopped once is resumed.
    failed = [log.name for log in logs if _status(log) not in (0, 5) and (_status(log) != STOPPED or _is_done(log))]
    for path in results.glob("gpu-*.json"):
        if any(map(is_failure, json.loads(path.read_text()).get("records", ()))):
            failed.append(path.name)
    return sorted(failed)


def _run_logged(commands: dict[Path, list[str]], seconds: float) -> Finished:
    """Run the commands that are not done, each with its share of the time that is left. Return whether all are done."""
    deadline = time.monotonic() + seconds
    left = [path for path in commands if not _is_done(path)]
    for number, path in enumerate(left):
        share = (deadline - time.monotonic()) / (len(left) - number)
        if share > 1:
            _log(commands[path], path, share)
    return all(map(_is_done, commands))


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *arguments]


def test_commands(results: Path) -> dict[Path, list[str]]:
    """Return a command for each file with GPU tests; those of the runner where its packages are installed."""
    folders = ["kernels"] + ([] if _absent(RUNNER_PACKAGES) else ["runner"])
    files = [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    marked = [path for path in files if "mark.gpu" in path.read_text()]
    return {results / f"gpu-1-{path.stem}.txt": _pytest(str(path)) for path in marked}


def _slug() -> str:
    return machine.slug(machine.describe(gpu=not REHEARSAL))


def measure(suite: str, results: Path, seconds: float) -> Finished:
    base = results / f"{suite}-{_slug()}"
    run_suite(suite, SUITES[suite], base, seconds)
    return is_finished(base, SUITES[suite])


def card(results: Path, seconds: float) -> Finished:
    """Run the tests for at most half of the time, then measure the card. Tests that were stopped are resumed."""
    began = time.monotonic()
    tested = _run_logged(test_commands(results), seconds / 2)
    return measure("gpu-card", results, seconds - (time.monotonic() - began)) and tested


def tuning(results: Path, seconds: float) -> Finished:
    finished = measure("gpu-tuning", results, seconds)
    files = {path.name: json.loads(path.read_text()) for path in sorted(results.glob(f"gpu-[lht]*-{_slug()}.json"))}
    same = {name: found for name, found in files.items() if found["machine"]["sources"] == machine.sources()}
    if same:
        _write(results / "gpu-4-defaults.txt", decide.text(list(same.values()), list(same)))
    return finished


def runner(results: Path, seconds: float) -> Finished:
    """Measure the trainer alone, and a run; write each figure when it is there, and the page."""
    if absent := _absent(RUNNER_PACKAGES):
        raise LeftOutError(f"{', '.join(absent)} not installed")
    deadline = time.monotonic() + seconds
    path = results / "gpu-5-runner.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("sources") != machine.sources():
        found = {"sources": machine.sources(), "trainer": {}}
    for name in trainer.ROWS:
        if "error" in found["trainer"].get(name, {"error": "not measured"}):
            found["trainer"][name] = measure_trainer(name, deadline - time.monotonic())
            _write_runner(path, found)
    if "run" not in found:
        found["run"] = measure_run(deadline - time.monotonic())
        _write_runner(path, found)
    if errors := [one["error"] for one in found["trainer"].values() if "error" in one]:
        raise RuntimeError("; ".join(errors))
    return True


def measure_trainer(name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.trainer", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=max(1.0, seconds))
    last = (done.stdout.splitlines() or [""])[-1]
    return json.loads(last) if done.returncode == 0 else {"error": f"{name}: exit status {done.returncode}"}


def measure_run(seconds: float) -> dict[str, Any]:
    """Train four steps on responses of up to 512 tokens, with vLLM and SmolLM2 where they are."""
    has_vllm, has_model = machine.version("vllm") != "absent" and not REHEARSAL, MODEL.exists() and not REHEARSAL
    sizes: dict[str, Any] = {"engine": "vllm" if has_vllm else "hf", "max_response_tokens": 512}
    sizes |= {"max_response_tokens": 8, "group_size": 2} if REHEARSAL else {}
    with tempfile.TemporaryDirectory() as folder:
        model = MODEL if has_model else Path(folder) / "model"
        if not has_model:
            trainer.save_random_smollm2(model)
        raw = recipe(str(model), folder, 2 if REHEARSAL else 64 if has_vllm else 16, 2 if REHEARSAL else 4, **sizes)
        raw["model"]["dtype"] = "float32" if REHEARSAL else "bfloat16"
        raw["data"]["template"] = raw["data"]["template"] if has_model else "{question}="  # a token for each letter
        steps = train(raw, [], dict(os.environ), timeout=max(1.0, seconds))
        events = events_of(Path(folder) / "run" / "metrics.jsonl")[-len(steps) :]
    weights = "the weights of SmolLM2-135M" if has_model else "random weights of SmolLM2-135M's shape"
    return {"engine": sizes["engine"], "weights": weights, "recipe": raw, "phases": steps, "events": events}


def _write_runner(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1))
    _write(path.with_suffix(".md"), "\n".join(_runner_page(found)))


def _runner_page(found: dict[str, Any]) -> Iterator[str]:
    yield f"# Trainer and sampler on {machine.headline(machine.describe(gpu=not REHEARSAL))}\n"
    yield f"Commit {machine.commit()}, torch {torch.__version__}. Random weights: a figure of speed does not depend on"
    yield "them. Medians of 4 updates. Published: one H100, the trainer alone, from prime-rl `benchmarks/baselines/`.\n"
    yield "| trainer alone | attention | s an update | tokens/s | peak GiB | published, not ours |"
    yield "|---|---|---:|---:|---:|---|"
    for name, one in found["trainer"].items():
        yield f"| {name} | {one['error']} | | | | |" if "error" in one else trainer.line(name, one)
    if "run" not in found:
        return
    run = found["run"]
    pairs = list(zip(run["events"], run["phases"], strict=True))
    rows = {
        "tokens sampled per second": [e["sampling/tokens"] / s["rollout"] for e, s in pairs],
        "tokens trained per second": [e["train/tokens"] / (s["forward_backward"] + s["optimizer"]) for e, s in pairs],
        "seconds per step": [sum(s.values()) for _, s in pairs],
        "mean log-prob gap, trainer and sampler": [e.get("train/rollout_gap", float("nan")) for e, _ in pairs],
        "largest": [e.get("train/rollout_gap_max", float("nan")) for e, _ in pairs],
    }
    yield f"\nA run with the engine {run['engine']} and {run['weights']}: `{json.dumps(run['recipe'])}`\n"
    yield "| median of steps | | min–max |\n|---|---:|---:|"
    for name, x in rows.items():
        yield f"| {name} | {statistics.median(x):.4g} | {min(x):.4g}–{max(x):.4g} |"


def sanitizer(results: Path, seconds: float) -> Finished:
    """Run the CUDA kernels on rows of two and four slices under each checker of the toolkit."""
    if not REHEARSAL and shutil.which("compute-sanitizer") is None:
        raise LeftOutError("compute-sanitizer is not on the PATH")
    prefix = ["compute-sanitizer", "--error-exitcode", "1", "--print-limit", "20", "--tool"]
    command = _pytest(*SANITIZED)
    commands = {
        results / f"gpu-6-{tool}.txt": command if REHEARSAL else [*prefix, tool, *command] for tool in SANITIZER_TOOLS
    }
    return _run_logged(commands, seconds)


STAGES: dict[str, Stage] = {
    "card": card,
    "logits": lambda results, seconds: measure("gpu-logits", results, seconds),
    "hidden": lambda results, seconds: measure("gpu-hidden", results, seconds),
    "tuning": tuning,
    "runner": runner,
    "sanitizer": sanitizer,
}


def run_stages(
    results: Path, seconds: float, only: Sequence[int] | None = None, stages: Mapping[str, Stage] = STAGES
) -> dict[str, dict[str, Any]]:
    """Resume the stages that are not finished, or run those named, in that order; return and save their states."""
    deadline = time.monotonic() + seconds
    path, sources = results / "gpu-state.json", machine.sources()
    saved = json.loads(path.read_text()) if path.exists() else {}
    state: dict[str, dict[str, Any]] = saved["stages"] if saved.get("sources") == sources else {}
    names = list(stages)
    for name in names:
        state.setdefault(name, {"status": "not started", "calls": 0, "seconds": 0})
    for name in names if only is None else [names[number - 1] for number in only]:
        mine = state[name]
        given_up = mine["status"] == "failed" and mine["calls"] >= TRIES
        left = deadline - time.monotonic()
        is_due = only is not None or (mine["status"] != "finished" and not given_up)
        if not is_due or left < LEAST_S:
            continue
        print(f"\n=== stage {names.index(name) + 1}, {name}: {left:.0f} s left", flush=True)
        began = time.monotonic()
        mine.pop("reason", None)
        try:
            mine["status"] = "finished" if stages[name](results, left) else "unfinished"
        except LeftOutError as error:
            mine |= {"status": "left out", "reason": str(error)}
        except subprocess.TimeoutExpired as error:
            mine |= {"status": "unfinished", "reason": str(error)}
        except Exception as error:
            traceback.print_exc()
            mine |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        mine["calls"] += 1
        mine["seconds"] = round(mine["seconds"] + time.monotonic() - began, 1)
        path.write_text(json.dumps({"commit": machine.commit(), "sources": sources, "stages": state}, indent=1))
    return state


def _write(path: Path, text: str) -> None:
    path.write_text((f"{REHEARSAL_WARNING}\n\n" if REHEARSAL else "") + text + "\n")
    print(path.read_text(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage", type=lambda text: [int(x) for x in text.split(",")], help="only these, in this order"
    )
    parser.add_argument("--seconds", type=float, default=540, help="of this call")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    state = run_stages(options.results, options.seconds, options.stage)
    print()
    for number, (name, mine) in enumerate(state.items(), 1):
        print(f"stage {number} {name:10} {mine['status']:12} {mine['seconds']:6.0f} s  {mine.get('reason', '')}")
    left = [name for name, mine in state.items() if mine["status"] in ("unfinished", "not started", "left out")]
    print(f"files in {options.results}" + (f"; the same command goes on with: {', '.join(left)}" if left else ""))
    failed = failures(options.results)
    print("".join(f"FAILED: see {name}\n" for name in failed), end="")
    return 1 if failed or any(mine["status"] == "failed" for mine in state.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
