"""The real vLLM on a CPU serves adapters that came without the base weights: by the probe, in a run, after a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import prompt
from refusals import refused
from small import events_of
from test_vllm import CPU, load_learner, prober, pytestmark, raw_run, tiny, tiny_config

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, parse
from dapo_runner.engines.vllm import VLLMEngine
from dapo_runner.logging.progress import Progress
from dapo_runner.loop import train
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.rollout.probe import OutOfSyncError
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import SamplingParams, make_requests

__all__ = ["pytestmark", "tiny"]
LORA = {"rank": 5, "alpha": 20}  # a rank that vLLM rounds up


def lora_config(path: Path, **lora: Any) -> Config:
    return tiny_config(path, model={"lora": LORA | lora})


@pytest.fixture(scope="module")
def engine(tiny: Path) -> VLLMEngine:
    return VLLMEngine(tiny, make_tokenizer(), lora_config(tiny), CPU, SINGLE_PROCESS)


def draw(learner: Learner, seed: int) -> None:
    """Adapters as large as the layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2, generator=generator)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
def test_the_probe_passes_what_was_synced_last_and_nothing_else(
    engine: VLLMEngine, tiny: Path, targets: str | list[str]
) -> None:
    learner = load_learner(lora_config(tiny, targets=targets))
    probe = prober(engine, learner, "12+34=" * 25)  # longer than a block of the prefix cache
    for seed in range(3):
        draw(learner, seed)
        with pytest.raises(OutOfSyncError):
            probe(engine, learner)
        engine.sync(learner.policy)
        assert probe(engine, learner)["gap"] < 1e-4


def test_turns_of_an_open_call_are_answered_by_the_adapters(engine: VLLMEngine, tiny: Path) -> None:
    learner = load_learner(lora_config(tiny))
    draw(learner, seed=7)
    engine.sync(learner.policy)
    (request,) = make_requests([prompt("1+1=", engine)], SamplingParams(temperature=0.0, max_tokens=6))
    call = engine.open_call(None, lambda: None, 1)
    call.add(0, request)
    found: list[Any] = []
    while not found:
        found = call.work()
    ((one,),) = engine.generate([request])
    torch.testing.assert_close(found[0][1].logprobs, one.logprobs, atol=1e-5, rtol=0)


def test_layers_that_vllm_does_not_adapt_are_refused(engine: VLLMEngine, tiny: Path) -> None:
    learner = load_learner(lora_config(tiny))
    attention = learner.policy.model.model.layers[0].self_attn
    attention.rotation = copy.deepcopy(attention.q_proj)
    with refused("model.lora.targets"):
        engine.sync(learner.policy)


def test_a_run_and_its_resume(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Path:
        raw = raw_run(tmp_path / name, steps=steps)
        raw["model"]["lora"] = {"rank": 4, "alpha": 32}
        raw["optimizer"]["lr"] = 5e-2
        return train(parse(raw, Config), Progress())

    whole = run("whole", 2)
    run("again", 1)
    assert (run("again", 2) / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert all(step["train/tokens"] > 0 and step["sync/gap"] < 1e-4 for step in events_of(whole))
