"""PolicyLoss where ranks share the output head by vocabulary: the loss and the gradient of one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
import torch.distributed as dist
from ranks import on_ranks
from test_policy_loss import Capped, gradients, network, packed, padded
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dapo_kernels.integrations.torch import PolicyLoss

RANKS = 2
ROWS = (0, 40, 61)  # of the head, a different number on each rank


def with_dtensor_head(model: Any, mesh: DeviceMesh, **style: Any) -> Any:
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**style)})
    return model


def with_own_rows(model: Any, rank: int) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data[ROWS[rank] : ROWS[rank + 1]].clone())
    return model


def check_rank(policy: PolicyLoss, batch: dict[str, Tensor], rows: slice) -> None:
    whole = PolicyLoss(network())
    expected = whole(**batch)
    expected.loss.backward()
    out = policy(**batch)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss, atol=1e-6, rtol=0)
    expected_gradients = gradients(whole.model)
    for name, gradient in gradients(policy.model).items():
        target = expected_gradients[name][rows] if name == "lm_head.weight" else expected_gradients[name]
        torch.testing.assert_close(gradient, target, atol=1e-5, rtol=0)


def on_a_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for style in ({}, {"output_layouts": Replicate()}, {"use_local_output": False}):
        for options in ({}, {"group": mesh.get_group()}):
            policy = PolicyLoss(with_dtensor_head(network(), mesh, **style), **options)
            check_rank(policy, packed(), slice(None))
            assert policy.model.lm_head.weight.placements == (Shard(0),)
    policy = PolicyLoss(with_own_rows(network(), rank), group=dist.group.WORLD)
    check_rank(policy, padded(), slice(*ROWS[rank : rank + 2]))
    capped = Capped(network().config)
    for model in (with_dtensor_head(capped, mesh), with_own_rows(Capped(network().config), rank)):
        with pytest.raises(ValueError, match="Capped"):
            PolicyLoss(model, group=mesh.get_group())(**padded())


@pytest.mark.ranks
def test_heads_that_ranks_share() -> None:
    on_ranks(RANKS, on_a_rank)
