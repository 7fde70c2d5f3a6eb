"""Mixtures of experts in the real vLLM: new weights reach routers and experts. In a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from builders import save_model
from contract import prompt
from experts import small_experts
from test_vllm import CPU, load_learner, pytestmark, tiny_config

from dapo_runner.engines.vllm import VLLMEngine
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.rollout.probe import SyncProbe
from dapo_runner.tiny_model import make_tokenizer

__all__ = ["pytestmark"]
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}


def test_new_weights_reach_the_experts(tmp_path: Path, python: str) -> None:
    save_model(small_experts("mixtral", intermediate_size=64, **SIZES), make_tokenizer(), tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([python, __file__, str(tmp_path)], env=environment, check=True)


def main(folder: Path) -> None:
    config = tiny_config(folder)
    learner = load_learner(config)
    engine = VLLMEngine(folder, make_tokenizer(), config, CPU, SINGLE_PROCESS)
    probe = SyncProbe([prompt(text, engine) for text in ("12+34=", "5*7=")], config)
    assert probe(engine, learner)["gap_max"] < 1e-4
    with torch.no_grad():
        for tensor in learner.policy.model.state_dict().values():
            tensor.copy_(tensor.roll(1, 0))  # other experts are chosen, and are others
    engine.update_weights(learner.policy.named_weights())
    assert probe(engine, learner)["gap_max"] < 1e-4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
