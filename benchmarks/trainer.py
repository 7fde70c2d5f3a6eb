"""The trainer alone: tokens per second of an update, on random weights of a real model's shape.

    python -m benchmarks.trainer qwen3-0.6b [--steps 4]

One sequence fills the micro-batch. An update is forward and backward pass, clipping and AdamW, with gradient
checkpointing in bfloat16. The last line of the output is JSON. Others' figures of the same shapes: ``PUBLISHED``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.configs import REHEARSAL


class Row(NamedTuple):
    """An architecture of transformers, its sizes, and how many positions an update has."""

    architecture: str
    sizes: dict[str, Any]
    lora_rank: int | None = None
    positions: int = 16384


def _sizes(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocab: int, **more: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = dict(zip(names, (hidden, inner, layers, heads, key_heads), strict=True))
    return values | {"vocab_size": vocab, "tie_word_embeddings": True, **more}


SMOLLM2, TINY = _sizes(576, 1536, 30, 9, 3, 49152), _sizes(32, 64, 1, 2, 2, 160)
ROWS = {
    "qwen3-0.6b": Row("qwen3", _sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128)),
    "qwen3-4b-lora-16": Row("qwen3", _sizes(2560, 9728, 36, 32, 8, 151936, head_dim=128), lora_rank=16),
}
# One H100, the trainer alone at 16k tokens, from prime-rl's benchmarks/baselines. None of it is ours.
PUBLISHED = {
    "qwen3-0.6b": "11,896 tokens/s, 12.5 GiB",
    "qwen3-4b-lora-16": "6,229 tokens/s, 23.3 GiB",
}


def random_model(architecture: str, sizes: dict[str, Any], device: torch.device, positions: int, attention: str) -> Any:
    """Return a causal language model of transformers with random weights in bfloat16 (in a rehearsal float32)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.float32 if REHEARSAL else torch.bfloat16
    config = AutoConfig.for_model(architecture, **sizes, max_position_embeddings=positions)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def save_random_smollm2(folder: Path) -> None:
    """Write random weights of SmolLM2-135M's shape, with the tokenizer of `model.tiny`: digits and signs."""
    from dapo_runner.run.tiny_model import make_tokenizer

    model = random_model("llama", TINY if REHEARSAL else SMOLLM2, torch.device("cpu"), 8192, "sdpa")
    tokenizer = make_tokenizer()
    for name in ("pad_token_id", "eos_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(name: str, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds of each update after the first, and the peak memory in bytes."""
    from dapo_runner.algorithms.learner import Learner
    from dapo_runner.config import parse_config
    from dapo_runner.policy.attention import PACKED_ATTENTION, choose_kernel, register_packed_attention
    from dapo_runner.policy.lora import add_adapters
    from dapo_runner.policy.model import Policy
    from dapo_runner.preflight.simulate import full_mini_batch

    row = ROWS[name] if not REHEARSAL else ROWS[name]._replace(sizes=TINY, positions=64)
    lora = {"lora": {"rank": row.lora_rank, "alpha": 32, "targets": "all-linear"}} if row.lora_rank else {}
    dtype = "float32" if REHEARSAL else "bfloat16"
    lengths = {"max_prompt_tokens": 1, "max_response_tokens": row.positions - 1}
    config = parse_config(
        {
            "model": {"path": "random", "dtype": dtype, "gradient_checkpointing": True, **lora},
            "data": {"format": "arithmetic"},
            "rollout": {"engine": "hf", **lengths},
            "reward": {"overlong": {"soft_punishment": False}},
            "optimizer": {"lr": 1e-6, "token_budget": row.positions, "mini_batch_size": None},
        }
    )
    register_packed_attention()
    model = random_model(row.architecture, row.sizes, device, row.positions, PACKED_ATTENTION)
    if config.model.lora is not None:
        add_adapters(model, config.model.lora, 0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    kernel = choose_kernel("auto", device, model.dtype)
    policy = Policy(model, None, kernel, model.dtype)
    learner, seconds = Learner(policy, config), []
    is_gpu = device.type == "cuda"
    for step in range(1 + steps):
        mini = full_mini_batch(config, policy.world)
        began = time.perf_counter()
        learner.update(mini, step)
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    return {"positions": row.positions, "attention": kernel, "seconds": seconds[1:], "peak_bytes": peak}


def line(name: str, found: dict[str, Any]) -> str:
    """Return a row of the page."""
    seconds = statistics.median(found["seconds"])
    rate, peak = found["positions"] / seconds, found["peak_bytes"] / 2**30
    return f"| {name} | {found['attention']} | {seconds:.3f} | {rate:.0f} | {peak:.1f} | {PUBLISHED[name]} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ROWS)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(measure(options.name, options.steps, where)))
