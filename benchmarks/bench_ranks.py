"""What ranks cost on one machine: a step of SmolLM2-135M by one process with two threads, by the same under torchrun
(FSDP2 over one rank), by two ranks with a thread each. The same prompts, weights and number of responses.

    python -m benchmarks.bench_ranks --model models/smollm2-135m --out benchmarks/results/ranks-NAME.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine

ROOT = Path(__file__).parent.parent
WARM_UP = 1  # steps left out: memory is taken and kept, and kernels are made
RESPONSES, TOKENS = 16, 128
PHASES_SHOWN = 6


class Side(NamedTuple):
    name: str
    ranks: int  # 0: no launcher
    threads: int


SIDES = (
    Side("one process, 2 threads", 0, 2),
    Side("torchrun, 1 rank, 2 threads", 1, 2),
    Side("torchrun, 2 ranks, 1 thread each", 2, 1),
)


def recipe(model: str, folder: str, threads: int, prompts: int, steps: int) -> dict[str, Any]:
    return {
        "run": {
            "name": "run",
            "steps": WARM_UP + steps,
            "eval_every": 0,
            "save_every": 0,
            "threads": threads,
            "output_dir": folder,
        },
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {
            "format": "arithmetic",
            "template": "Question: {question}\nAnswer:",
            "chat_template": "never",
            "arithmetic": {"operators": ["+", "*"], "max_digits": 1, "train_size": 100},
            "eval_size": 2,
        },
        "rollout": {"group_size": RESPONSES, "max_prompt_tokens": 16, "max_response_tokens": TOKENS},
        "sampler": {"prompts_per_step": prompts, "filter_groups": False},
        "reward": {"kind": "integer", "overlong": {"soft_punishment": False}},
        "optimizer": {"lr": 1e-6, "warmup_steps": 0, "mini_batch_size": None, "token_budget": 16384},
        "parallel": {"reshard_after_forward": False},  # so small a model may stay whole between two passes
        "evaluation": {"k": 1},
        "logging": {"progress": "off"},
    }


def measure(side: Side, model: str, folder: str, prompts: int, steps: int) -> list[dict[str, float]]:
    """The seconds of each step after the warm-up, by phase."""
    path = Path(folder) / "recipe.json"  # JSON is YAML
    path.write_text(json.dumps(recipe(model, folder, side.threads, prompts, steps)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(side.ranks)]
    command = [sys.executable, *(launcher if side.ranks else []), "-m", "dapo_runner", "train", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(side.threads)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    lines = (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "step"][WARM_UP:]
    kept = [
        {key.removeprefix("seconds/"): value for key, value in event.items() if key.startswith("seconds/")}
        for event in events
    ]
    return [{phase: value for phase, value in step.items() if phase not in ("save", "evaluate")} for step in kept]


def write_page(sides: dict[Side, list[dict[str, float]]], here: dict[str, Any], options: argparse.Namespace) -> str:
    medians = {side: statistics.median(sum(step.values()) for step in steps) for side, steps in sides.items()}
    base = medians[next(iter(sides))]
    phases = list({phase for steps in sides.values() for step in steps for phase in step})

    def seconds(side: Side, phase: str) -> float:
        return statistics.median(step.get(phase, 0.0) for step in sides[side])

    phases = sorted(phases, key=lambda phase: -max(seconds(side, phase) for side in sides))[:PHASES_SHOWN]
    rows = [
        f"| {side.name} | {medians[side]:.2f} | {medians[side] / base:.2f} | "
        + " | ".join(f"{seconds(side, phase):.2f}" for phase in phases)
        + " |"
        for side in sides
    ]
    heads = " | ".join(phase.replace("_", " ") for phase in phases)
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("torch", "transformers"))
    return f"""# A step of SmolLM2-135M on one process and on ranks

`python -m benchmarks.bench_ranks --prompts {options.prompts}`: {options.prompts} prompts × {RESPONSES}
responses of up to {TOKENS} tokens, bfloat16, engine `hf`, one update of micro-batches of at most 16384 tokens,
`parallel.reshard_after_forward=false`; seconds, medians of {options.rounds} × {options.steps} steps, the sides in turn
and the first {WARM_UP} of each process left out, as saving is.
{here["cpu"]}, {here["cores"]} cores, {here["memory_gib"]} GiB; {versions};
commit {here["commit"]}; load before: {here["load_average"][0]}.

| how | a step | ÷ one process | {heads} |
|---|---:|---:|{"---:|" * len(phases)}
{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help=f"of a step, each of {RESPONSES} responses (default: 4)")
    parser.add_argument("--steps", type=int, default=3, help="measured of each process (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="of all sides in turn, as a machine's speed drifts")
    parser.add_argument("--sides", type=int, nargs="+", default=[0, 1, 2], help="which rows: 0, 1, 2 (default: all)")
    options = parser.parse_args()
    here = machine.describe()
    sides: dict[Side, list[dict[str, float]]] = {SIDES[number]: [] for number in options.sides}
    for _ in range(options.rounds):
        for side, steps in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                steps += measure(side, str(Path(options.model).resolve()), folder, options.prompts, options.steps)
    options.out.write_text(write_page(sides, here, options), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
