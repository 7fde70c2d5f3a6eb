"""One response of 20,480 tokens, the longest of the paper, through a training step on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, threading, time
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from builders import make_config
from dapo_runner.algorithms.learner import Learner
from dapo_runner.policy.model import PACKED_ATTENTION, Policy, register_packed_attention
from dapo_runner.types import Sequence

N, V, H = 20480, 151936, 64
torch.manual_seed(0)
register_packed_attention()
model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32768, tie_word_embeddings=True))
model.set_attn_implementation(PACKED_ATTENTION)
policy = Policy(model.to(torch.bfloat16).eval(), None, "sdpa")
config = make_config(rollout={"max_prompt_tokens": 2048, "max_response_tokens": N}, reward={"overlong":
    {"cache_length": 4096}}, optimizer={"token_budget": 22528, "lr": 1e-3})
learner = Learner(policy, config)
mask = torch.arange(N + 8) >= 8
sequence = Sequence(torch.randint(V, (N + 8,)), torch.where(mask, 1.0, 0.0), mask, torch.zeros(N + 8), 0)
warm = Sequence(*(x[:64] for x in (sequence.token_ids, sequence.advantages, mask, sequence.rollout_logprobs)), 0)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

(mini,) = learner.prepare([warm])
learner.update(mini, 0)  # gradients, moments and masters are there now
before, peak, done = resident(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
(mini,) = learner.prepare([sequence])
figures = learner.update(mini, 0)
done.set()
thread.join()
print(json.dumps({"extra": peak[0] - before, "tokens": figures["tokens"], "grad_norm": figures["grad_norm"],
    "weights": V * H * 4}))
"""


@pytest.mark.slow
def test_the_longest_response_trains_within_the_memory_of_the_loss() -> None:
    """The bar of the loss is 512 MiB beyond inputs and gradients; float32 logits of these tokens would take 11.6 GiB.

    Beside it there is room for what the tiny model itself keeps: activations, and one gradient of its weights.
    """
    here = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(map(str, (here, here.parents[1])))
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["tokens"] == 20480
    assert found["grad_norm"] > 0
    activations = 20480 * (8 * 64 + 4 * 128) * 2
    assert found["extra"] <= 512 * 2**20 + activations + 2 * found["weights"], found
