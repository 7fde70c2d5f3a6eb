"""The first hour on a GPU, in stages; ``make gpu`` calls this after it made the environment (``gpu.sh``).

    python -m benchmarks.gpu [--stage N] [--seconds 540] [--results FOLDER]

1 card       the gpu-marked tests; bandwidth of a copy and rates of matrix products on this card
2 logits     the kernels from logits against the peers: vocabularies from 32k to 262k, 4096 to 65536 tokens
3 hidden     from hidden states, at the shapes of published figures too
4 tuning     launch parameters of the Triton loss; which backend should be the default (``decide.py``)
5 runner     SmolLM2 with vLLM: tokens per second of trainer and sampler, the gap of their log-probs
6 sanitizer  the CUDA kernels under compute-sanitizer

Each call resumes the first stage that is not finished and goes on while time is left. A stage writes its files into the
folder of results as it goes; ``gpu-state.json`` there says what is finished. ``make gpu-rehearsal`` runs all of it
on a CPU with tiny sizes. ``--bundle FOLDER`` collects what a machine without a network needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import decide, machine
from benchmarks.bench_ranks import events_of, recipe, train
from benchmarks.configs import REHEARSAL, SUITES
from benchmarks.report import REHEARSAL_WARNING, is_failure
from benchmarks.run import ROOT, is_finished, run_suite

MODEL = ROOT / "models" / "smollm2-135m"
LEAST_S = 5 if REHEARSAL else 30  # a stage is not started with less time
TRIES = 2  # a stage that failed so often is left out
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZED = ("tests/kernels/test_gpu_execution.py", "-k", "every_kernel_of_the_cuda_backend and 32003")
BUILD_WHEELS = ("setuptools>=77", "pybind11", "ninja", "pytest>=8")
RUNNER_WHEELS = ("transformers", "datasets", "pydantic", "pyyaml", "rich", "matplotlib", "aiohttp", "scipy")
# Peers and vLLM come without their dependencies, which would bring another torch.
LONE_WHEELS = (*(ROOT / "benchmarks" / "gpu-peers.txt").read_text().split(), "vllm")

Finished = bool
Stage = Callable[[Path, float], Finished]


def run_gpu_tests(results: Path, seconds: float) -> None:
    """Run the tests of the GPU kernels, and those of the runner where its packages are installed."""
    folders = [ROOT / "tests" / "kernels"]
    folders += [ROOT / "tests" / "runner"] if not _absent(RUNNER_WHEELS) else []
    # Only files with such tests: collecting the others would need more packages.
    files = [f for folder in folders for f in sorted(folder.rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *map(str, files)]
    _log(command, results / "gpu-1-tests.txt", seconds)


def _absent(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if machine.version(package) == "absent"]


def _log(command: list[str], path: Path, seconds: float) -> None:
    """Run a command with its output in a file, whose last line is the exit status, or that its time was over."""
    with path.open("w") as log:
        log.write(f"commit {machine.commit()}\n")
        log.flush()
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=seconds)
            log.write(f"\nexit status {done.returncode}\n")
        except subprocess.TimeoutExpired:
            log.write(f"\nstopped after {seconds:.0f} s\n")
    print(f"{path.name}: {' | '.join(path.read_text().strip().splitlines()[-3:])}", flush=True)


def _is_done(path: Path) -> bool:
    """Return whether a logged command of this commit ended by itself."""
    text = path.read_text() if path.exists() else ""
    return text.startswith(f"commit {machine.commit()}\n") and "\nexit status" in text


def failures(results: Path) -> list[str]:
    """Return the files that show failing tests, or kernels of ours that failed or were wrong."""
    logs = [path for path in results.glob("gpu-*.txt") if "\nexit status " in path.read_text()]
    failed = [path.name for path in logs if path.read_text().split()[-1] not in ("0", "5")]  # 5: pytest ran no test
    for path in results.glob("gpu-*.json"):
        if any(map(is_failure, json.loads(path.read_text()).get("records", ()))):
            failed.append(path.name)
    return sorted(failed)


def _slug() -> str:
    return machine.slug(machine.describe(gpu=not REHEARSAL))


def measure(suite: str, results: Path, seconds: float) -> Finished:
    base = results / f"{suite}-{_slug()}"
    run_suite(suite, SUITES[suite], base, seconds)
    return is_finished(base, SUITES[suite])


def card(results: Path, seconds: float) -> Finished:
    began = time.monotonic()
    if not _is_done(results / "gpu-1-tests.txt"):
        run_gpu_tests(results, seconds / 2)
    return measure("gpu-card", results, seconds - (time.monotonic() - began))


def tuning(results: Path, seconds: float) -> Finished:
    finished = measure("gpu-tuning", results, seconds)
    files = sorted(results.glob(f"gpu-[lht]*-{_slug()}.json"))
    text = decide.text([json.loads(path.read_text()) for path in files], [path.name for path in files])
    _write(results / "gpu-4-defaults.txt", text)
    return finished


def runner(results: Path, seconds: float) -> Finished:
    """Train four steps on responses of up to 512 tokens and write the rates of both halves of a step."""
    sizes: dict[str, Any] = {"prompts": 64, "max_response_tokens": 512, "engine": "vllm"}
    if REHEARSAL:
        sizes = {"prompts": 2, "max_response_tokens": 8, "engine": "hf", "group_size": 2}
    absent = [] if REHEARSAL else _absent((*RUNNER_WHEELS, "vllm"))
    absent += [] if REHEARSAL or MODEL.exists() else [str(MODEL)]
    if absent:
        _write(results / "gpu-5-runner.md", f"# The runner\n\nLeft out, because these are absent: {', '.join(absent)}.")
        return True
    with tempfile.TemporaryDirectory() as folder:
        raw = recipe(str(MODEL), folder, sizes.pop("prompts"), 2 if REHEARSAL else 4, **sizes)
        if REHEARSAL:
            raw["model"] = {"dtype": "float32", "tiny": {"hidden_size": 32, "heads": 2, "warmup": {"steps": 1}}}
            raw["data"]["template"] = "{question}="
        steps = train(raw, [], dict(os.environ), timeout=seconds)
        events = events_of(Path(folder) / "run" / "metrics.jsonl")[-len(steps) :]
    rows = {
        "tokens sampled per second": [e["sampling/tokens"] / s["rollout"] for e, s in zip(events, steps, strict=True)],
        "tokens trained per second": [
            e["train/tokens"] / (s["forward_backward"] + s["optimizer"]) for e, s in zip(events, steps, strict=True)
        ],
        "seconds per step": [sum(s.values()) for s in steps],
        "mean log-prob gap, trainer and sampler": [e.get("train/rollout_gap", float("nan")) for e in events],
        "largest": [e.get("train/rollout_gap_max", float("nan")) for e in events],
    }
    lines = [f"| {name} | {statistics.median(x):.4g} | {min(x):.4g}–{max(x):.4g} |" for name, x in rows.items()]
    head = f"# SmolLM2-135M on {machine.headline(machine.describe(gpu=not REHEARSAL))}\n\nRecipe: `{json.dumps(raw)}`"
    table = "| median of steps | | min–max |\n|---|---:|---:|\n" + "\n".join(lines)
    _write(results / "gpu-5-runner.md", f"{head}\n\n{table}")
    (results / "gpu-5-runner.json").write_text(json.dumps({"phases": steps, "events": events}, indent=1))
    return True


def sanitizer(results: Path, seconds: float) -> Finished:
    """Run the CUDA kernels on rows of two and four slices under each checker of the toolkit."""
    prefix = ["compute-sanitizer", "--error-exitcode", "1", "--print-limit", "20", "--tool"]
    if not REHEARSAL and shutil.which("compute-sanitizer") is None:
        _write(results / "gpu-6-sanitizer.txt", "Left out: compute-sanitizer is not on the PATH.")
        return True
    began = time.monotonic()
    for number, tool in enumerate(SANITIZER_TOOLS):
        path = results / f"gpu-6-{tool}.txt"
        if _is_done(path):
            continue
        left = (seconds - (time.monotonic() - began)) / (len(SANITIZER_TOOLS) - number)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *SANITIZED]
        _log(command if REHEARSAL else [*prefix, tool, *command], path, left)
    return all(_is_done(results / f"gpu-6-{tool}.txt") for tool in SANITIZER_TOOLS)


STAGES: dict[str, Stage] = {
    "card": card,
    "logits": lambda results, seconds: measure("gpu-logits", results, seconds),
    "hidden": lambda results, seconds: measure("gpu-hidden", results, seconds),
    "tuning": tuning,
    "runner": runner,
    "sanitizer": sanitizer,
}


def run_stages(results: Path, seconds: float, only: int | None = None) -> dict[str, dict[str, Any]]:
    """Resume the stages that are not finished; return and save their states. Another commit starts anew."""
    deadline = time.monotonic() + seconds
    path, commit = results / "gpu-state.json", machine.commit()
    saved = json.loads(path.read_text()) if path.exists() else {}
    state: dict[str, dict[str, Any]] = saved["stages"] if saved.get("commit") == commit else {}
    for number, (name, stage) in enumerate(STAGES.items(), 1):
        mine = state.setdefault(name, {"status": "not started", "calls": 0, "seconds": 0})
        given_up = mine["status"] == "failed" and mine["calls"] >= TRIES
        left = deadline - time.monotonic()
        is_due = only == number if only is not None else mine["status"] != "finished" and not given_up
        if not is_due or left < LEAST_S:
            continue
        print(f"\n=== stage {number}, {name}: {left:.0f} s left", flush=True)
        began = time.monotonic()
        try:
            mine["status"] = "finished" if stage(results, left) else "unfinished"
        except Exception as error:
            traceback.print_exc()
            mine |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        mine["calls"] += 1
        mine["seconds"] = round(mine["seconds"] + time.monotonic() - began, 1)
        path.write_text(json.dumps({"commit": commit, "stages": state}, indent=1))
    return state


def _write(path: Path, text: str) -> None:
    path.write_text((f"{REHEARSAL_WARNING}\n\n" if REHEARSAL else "") + text + "\n")
    print(path.read_text(), flush=True)


# --- what a machine without a network needs ---------------------------------------------------------------------------


def bundle(folder: Path) -> str:
    """Download wheels and copy the model into a folder; return the sizes, and by name what could not be had."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in (*BUILD_WHEELS, *RUNNER_WHEELS, *LONE_WHEELS):
        alone = ["--no-deps"] if name in LONE_WHEELS else []
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *alone, name]
        with tempfile.TemporaryDirectory() as fresh:
            done = subprocess.run([*command, "--dest", fresh], capture_output=True, text=True)
            size = _mib(_size(Path(fresh)))
            shutil.copytree(fresh, wheels, dirs_exist_ok=True)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        lines.append(f"   skipped  {name}: {reason}" if done.returncode else f"{size:>10}  {name}")
    if MODEL.exists():
        shutil.copytree(MODEL, folder / "models" / MODEL.name, dirs_exist_ok=True)
        lines.append(f"{_mib(_size(folder / 'models')):>10}  the model {MODEL.name}")
    else:
        lines.append(f"   skipped  the model: {MODEL} does not exist (python -m dapo_runner.tools.smollm2 {MODEL})")
    lines.append(f"{'0 MiB':>10}  data: stage 5 makes its problems")
    lines.append(f"{_mib(_size(folder)):>10}  all of {folder}. There: copy models/ into the checkout, and")
    lines.append("            WHEELS=…/wheels PEERS=1 make gpu")
    return "\n".join(lines)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(n: int) -> str:
    return f"{n / 2**20:.1f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(1, len(STAGES) + 1), help="only this one")
    parser.add_argument("--seconds", type=float, default=540, help="of this call")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.bundle is not None:
        print(bundle(options.bundle))
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    state = run_stages(options.results, options.seconds, options.stage)
    print()
    for number, (name, mine) in enumerate(state.items(), 1):
        print(f"stage {number} {name:10} {mine['status']:12} {mine['seconds']:6.0f} s  {mine.get('reason', '')}")
    left = [name for name, mine in state.items() if mine["status"] in ("unfinished", "not started")]
    print(f"files in {options.results}" + (f"; the same command goes on with: {', '.join(left)}" if left else ""))
    failed = failures(options.results)
    print("".join(f"FAILED: see {name}\n" for name in failed), end="")
    return 1 if failed or any(mine["status"] == "failed" for mine in state.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
