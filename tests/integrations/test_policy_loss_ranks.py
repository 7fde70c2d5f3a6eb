"""PolicyLoss on two ranks, in everybody's loops and with a head that they share: the gradient of one process."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
import torch.distributed as dist
from policy_batches import Capped, gradients, network, packed, padded, relative_error
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dapo_kernels import reduce_metrics, summarize
from dapo_kernels.integrations.torch import PolicyLoss

RANKS = 2
# Each rank's micro-batches, as sequences; the second rank has one fewer and fills up with one that trains nothing.
MICRO_BATCHES = (((0,), (1, 2, 3)), ((4, 5), ()))
ROWS = (0, 40, 61)  # of the head, a different number on each rank
CASES = list(itertools.product(("DDP", "FSDP2", "FSDP2, head apart"), ("dapo", "gspo")))

pytestmark = pytest.mark.ranks


def micro_batches(rank: int, objective: str) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Return a rank's own, and what the mean of all ranks' divides by."""
    mine = [packed(which) for which in MICRO_BATCHES[rank]]
    sequences = sum(map(len, MICRO_BATCHES[rank]))
    count = sequences if objective == "gspo" else sum(int(batch["mask"].sum()) for batch in mine)
    total = torch.tensor(float(count))
    dist.all_reduce(total)
    return mine, total


def wrapped(how: str, model: Any, objective: str) -> Any:
    policy = PolicyLoss(model, objective=objective)
    if how == "DDP":
        return DistributedDataParallel(policy)
    for layer in model.model.layers:
        fully_shard(layer)
    if how == "FSDP2, head apart":
        fully_shard(model.lm_head)
    return fully_shard(policy, reshard_after_forward=True)


def train_wrapped(rank: int, how: str, objective: str) -> tuple[Any, ...]:
    """Return the gradient and the metrics, of each micro-batch and reduced."""
    model = network()
    policy, (mine, total), metrics = wrapped(how, model, objective), micro_batches(rank, objective), []
    if how != "DDP":
        with torch.no_grad():
            policy(**{k: x for k, x in mine[0].items() if k not in ("old_logprobs", "advantages")}, mode="logprobs")
        assert all(hasattr(parameter, "full_tensor") for parameter in policy.parameters())  # a step would be seen
    for batch in mine:
        if how != "DDP":
            policy.set_requires_gradient_sync(batch is mine[-1])
        with policy.no_sync() if how == "DDP" and batch is not mine[-1] else contextlib.nullcontext():
            out = policy(**batch, denominator=total / RANKS)
            out.loss.backward()
        metrics.append(out.metrics)
    return gradients(model), [dict(x) for x in metrics], reduce_metrics(metrics)


def on_a_rank(rank: int, folder: Path) -> None:
    torch.save({case: train_wrapped(rank, *case) for case in CASES}, folder / f"{rank}.pt")
    share_head_on_a_rank(rank)
    prepare_on_a_rank(rank)


def test_ddp_fsdp2_and_a_shared_head_give_the_gradient_of_one_process(tmp_path: Path) -> None:
    """And its metrics. accelerate and Fabric: test_guide.py."""
    on_ranks(RANKS, on_a_rank, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for case in CASES:
        policy = PolicyLoss(network(), objective=case[1])
        out = policy(**packed())
        out.loss.backward()
        expected = gradients(policy.model)
        (one, metrics, reduced), (other, other_metrics, other_reduced) = (rank[case] for rank in ranks)
        assert max(relative_error(found, expected) for found in (one, other)) < 1e-5, case
        assert reduced == other_reduced == summarize(metrics + other_metrics)
        assert reduced == pytest.approx(summarize(out.metrics), rel=1e-5, abs=1e-6)


def with_dtensor_head(model: Any, mesh: DeviceMesh, **style: Any) -> Any:
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**style)})
    return model


def with_own_rows(model: Any, rank: int) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data[ROWS[rank] : ROWS[rank + 1]].clone())
    return model


def check_shared_head(policy: PolicyLoss, batch: dict[str, Tensor], rows: slice) -> None:
    whole = PolicyLoss(network())
    expected, out = whole(**batch), policy(**batch)
    torch.testing.assert_close(out.loss, expected.loss, atol=1e-6, rtol=0)
    expected.loss.backward()
    out.loss.backward()
    expected_gradients = gradients(whole.model)
    expected_gradients["lm_head.weight"] = expected_gradients["lm_head.weight"][rows]
    torch.testing.assert_close(gradients(policy.model), expected_gradients, atol=1e-5, rtol=0)


def share_head_on_a_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for style in ({}, {"output_layouts": Replicate()}, {"use_local_output": False}):
        for options in ({}, {"group": mesh.get_group()}):
            policy = PolicyLoss(with_dtensor_head(network(), mesh, **style), **options)
            check_shared_head(policy, packed(), slice(None))
            assert policy.model.lm_head.weight.placements == (Shard(0),)
    policy = PolicyLoss(with_own_rows(network(), rank), group=dist.group.WORLD)
    check_shared_head(policy, padded(), slice(*ROWS[rank : rank + 2]))
    capped = Capped(network().config)
    for model in (with_dtensor_head(capped, mesh), with_own_rows(Capped(network().config), rank)):
        with pytest.raises(ValueError, match="Capped"):
            PolicyLoss(model, group=mesh.get_group())(**padded())


def prepare_on_a_rank(rank: int) -> None:
    """accelerate's FSDP2 with its defaults: the layers are sharded one by one, and a tied head stays tied."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    options = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": True}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    settings = {"mixed_precision": "no", "is_main_process": rank == 0, "device": torch.device("cpu")}
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), **settings)
    policy = fsdp2_prepare_model(accelerator, PolicyLoss(network(tie_word_embeddings=True)))
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert all(isinstance(layer, FSDPModule) for layer in policy.model.model.layers)
    assert policy(**packed()).loss.item() == pytest.approx(
        PolicyLoss(network(tie_word_embeddings=True))(**packed()).loss.item(), rel=1e-5
    )
