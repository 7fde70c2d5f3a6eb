"""The cost of several ranks on one machine, as a page of results.

    python -m benchmarks.bench_ranks --model models/smollm2-135m --out benchmarks/results/ranks-NAME.md

A training step of SmolLM2-135M by one process with two threads, and by two ranks with a thread each. Prompts, weights
and number of responses are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.machine import ROOT
from benchmarks.report import markdown_table
from dapo_runner.timing import seconds_by_phase

WARM_UP = 1  # steps left out: memory is taken and kept, and kernels are compiled
RESPONSES, TOKENS = 16, 128
PHASES_SHOWN = 6
# Name, ranks (0: no launcher), threads.
SIDES = (("one process, 2 threads", 0, 2), ("torchrun, 2 ranks, 1 thread each", 2, 1))


class Step(NamedTuple):
    """Seconds of a step by phase, without evaluation and checkpoints, and all that its logs have."""

    phases: dict[str, float]
    metrics: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def recipe(model: str, folder: str, prompts: int, steps: int, **rollout: Any) -> dict[str, Any]:
    """Return a run of arithmetic problems that measures steps: no evaluation, no checkpoints, one update a step."""
    lengths = {"group_size": RESPONSES, "max_prompt_tokens": 16, "max_response_tokens": TOKENS}
    arithmetic = {"operators": ["+", "*"], "max_digits": 1, "train_size": 100}
    return {
        "run": {"name": "run", "output_dir": folder, "steps": WARM_UP + steps, "eval_every": 0, "save_every": 0},
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {
            "format": "arithmetic",
            "template": "Question: {question}\nAnswer:",
            "chat_template": "never",
            "arithmetic": arithmetic,
            "eval_size": 2,
        },
        "rollout": lengths | rollout,
        "sampler": {"prompts_per_step": prompts, "filter_groups": None},
        "reward": {"kind": "integer", "overlong": {"soft_punishment": False}},
        "optimizer": {"lr": 1e-6, "warmup_steps": 0, "mini_batch_size": None, "token_budget": 16384},
        "parallel": {"reshard_after_forward": False},  # so small a model may stay whole between two passes
        "evaluation": {"k": 1},
        "logging": {"progress": "off"},
    }


def train(raw: dict[str, Any], environment: dict[str, str], launcher: Sequence[str] = ()) -> list[Step]:
    """Run a recipe in a process of its own; return its steps after the warm-up."""
    from dapo_runner.files import read_jsonl
    from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE  # needs the runner's packages

    folder = Path(raw["run"]["output_dir"])
    path = folder / "recipe.json"  # JSON is YAML
    path.write_text(json.dumps(raw))
    command = [sys.executable, *launcher, "-m", "dapo_runner", "train", str(path)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    steps = []
    logs = (read_jsonl(folder / raw["run"]["name"] / name) for name in (TIMINGS_FILE, METRICS_FILE))
    for timings, metrics in zip(*([event for event in log if event["kind"] == "step"] for log in logs), strict=True):
        phases = {name: s for name, s in seconds_by_phase(timings).items() if name not in ("save", "evaluate")}
        steps.append(Step(phases, timings | metrics))
    return steps[WARM_UP:]


def phase_table(found: dict[str, list[Step]]) -> str:
    """Return the medians of sides: a step, what it is of the first side's, and the longest phases."""
    totals = {name: median(step.seconds for step in steps) for name, steps in found.items()}
    phases = {
        phase: {name: median(step.phases.get(phase, 0.0) for step in steps) for name, steps in found.items()}
        for phase in {phase for steps in found.values() for step in steps for phase in step.phases}
    }
    shown = sorted(phases, key=lambda phase: -max(phases[phase].values()))[:PHASES_SHOWN]
    first = next(iter(totals))
    rows = [
        [name, *(f"{x:.2f}" for x in (total, total / totals[first], *(phases[phase][name] for phase in shown)))]
        for name, total in totals.items()
    ]
    return markdown_table(["how", "a step", f"÷ {first}", *(phase.replace("_", " ") for phase in shown)], rows)


def measure_steps(options: argparse.Namespace) -> str:
    here = machine.describe()
    found: dict[str, list[Step]] = {name: [] for name, _, _ in SIDES}
    for _ in range(options.rounds):
        for name, ranks, threads in SIDES:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
            with tempfile.TemporaryDirectory() as folder:
                raw = recipe(str(Path(options.model).resolve()), folder, options.prompts, options.steps)
                raw["run"]["threads"] = threads
                found[name] += train(raw, {**os.environ, "OMP_NUM_THREADS": str(threads)}, launcher)
    return f"""# A step of SmolLM2-135M on one process and on ranks

{options.prompts} prompts × {RESPONSES} responses of up to {TOKENS} tokens, bfloat16, engine `hf`, one update of
micro-batches of at most 16384 tokens, `parallel.reshard_after_forward=false`. Seconds, medians of {options.rounds} ×
{options.steps} steps: the sides take turns, and the first {WARM_UP} of each process and saving are left out.

{machine.facts(here)}

{phase_table(found)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=4, help=f"of a step, each with {RESPONSES} responses")
    parser.add_argument("--steps", type=int, default=3, help="measured of each process")
    parser.add_argument("--rounds", type=int, default=2, help="of all sides in turn, because a machine's speed drifts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(measure_steps(options), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
