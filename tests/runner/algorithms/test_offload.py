"""AdamW on the host: the numbers of AdamW on the GPU, also after a resume; one process only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config, make_prompt, random_sequences

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.weights import IN_FLIGHT
from dapo_runner.checkpoint import load_checkpoint, save_checkpoint, take_snapshot
from dapo_runner.config import Config, ConfigError, ModelConfig
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.parallel.world import Layout
from dapo_runner.policy.model import load_policy
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler

CPU = torch.device("cpu")


def config_of(offload: bool) -> Config:
    return make_config(optimizer={"lr": 1e-3, "warmup_steps": 0, "token_budget": 95, "offload": offload})


def learner_of(folder: str | Path, dtype: str, offload: bool) -> Learner:
    policy = load_policy(folder, ModelConfig.model_validate({"path": "x", "dtype": dtype}), CPU)
    return Learner(policy, config_of(offload))


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    return [learner.update(learner.prepare(random_sequences(8, seed=step))[0], step) for step in steps]


def values(learner: Learner) -> dict[str, torch.Tensor]:
    masters = {f"master {name}": tensor.detach() for name, tensor in learner.master.tensors.items()}
    return masters | {name: parameter.detach() for name, parameter in learner.policy.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_what_the_optimizer_beside_the_weights_does(model_folder: Path, dtype: str) -> None:
    beside, on_host = (learner_of(model_folder, dtype, offload) for offload in (False, True))
    assert train(beside, range(3)) == train(on_host, range(3))
    for name, value in values(beside).items():
        assert torch.equal(values(on_host)[name], value), name
    for name, parameter in on_host.policy.model.named_parameters():
        master = on_host.master.tensors[name]
        assert master.data_ptr() != parameter.data_ptr()
        assert parameter.grad is None
        assert master.dtype == torch.float32
        assert {kind: tensor.device.type for kind, tensor in on_host.master.state_of(master).items()} == dict.fromkeys(
            ("step", "exp_avg", "exp_avg_sq"), "cpu"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("later", [True, False], ids=["as before", "without"])
def test_training_goes_on_as_if_it_had_not_stopped(model_folder: Path, tmp_path: Path, dtype: str, later: bool) -> None:
    def sampler() -> DynamicSampler:
        return DynamicSampler(PromptCursor([make_prompt("p")], seed=0), GroupBuffer(config_of(True)))

    learner = learner_of(model_folder, dtype, offload=True)
    train(learner, range(2))
    saved = save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler()), keep=1)
    expected = train(learner, range(2, 4))
    resumed = learner_of(saved.model, dtype, offload=later)
    load_checkpoint(saved, resumed, sampler())
    assert train(resumed, range(2, 4)) == expected
    for name, value in values(learner).items():
        assert torch.equal(values(resumed)[name], value), name


class Arrival:
    """The event of a copy, which notes who waited for it."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


def test_gradients_on_their_way_are_waited_for_late_and_once(model_folder: Path) -> None:
    """By count: a copy is waited for when IN_FLIGHT later ones are under way, and the others before they are used."""
    weights, waited = learner_of(model_folder, "bfloat16", offload=True).master, list[int]()
    master = next(iter(weights.tensors.values()))
    for number in range(5):
        weights.arriving.append(
            (master, torch.full_like(master, number, dtype=torch.bfloat16), Arrival(number, waited))
        )  # type: ignore[arg-type]
        weights.receive(IN_FLIGHT)
    assert waited == list(range(5 - IN_FLIGHT))
    assert weights.gradients() == [master]
    assert waited == list(range(5))
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full_like(master, 0 + 1 + 2 + 3 + 4))


@pytest.mark.parametrize(
    ("sections", "layout", "key"),
    [
        ({"optimizer": {"offload": True}}, Layout(size=2, shard=2), "optimizer.offload"),
        ({"optimizer": {"offload": True}, "model": {"dtype": "float16"}}, Layout(), "optimizer.offload"),
    ],
)
def test_what_it_does_not_support(sections: dict[str, Any], layout: Layout, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_needs(make_config(**sections), layout)
