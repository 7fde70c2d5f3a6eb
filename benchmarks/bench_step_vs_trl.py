"""One RL step of SmolLM2-135M, rollout and training, against TRL's GRPOTrainer on the same work.

    .venv-vllm/bin/python benchmarks/bench_step_vs_trl.py --model models/smollm2-135m --trl-python .venv/bin/python

8 prompts × 8 responses of at most 64 tokens, temperature 1, bfloat16, one on-policy update of all 64 responses with
AdamW, DAPO's loss without KL. Both sides get the same prompt tokens and the same reward, a function of the text's
length, so that every group has advantages and none of the backward work falls away. Each side runs in a process of its
own, one after the other; the figure is the median over steps after the first, with the tokens that were generated.
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
from pathlib import Path
from typing import Any

PROMPTS, GROUP, TOKENS = 8, 8, 64
QUESTIONS = [
    f"Question: A box holds {3 + i} pens. How many pens are in {i + 2} boxes?\nAnswer:" for i in range(PROMPTS)
]
LEARNING_RATE = 1e-6
BAR = 4.0


def reward_of(text: str) -> float:
    """Anything that differs from response to response and costs nothing."""
    return float(len(text) % 7)


def judge(prompt: Any, completion: Any) -> Any:
    """The reward as a plug-in of the runner."""
    from dapo_runner.types import Verdict

    return Verdict(correct=False, value=reward_of(completion.text))


def run_ours(model: str, steps: int, threads: int, engine: str) -> dict[str, Any]:
    """Seconds of each step by phase, and tokens per step."""
    from dapo_runner.config import parse_config
    from dapo_runner.metrics import read_log
    from dapo_runner.progress import SilentProgress
    from dapo_runner.train import train

    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"question": q, "answer": "#### 0"}) + "\n" for q in QUESTIONS))
        raw = {
            "run": {"output_dir": scratch, "steps": steps, "eval_every": 0, "save_every": 0, "threads": threads},
            "model": {"path": model, "dtype": "bfloat16"},
            "data": {"path": str(data), "template": "plain", "chat_template": "never", "eval_size": 0},
            "rollout": {
                "engine": engine,
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


def run_trl(model: str, steps: int, threads: int) -> dict[str, Any]:
    """The same of GRPOTrainer; it generates with transformers, which is what it has on a CPU."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

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
        GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[clock]).train()
    return {"seconds": clock.seconds, "tokens": tokens}


def measure(python: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [python, __file__, "--side", side, "--model", options.model, "--steps", str(options.steps)]
    command += ["--threads", str(options.threads), "--engine", options.engine]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": str(options.threads)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def describe(name: str, result: dict[str, Any]) -> float:
    seconds = statistics.median(result["seconds"][1:])
    tokens = statistics.median(result["tokens"][1:])
    print(f"{name:<14} {seconds:8.2f} s a step  {tokens:6.0f} tokens  {tokens / seconds:7.0f} tokens/s")
    for phase in result.get("phases", [{}])[-1]:
        share = statistics.median(one[phase] for one in result["phases"][1:]) / seconds
        print(f"    {phase:<10} {share:6.1%}")
    return seconds / tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm", help="of our side")
    parser.add_argument("--out", type=Path, help="write the raw figures as JSON")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "ours":
        print(json.dumps(run_ours(options.model, options.steps, options.threads, options.engine)))
        return 0
    if options.side == "trl":
        print(json.dumps(run_trl(options.model, options.steps, options.threads)))
        return 0
    ours, trl = measure(sys.executable, "ours", options), measure(options.trl_python, "trl", options)
    mine, theirs = describe("dapo_runner", ours), describe("TRL", trl)
    print(f"{theirs / mine:.2f}× TRL's time per token; bar {BAR:g}×")
    if options.out is not None:
        options.out.write_text(json.dumps({"ours": ours, "trl": trl}, indent=1))
    return 0 if theirs / mine >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
