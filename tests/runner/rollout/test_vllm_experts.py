"""Mixtures of experts in the real vLLM: new weights reach routers and experts. Each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config, save_model
from experts import small_experts

from dapo_runner.algorithms.learner import Learner
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import Prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_reach_the_experts(kind: str, tmp_path: Path) -> None:
    save_model(small_experts(kind, **SIZES | KINDS[kind]), make_tokenizer(), tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment)
    assert child.returncode == 0


def main(folder: Path) -> None:
    rollout = {"engine": "vllm", "max_prompt_tokens": 64, "max_response_tokens": 16, "vllm": {"kv_cache_gib": 0.25}}
    model = {"tiny": None, "path": str(folder), "dtype": "float32"}
    config = make_config(model=model, rollout=rollout, reward={"overlong": {"cache_length": 4}})
    learner = Learner(load_policy(folder, config.model, CPU), config)
    tokenizer = make_tokenizer()
    engine = VLLMEngine(folder, tokenizer, config, CPU)
    asked = [Prompt(text, tuple(tokenizer(text)["input_ids"]), text, "") for text in ("12+34=", "5*7=")]
    probe = SyncProbe(asked, config)
    assert probe(engine, learner)["gap_max"] < 1e-4
    with torch.no_grad():
        for tensor in learner.policy.model.state_dict().values():
            tensor.copy_(tensor.roll(1, 0))  # other experts are chosen, and are others
    engine.update_weights(learner.policy.named_weights())
    assert probe(engine, learner)["gap_max"] < 1e-4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
