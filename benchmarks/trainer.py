"""Tokens per second of the trainer alone, and of a run.

    python -m benchmarks.trainer qwen3-0.6b       an update on random weights of a real model's shape
    python -m benchmarks.trainer run              four steps on responses of up to 512 tokens

One sequence fills the micro-batch. An update is forward and backward pass, clipping and AdamW, with gradient
checkpointing in bfloat16. The run takes vLLM and the weights of SmolLM2-135M where they are, else ``hf`` and random
weights of its shape.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.bench_ranks import recipe, train
from benchmarks.configs import REHEARSAL
from benchmarks.machine import ROOT
from benchmarks.report import REHEARSAL_WARNING, markdown_table

UPDATES = 1 if REHEARSAL else 4  # after the first
MODEL = ROOT / "models" / "smollm2-135m"
POSITIONS = 64 if REHEARSAL else 16384  # of an update
DTYPE = torch.float32 if REHEARSAL else torch.bfloat16


class Row(NamedTuple):
    """A model of transformers with tied embeddings, and a published figure: one H100, the trainer alone at 16k tokens,
    from prime-rl's benchmarks/baselines. None of these is ours.
    """

    sizes: dict[str, Any]
    lora_rank: int | None
    published: str


def _sizes(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocab: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = (32, 64, 1, 2, 2, 160) if REHEARSAL else (hidden, inner, layers, heads, key_heads, vocab)
    return dict(zip((*names, "vocab_size"), values, strict=True)) | {"tie_word_embeddings": True}


SMOLLM2 = _sizes(576, 1536, 30, 9, 3, 49152)
_HEADS = {"head_dim": 128}
ROWS = {
    "qwen3-0.6b": Row(_sizes(1024, 3072, 28, 16, 8, 151936) | _HEADS, None, "11,896 tokens/s, 12.5 GiB"),
    "qwen3-4b-lora-16": Row(_sizes(2560, 9728, 36, 32, 8, 151936) | _HEADS, 16, "6,229 tokens/s, 23.3 GiB"),
}


def random_model(architecture: str, sizes: dict[str, Any], device: str, positions: int, attention: str) -> Any:
    """Return a causal language model of transformers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **sizes, max_position_embeddings=positions)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation=attention)


def save_random_smollm2(folder: Path) -> None:
    """Write random weights of SmolLM2-135M's shape, with the tokenizer of `model.tiny`: digits and signs."""
    from dapo_runner.tiny_model import make_tokenizer

    model, tokenizer = random_model("llama", SMOLLM2, "cpu", 8192, "sdpa"), make_tokenizer()
    for name in ("pad_token_id", "eos_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure_trainer(name: str, device: str) -> str:
    """Return a page with the median of the updates after the first, and the peak memory."""
    from dapo_runner.algorithms.learner import Learner
    from dapo_runner.config import Config, parse
    from dapo_runner.policy.attention import PACKED_ATTENTION, choose_kernel, register_packed_attention
    from dapo_runner.policy.lora import add_adapters
    from dapo_runner.policy.model import Policy
    from dapo_runner.preflight.simulate import full_mini_batch

    row = ROWS[name]
    lora = {"lora": {"rank": row.lora_rank, "alpha": 32, "targets": "all-linear"}} if row.lora_rank else {}
    dtype = str(DTYPE).removeprefix("torch.")
    raw = {
        "model": {"path": "random", "dtype": dtype, "gradient_checkpointing": True, **lora},
        "data": {"format": "arithmetic"},
        "rollout": {"engine": "hf", "max_prompt_tokens": 1, "max_response_tokens": POSITIONS - 1},
        "reward": {"overlong": {"soft_punishment": False}},
        "optimizer": {"lr": 1e-6, "token_budget": POSITIONS, "mini_batch_size": None},
    }
    config = parse(raw, Config)
    register_packed_attention()
    model = random_model("qwen3", row.sizes, device, POSITIONS, PACKED_ATTENTION)
    if config.model.lora is not None:
        add_adapters(model, config.model.lora, 0)
    enable = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.24 on
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    kernel = choose_kernel("auto", torch.device(device), DTYPE)
    policy = Policy(model, None, kernel, DTYPE)
    learner, seconds = Learner(policy, config), []
    for step in range(1 + UPDATES):
        mini = full_mini_batch(config, policy.world)
        began = time.perf_counter()
        learner.update(mini, step)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    rate, peak = POSITIONS / median(seconds[1:]), torch.cuda.max_memory_allocated() if device == "cuda" else 0
    columns = ("trainer alone", "attention", "s an update", "tokens/s", "peak GiB", "published, not ours")
    figures = [f"{median(seconds[1:]):.3f}", f"{rate:.0f}", f"{peak / 2**30:.1f}"]
    return markdown_table(columns, [[name, kernel, *figures, row.published]])


def measure_run() -> str:
    """Return a page with the speed of a run and the gap between its sampler and its trainer."""
    has_vllm, has_model = machine.version("vllm") is not None and not REHEARSAL, MODEL.exists() and not REHEARSAL
    sizes: dict[str, Any] = {"engine": "vllm" if has_vllm else "hf", "max_response_tokens": 512}
    sizes |= {"max_response_tokens": 8, "group_size": 2} if REHEARSAL else {}
    with tempfile.TemporaryDirectory() as folder:
        model = MODEL if has_model else Path(folder) / "model"
        if not has_model:
            save_random_smollm2(model)
        raw = recipe(str(model), folder, 2 if REHEARSAL else 64 if has_vllm else 16, 2 if REHEARSAL else 4, **sizes)
        raw["model"]["dtype"] = str(DTYPE).removeprefix("torch.")
        raw["data"]["template"] = raw["data"]["template"] if has_model else "{question}="  # a token for each letter
        steps = train(raw, dict(os.environ))
    rows = {
        "tokens sampled per second": [m["sampling/tokens"] / s["rollout"] for s, m in steps],
        "tokens trained per second": [m["train/tokens"] / (s["forward_backward"] + s["optimizer"]) for s, m in steps],
        "seconds per step": [step.seconds for step in steps],
        "mean log-prob gap, trainer and sampler": [m.get("train/rollout_gap", float("nan")) for _, m in steps],
        "largest": [m.get("train/rollout_gap_max", float("nan")) for _, m in steps],
    }
    cells = [[name, f"{median(x):.4g}", f"{min(x):.4g}–{max(x):.4g}"] for name, x in rows.items()]
    weights = "the weights of SmolLM2-135M" if has_model else "random weights of SmolLM2-135M's shape"
    about = f"A run with the engine {sizes['engine']} and {weights}: `{json.dumps(raw)}`"
    return f"{about}\n\n{markdown_table(['median of steps', '', 'min–max'], cells)}"


def main(name: str) -> None:
    has_gpu = torch.cuda.is_available()
    page = measure_run() if name == "run" else measure_trainer(name, "cuda" if has_gpu else "cpu")
    print(
        f"{REHEARSAL_WARNING}\n\n" if REHEARSAL else "", f"{machine.facts(machine.describe(has_gpu))}\n\n{page}", sep=""
    )


if __name__ == "__main__":
    main(sys.argv[1])
