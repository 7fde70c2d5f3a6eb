"""One RL step of SmolLM2-135M, rollout and training, against TRL's GRPOTrainer on the same work.

    .venv-vllm/bin/python -m benchmarks.bench_step_vs_trl --model models/smollm2-135m --trl-python .venv/bin/python

8 prompts × 8 responses of at most 64 tokens, temperature 1, bfloat16, one on-policy update of all 64 responses with
AdamW, DAPO's loss without KL. All sides get the same prompt tokens and the same reward, which depends on the text's
length, so that every group has advantages and no backward work is saved. Each side runs in a process of its own, one
after the other. The figure is the median over steps after the first, with the tokens that were generated:

    TRL               GRPOTrainer, which generates with transformers on a CPU. Its torch_compile=True compiles anew for
                      every new length, 70 to 90 s each time, and is no faster afterwards
    runner            ``dapo train`` with vLLM
    runner, compiled  the same with model.compile and rollout.vllm.enforce_eager=false
    runner, hf        the same generating with transformers, as TRL does: what the trainer gains without vLLM
    TRL, our loss     the same with DapoGRPOTrainer in GRPOTrainer's place

TRL runs under each setting of ``allocators.py``, the others under the one where it was fastest. The runner runs with no
variable set too: ``dapo`` then raises glibc's thresholds itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import allocators, machine
from benchmarks.allocators import ALLOCATORS, OUT_OF_THE_BOX
from benchmarks.bench_ranks import WARM_UP, Step, phase_table, recipe, train
from benchmarks.machine import ROOT
from benchmarks.report import markdown_table
from benchmarks.run import THREADS

PROMPTS, GROUP, TOKENS = 8, 8, 64
QUESTIONS = [
    f"Question: A box holds {3 + i} pens. How many pens are in {i + 2} boxes?\nAnswer:" for i in range(PROMPTS)
]
LEARNING_RATE = 1e-6
WITHOUT_VLLM = "runner, hf"
OURS = ("runner", "runner, compiled", WITHOUT_VLLM, "TRL, our loss")

Result = dict[str, Any]  # side, allocator, steps, peak_gib


def reward_of(text: str) -> float:
    """Return a number that differs from response to response and costs nothing."""
    return float(len(text) % 7)


def judge(prompt: Any, completion: Any) -> Any:
    """Give the reward as a plug-in of the runner."""
    from dapo_runner.types import Verdict

    return Verdict(correct=False, value=reward_of(completion.text))


def run_ours(options: argparse.Namespace, side: str, environment: dict[str, str]) -> Result:
    compiled = side == "runner, compiled"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"question": q, "answer": "#### 0"}) + "\n" for q in QUESTIONS))
        sizes = {"group_size": GROUP, "max_prompt_tokens": 64, "max_response_tokens": TOKENS}
        engine = {"engine": "hf" if side == WITHOUT_VLLM else "vllm", "vllm": {"enforce_eager": not compiled}}
        raw = recipe(str(Path(options.model).resolve()), folder, PROMPTS, options.steps, **sizes, **engine)
        raw["run"]["threads"] = THREADS
        raw["model"]["compile"] = compiled
        raw["data"] = {"path": str(data), "template": "plain", "chat_template": "never", "eval_size": 0}
        raw["reward"]["kind"] = "benchmarks.bench_step_vs_trl:judge"
        steps = train(raw, environment)
    return {"steps": steps, "peak_gib": max(step.metrics["speed/memory_gib"] for step in steps)}


def run_trl(options: argparse.Namespace, side: str, environment: dict[str, str]) -> Result:
    """Run ``trl_steps`` in an interpreter that has TRL."""
    command = [options.trl_python, "-m", "benchmarks.bench_step_vs_trl", "--side", side, "--model", options.model]
    command += ["--steps", str(options.steps)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment).stdout
    found = json.loads(out.splitlines()[-1])
    return {**found, "steps": [Step(*step) for step in found["steps"]]}


def trl_steps(options: argparse.Namespace) -> Result:
    """Do the same with GRPOTrainer, which generates with transformers on a CPU."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    trainer: Any = GRPOTrainer
    if options.side != "TRL":
        from dapo_kernels.integrations.trl import DapoGRPOTrainer

        trainer = DapoGRPOTrainer
    torch.set_num_threads(THREADS)
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

    n_steps = WARM_UP + options.steps
    sampling = {"num_generations": GROUP, "max_completion_length": TOKENS, "temperature": 1.0}
    loss = {"beta": 0.0, "loss_type": "dapo", "learning_rate": LEARNING_RATE, "gradient_checkpointing": False}
    device = {"bf16": True, "use_cpu": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    logging = {"save_strategy": "no", "report_to": [], "logging_steps": 1, "disable_tqdm": True}
    batch = {"per_device_train_batch_size": PROMPTS * GROUP, "max_steps": n_steps}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(output_dir=scratch, **batch, **sampling, **loss, **device, **logging)
        data = Dataset.from_dict({"prompt": QUESTIONS * n_steps})
        trainer(options.model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    steps = [Step({"step": s}, {"train/tokens": n}) for s, n in zip(seconds, tokens, strict=True)][WARM_UP:]
    versions = {name: machine.version(name) for name in ("trl", "transformers")}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"steps": steps, "peak_gib": peak, "versions": versions}


def measure(side: str, allocator: str, options: argparse.Namespace) -> Result:
    """Run a side in a process of its own, under an allocator."""
    environment = allocators.environment(allocator) | {"OMP_NUM_THREADS": str(THREADS)}
    result = (run_trl if side.startswith("TRL") else run_ours)(options, side, environment)
    print(f"{side}, {allocator}: {[round(step.seconds, 2) for step in result['steps']]} s", file=sys.stderr, flush=True)
    return {"side": side, "allocator": allocator, **result}


def tokens_of(step: Step) -> float:
    return step.metrics["train/tokens"]


def rate(result: Result) -> float:
    """Return tokens per second, the median of the steps."""
    return median(tokens_of(step) / step.seconds for step in result["steps"])


def measure_all(options: argparse.Namespace, measure: Callable[..., Result] = measure) -> list[Result]:
    """Run TRL under every allocator, the others under its best, and the runner with no variable set."""
    theirs = [measure("TRL", allocator, options) for allocator in ALLOCATORS]
    best = max(theirs, key=rate)["allocator"]
    return [*theirs, *(measure(side, best, options) for side in OURS), measure("runner", OUT_OF_THE_BOX, options)]


def page(results: list[Result], options: argparse.Namespace, here: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    best = max((result for result in results if result["side"] == "TRL"), key=rate)
    rows = []
    for result in results:
        seconds, tokens = (median(map(of, result["steps"])) for of in (lambda step: step.seconds, tokens_of))
        figures = [f"{seconds:.2f}", f"{tokens:.0f}", f"{rate(result):.0f}", f"{rate(result) / rate(best):.2f}"]
        rows.append([result["side"], result["allocator"], *figures, f"{result['peak_gib']:.1f}"])
    columns = ["side", "allocator", "s a step", "tokens a step", "tokens/s", "× TRL", "peak GiB"]
    phases = {side: next(result["steps"] for result in results if result["side"] == side) for side in OURS[:3]}
    return f"""# One RL step of SmolLM2-135M against TRL's GRPOTrainer

{machine.facts(here)}
- in TRL's process: {", ".join(f"{name} {found}" for name, found in best["versions"].items())}
- {THREADS} threads
{chr(10).join(f"- {name}: {allocators.spelled(name)}" for name in ALLOCATORS)}

{PROMPTS} prompts × {GROUP} responses of at most {TOKENS} tokens, bfloat16, on-policy, AdamW; medians of {options.steps}
steps after the first. What the sides are: `benchmarks/bench_step_vs_trl.py`. TRL is fastest under
'{best["allocator"]}': the others run under it too. The runner generates with vLLM, TRL and '{WITHOUT_VLLM}' with
transformers.

{markdown_table(columns, rows, texts=2)}

Where a step of the runner goes, seconds:

{phase_table(phases)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=4, help="after the first, which is not counted")
    parser.add_argument("--out", type=Path, help="a folder: write the figures and the page there")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(trl_steps(options)))
        return
    here = machine.describe()
    results = measure_all(options)
    text = page(results, options, here)
    print(text)
    if options.out is not None:
        base = options.out / machine.file_name("step-vs-trl", here)
        base.with_suffix(".json").write_text(json.dumps(results, indent=1))
        base.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
