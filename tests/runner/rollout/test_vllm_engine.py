"""The engine over vLLM, with a stand-in for vLLM: what it asks for, and what it makes of the answers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_config
from refusals import refused

from dapo_runner.config import ModelConfig
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.types import Prompt, SamplingParams, make_requests

ASKED = [Prompt("p", (3, 4), "", "")]


class LLM:
    """vLLM's: it notes the calls, and answers every prompt with three tokens."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.calls, self.resets = arguments, list[Any](), True
        self.logprobs = [math.nan, -1.0, math.inf, -0.5]
        model = SimpleNamespace(try_get_generation_config=dict, get_vocab_size=lambda: 26)
        self.llm_engine = SimpleNamespace(model_config=model, add_lora=self.add_lora)

    def generate(self, prompts: Any, params: Any, **_: Any) -> list[Any]:
        self.params = params
        logprobs = SimpleNamespace(logprobs=self.logprobs, start_indices=[0, 2, 3])
        answer = SimpleNamespace(token_ids=[3, 4, 5], logprobs=logprobs, finish_reason="stop")
        return [SimpleNamespace(outputs=[answer])] * len(prompts)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.resets

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((method, len(list(kwargs["weights_iterator"]))))

    def add_lora(self, request: Any) -> None:
        self.calls.append(("adapter", request.number, Path(request.path).is_dir()))

    def apply_model(self, function: Any) -> list[set[str]]:
        return [{"torch.bfloat16"}]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    vllm, request = ModuleType("vllm"), ModuleType("vllm.lora.request")
    vllm.LLM, vllm.SamplingParams = LLM, lambda **fields: fields
    vllm.__spec__ = SimpleNamespace()
    request.LoRARequest = lambda name, number, path: SimpleNamespace(lora_int_id=number, number=number, path=path)
    for name, module in {"vllm": vllm, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": request}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # restored after the test


def open_engine(folder: Path, device: str = "cuda", **model: Any) -> VLLMEngine:
    config = make_config(
        model={"tiny": None, "path": str(folder), "dtype": "float32", **model}, rollout={"engine": "vllm"}
    )
    return VLLMEngine.load(folder, config, torch.device(device), SINGLE_PROCESS, print)


def test_a_log_prob_that_is_missing_is_unknown(model_folder: Path) -> None:
    """NaN or +∞ of vLLM, at a token whose probability is near 1."""
    engine = open_engine(model_folder)
    ((found, again),) = engine.generate(make_requests(ASKED, SamplingParams(n=2, temperature=0.0, max_tokens=3)))
    assert found.logprobs.isnan().tolist() == [True, True, False]
    assert found.logprobs[2] == -0.5
    assert again is found  # greedy responses are equal
    (fields,) = engine.llm.params
    assert (fields["n"], fields["logprobs"], fields["max_tokens"]) == (1, 0, 3)
    assert fields["stop_token_ids"] == engine.stop_ids


def test_memory_is_freed_until_new_weights_come(model_folder: Path) -> None:
    engine = open_engine(model_folder)
    weights = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), torch.device("cpu"))
    for _ in range(2):
        engine.release()
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.generate(make_requests(ASKED, SamplingParams(max_tokens=1)))
    for _ in range(2):
        engine.update_weights(weights.named_weights())
    loaded = ("reload_weights", len(list(weights.named_weights())))
    wake = [("wake", "weights"), loaded, ("wake", "kv_cache"), "reset"]
    assert engine.llm.calls == [("sleep", 2), *wake, loaded, "reset"]
    assert engine.llm.arguments["enable_sleep_mode"]
    engine.llm.resets = False
    for call in (
        lambda: engine.generate(make_requests(ASKED, SamplingParams())),
        lambda: engine.update_weights(weights.named_weights()),
    ):
        with pytest.raises(RuntimeError):  # prompt prefixes of earlier weights
            call()
    on_cpu = open_engine(model_folder, "cpu")
    on_cpu.release()
    assert on_cpu.llm.calls == []


def test_adapters_come_alone(model_folder: Path) -> None:
    lora = {"rank": 8, "alpha": 20}
    engine = open_engine(model_folder, lora=lora)
    policy = load_policy(
        model_folder, ModelConfig(path=str(model_folder), dtype="float32", lora=lora), torch.device("cpu")
    )
    assert engine.llm.arguments["max_lora_rank"] == 8  # the smallest of vLLM that holds it
    engine.release()
    for _ in range(2):
        engine.sync(policy)
    wake = [("wake", "weights"), ("adapter", 1, True), ("wake", "kv_cache"), "reset"]
    assert engine.llm.calls == [("sleep", 1), *wake, ("adapter", 2, True), "reset"]


def test_what_vllm_cannot_do_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("model.float32_logits"):
        open_engine(model_folder, dtype="bfloat16", float32_logits=True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with refused("rollout.engine"):
        open_engine(model_folder)
