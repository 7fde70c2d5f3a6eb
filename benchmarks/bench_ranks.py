"""The cost of several ranks on one machine, as a page of results.

    python -m benchmarks.bench_ranks step --model models/smollm2-135m --out benchmarks/results/ranks-NAME.md
    python -m benchmarks.bench_ranks head --out benchmarks/results/vocab-parallel-NAME.md

``step``: a training step of SmolLM2-135M by one process with two threads, by the same under torchrun (FSDP2 over one
rank), and by two ranks with a thread each. Prompts, weights and number of responses are the same.

``head``: the loss over a head whose vocabulary two ranks share over gloo, with a thread and half of the head each. The
denominator is the same ranks at the same time, each with its half as a head of its own: half of the work, without any
exchange. The two alternate; every pair starts behind a barrier. A rank's time includes waiting for the other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from dapo_kernels import linear_dapo_loss

ROOT = Path(__file__).parent.parent
WARM_UP = 1  # steps left out: memory is taken and kept, and kernels are compiled
RESPONSES, TOKENS = 16, 128
PHASES_SHOWN = 6


# Name, ranks (0: no launcher), threads.
SIDES = (
    ("one process, 2 threads", 0, 2),
    ("torchrun, 1 rank, 2 threads", 1, 2),
    ("torchrun, 2 ranks, 1 thread each", 2, 1),
)


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
        "sampler": {"prompts_per_step": prompts, "filter_groups": False},
        "reward": {"kind": "integer", "overlong": {"soft_punishment": False}},
        "optimizer": {"lr": 1e-6, "warmup_steps": 0, "mini_batch_size": None, "token_budget": 16384},
        "parallel": {"reshard_after_forward": False},  # so small a model may stay whole between two passes
        "evaluation": {"k": 1},
        "logging": {"progress": "off"},
    }


def train(
    raw: dict[str, Any], launcher: list[str], environment: dict[str, str], timeout: float | None = None
) -> list[dict[str, float]]:
    """Run a recipe in a process of its own; return the seconds of each step after the warm-up, by phase."""
    folder = Path(raw["run"]["output_dir"])
    path = folder / "recipe.json"  # JSON is YAML
    path.write_text(json.dumps(raw))
    command = [sys.executable, *launcher, "-m", "dapo_runner", "train", str(path)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=timeout)
    return [phases_of(event) for event in events_of(folder / "run" / "timings.jsonl")[WARM_UP:]]


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a log."""
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["kind"] == "step"]


def phases_of(event: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by phase, without evaluation and checkpoints."""
    seconds = {key.removeprefix("seconds/"): value for key, value in event.items() if key.startswith("seconds/")}
    return {phase: value for phase, value in seconds.items() if phase not in ("save", "evaluate")}


def measure_steps(options: argparse.Namespace) -> str:
    here = machine.describe()
    found: dict[str, list[dict[str, float]]] = {SIDES[number][0]: [] for number in options.sides}
    for _ in range(options.rounds):
        for name, ranks, threads in (SIDES[number] for number in options.sides):
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
            with tempfile.TemporaryDirectory() as folder:
                raw = recipe(str(Path(options.model).resolve()), folder, options.prompts, options.steps)
                raw["run"]["threads"] = threads
                found[name] += train(raw, launcher, {**os.environ, "OMP_NUM_THREADS": str(threads)})
    return step_page(found, here, options)


def step_page(found: dict[str, list[dict[str, float]]], here: dict[str, Any], options: argparse.Namespace) -> str:
    totals = {name: statistics.median(sum(step.values()) for step in steps) for name, steps in found.items()}
    base = next(iter(totals.values()))
    names = {phase for steps in found.values() for step in steps for phase in step}
    phases = {
        phase: {name: statistics.median(step.get(phase, 0.0) for step in steps) for name, steps in found.items()}
        for phase in names
    }
    shown = sorted(names, key=lambda phase: -max(phases[phase].values()))[:PHASES_SHOWN]
    rows = []
    for name, total in totals.items():
        cells = [name, f"{total:.2f}", f"{total / base:.2f}", *(f"{phases[phase][name]:.2f}" for phase in shown)]
        rows.append(f"| {' | '.join(cells)} |")
    return f"""# A step of SmolLM2-135M on one process and on ranks

{options.prompts} prompts × {RESPONSES} responses of up to {TOKENS} tokens, bfloat16, engine `hf`, one update of
micro-batches of at most 16384 tokens, `parallel.reshard_after_forward=false`. Seconds, medians of {options.rounds} ×
{options.steps} steps: the sides take turns, and the first {WARM_UP} of each process and saving are left out.
{_machine(here)}

| how | a step | ÷ one process | {" | ".join(phase.replace("_", " ") for phase in shown)} |
|---|---:|---:|{"---:|" * len(shown)}
{chr(10).join(rows)}
"""


def _machine(here: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("torch", "transformers"))
    where = f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB"
    command = machine.command("python", "-m", "benchmarks.bench_ranks")
    return (
        f"Command: `{command}`.\n{where}; {versions}; commit {here['commit']}; load before: {here['load_average'][0]}."
    )


# --- a head that ranks share ------------------------------------------------------------------------------------------

RANKS = 2
TARGET = 1.15
ROUNDS = 7  # the first is left out
SIZES = (  # tokens, hidden, vocabulary, dtype
    (2048, 576, 49152, torch.bfloat16),
    (2048, 576, 49152, torch.float32),
    (1024, 896, 151936, torch.bfloat16),
)


def calls(size: tuple[Any, ...], rank: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the call over half of the head by itself, and over that half as this rank's part of the whole."""
    n_tokens, width, vocab, dtype = size
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_tokens, width, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) * width**-0.5).to(dtype)
    half = weight.chunk(RANKS)[rank].clone().requires_grad_()
    targets = torch.randint(vocab, (n_tokens,), generator=g)
    old_logprobs, advantages = torch.full((n_tokens,), -10.0), torch.randn(n_tokens, generator=g)

    def run(ids: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        hidden.grad = half.grad = None
        # No token is clipped: none has less work than another.
        out = linear_dapo_loss(hidden, half, ids, old_logprobs, advantages, objective="reinforce", group=group)
        out.loss.backward()
        return out.loss.detach()

    own = targets % half.shape[0]
    return lambda: run(own, None), lambda: run(targets, dist.group.WORLD)


def time_head(rank: int, folder: str) -> None:
    """Time the calls of one rank; rank 0 saves the slowest rank's medians."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(minutes=5))
    times = []
    for size in SIZES:
        pair = calls(size, rank)
        rounds = []
        for _ in range(ROUNDS):
            seconds = []
            for call in pair:
                dist.barrier()
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            rounds.append(seconds)
        times.append([statistics.median(x) for x in zip(*rounds[1:], strict=True)])
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(slowest, f"{folder}/times.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure_head(options: argparse.Namespace) -> str:
    here = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_head, args=(folder,), nprocs=RANKS)
        return head_page(torch.load(f"{folder}/times.pt").tolist(), here)


def head_page(times: list[list[float]], here: dict[str, Any]) -> str:
    rows = []
    for (n_tokens, width, vocab, dtype), (half, shared) in zip(SIZES, times, strict=True):
        shape = f"{n_tokens} | {width} | {vocab} | {str(dtype).removeprefix('torch.')}"
        verdict = "met" if shared <= TARGET * half else "not met"
        rows.append(f"| {shape} | {1e3 * half:.0f} | {1e3 * shared:.0f} | {shared / half:.2f} | {verdict} |")
    return f"""# A head shared by two ranks

Loss and gradients, all tokens live. Milliseconds, medians of {ROUNDS - 1} calls, of the slower rank. "half" is half of
the head by itself on each rank, without any exchange.
{_machine(here)}

| tokens | hidden | vocabulary | dtype | half | shared | ÷ half | target {TARGET} |
|---:|---:|---:|---|---:|---:|---:|---|
{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    step = commands.add_parser("step")
    step.add_argument("--model", required=True)
    step.add_argument("--prompts", type=int, default=4, help=f"of a step, each with {RESPONSES} responses")
    step.add_argument("--steps", type=int, default=3, help="measured of each process")
    step.add_argument("--rounds", type=int, default=2, help="of all sides in turn, because a machine's speed drifts")
    step.add_argument("--sides", type=int, nargs="+", default=[0, 1, 2], help="rows of the table")
    step.set_defaults(run=measure_steps)
    head = commands.add_parser("head")
    head.set_defaults(run=measure_head)
    for command in (step, head):
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(options.run(options), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
