"""Contestants of other libraries and tuned launches, on stand-ins with the libraries' signatures."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.configs import Config
from benchmarks.contestants import Contestant
from benchmarks.formulas import Tokens, dapo
from benchmarks.peers import PEERS
from benchmarks.problem import build
from benchmarks.truth import find_truth

ROOT = Path(__file__).parents[2]
LOGITS = Config("logits", "float32", 32, 512, rounds=3, min_rounds=3)
HIDDEN = replace(LOGITS, level="hidden", hidden=128)
GPU_PEERS = [peer for peer in PEERS if peer.device == "cuda"]


def cross_entropy(x: Tensor, target: Tensor, reduction: str = "mean", inplace_backward: bool = False) -> Tensor:
    return F.cross_entropy(x.float(), target, reduction=reduction)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str = "mean", **_: bool
) -> Tensor:
    return cross_entropy(F.linear(x, weight, bias), target, reduction)


def mean_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, None, target)


def grpo_loss(
    logits: Tensor, old_logp: Tensor, ref_logp: None, completion_ids: Tensor, advantages: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    assert logits.shape[1] == completion_ids.shape[1] + 1
    completion_mask = options.pop("completion_mask")
    numbers = {"temperature": 1.0, "beta": 0.0, "eps_low": 0.2, "eps_high": 0.28}
    assert options == numbers | {"loss_type": "dapo", "reduce": True}
    logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, completion_ids[..., None])[..., 0]
    mask = completion_mask[0] > 0
    tokens = Tokens(completion_ids[0], old_logp[0], advantages.expand(len(mask)), mask, 1)
    return dapo(logp[0], tokens), []


def cut_cross_entropy(
    e: Tensor, c: Tensor, targets: Tensor, reduction: str = "mean", filter_eps: str | None = "high"
) -> Tensor:
    assert filter_eps in ("high", None)
    return linear_cross_entropy(e, c, None, targets, reduction)


def verl_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none"
) -> tuple[Tensor, Tensor]:
    assert hidden.shape[1] % 128 == 0
    assert (temperature, reduction) == (1.0, "none")
    logp = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


class LigerScaled:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, target: Tensor, return_entropy: bool = False) -> Any:
        logprobs, entropy = verl_linear_cross_entropy(x, weight, target)
        return (-logprobs, entropy) if return_entropy else -logprobs


STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    "quack.cross_entropy": {"cross_entropy": cross_entropy},
    "quack.linear_cross_entropy": {
        "linear_cross_entropy_func": linear_cross_entropy,
        "chunked_linear_cross_entropy": mean_cross_entropy,
    },
    "cut_cross_entropy": {"linear_cross_entropy": cut_cross_entropy},
    "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": verl_linear_cross_entropy},
    "liger_kernel.transformers.grpo_loss": {"triton_grpo_loss": grpo_loss},
    "liger_kernel.ops.fused_linear_scaled_cross_entropy": {"LigerFusedLinearScaledCrossEntropyFunction": LigerScaled},
    "liger_kernel.transformers.functional": {"liger_fused_linear_cross_entropy": mean_cross_entropy},
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, functions in STAND_INS.items():
        parts = path.split(".")
        for k in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:k]), types.ModuleType(parts[k - 1]))
        module = types.ModuleType(path)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize("contestant", GPU_PEERS, ids=lambda c: c.name)
def test_peers_do_the_same_work(stand_ins: None, contestant: Contestant) -> None:
    """Fed with a stand-in that has the library's signature, each gives what the check wants."""
    assert {m for c in GPU_PEERS for m in c.modules} == set(STAND_INS)
    ran = 0
    base = (LOGITS, HIDDEN, replace(HIDDEN, objective="reinforce"), replace(LOGITS, live=0.5))
    for config in (*base, replace(HIDDEN, mode="forward"), replace(HIDDEN, mode="forward", entropy=True)):
        if not contestant.can_do(replace(config, device="cuda")):
            assert not contestant.can_do(config)
            continue
        problem = build(config)
        problem.restore()
        row = harness.check(contestant, contestant.make(problem)(), find_truth(problem))
        assert "reason" not in row, (config.name, row)
        ran += 1
    assert ran


def test_the_kernel_of_verl_is_imported_without_ray() -> None:
    pytest.importorskip("verl")
    program = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from benchmarks.peers import import_verl
print(callable(import_verl().linear_cross_entropy), sys.modules.get("ray"))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["True", "None"], done.stderr


@pytest.mark.parametrize("base", [LOGITS, HIDDEN, replace(LOGITS, live=0.5)], ids=lambda c: c.name)
def test_inputs_and_contestants_stay_on_the_device(base: Config) -> None:
    """On "meta", a device that every machine has and whose tensors refuse to meet those of another."""
    problem = build(replace(base, device="meta"))
    problem.restore()
    for tensor in (*problem.inputs(), *problem.tokens[:4], *problem.exact):
        assert tensor.device.type == "meta"
    if base.level == "logits":
        assert find_truth(problem).row_gradient.device.type == "meta"
    ran = [c for c in harness.contestants_of(replace(base, device="cuda")) if c.kind in ("denominator", "eager")]
    assert len(ran) == (3 if base.level == "logits" else 2)
    for contestant in ran:
        result = contestant.make(problem)()
        assert all(g.device.type == "meta" for g in result.gradients)
