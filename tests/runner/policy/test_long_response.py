"""One response of 20,480 tokens, the longest of the paper, through a training step on a CPU."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from builders import make_config
from forks import CONTEXT
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_runner.algorithms.learner import Learner
from dapo_runner.policy.model import PACKED_ATTENTION, Policy, register_packed_attention
from dapo_runner.types import Sequence

N, V, H = 20480, 151936, 64


def train(out: Path) -> None:
    """Write what the update needs beyond weights, gradients and moments, in bytes, and its metrics."""
    torch.manual_seed(0)
    register_packed_attention()
    sizes = {"vocab_size": V, "hidden_size": H, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 32768}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.set_attn_implementation(PACKED_ATTENTION)
    config = make_config(
        rollout={"max_prompt_tokens": 2048, "max_response_tokens": N},
        reward={"overlong": {"cache_length": 4096}},
        optimizer={"token_budget": 22528, "lr": 1e-3},
    )
    learner = Learner(Policy(model.to(torch.bfloat16).eval(), None, "sdpa"), config)
    mask, ids = torch.arange(N + 8) >= 8, torch.randint(V, (N + 8,))
    for n in (64, N + 8):  # after the first, gradients, moments and masters are there
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        (mini,) = learner.prepare([Sequence(ids[:n], mask[:n].float(), mask[:n], torch.zeros(n), 0)])
        figures = learner.update(mini, 0)
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    out.write_text(json.dumps({"extra": extra, "tokens": figures["tokens"], "grad_norm": figures["grad_norm"]}))


@pytest.mark.slow
def test_the_longest_response_trains_within_the_memory_of_the_loss(tmp_path: Path) -> None:
    """The bar of the loss is 512 MiB beyond inputs and gradients; float32 logits of these tokens would take 11.6 GiB.

    Beside it there is room for what the tiny model itself keeps: activations, and two gradients of its weights.
    """
    process = CONTEXT.Process(target=train, args=(tmp_path / "found.json",))
    process.start()
    process.join()
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tokens"] == N
    assert found["grad_norm"] > 0
    activations = N * (8 * H + 4 * 128) * 2
    assert found["extra"] <= 512 * 2**20 + activations + 2 * V * H * 4, found
