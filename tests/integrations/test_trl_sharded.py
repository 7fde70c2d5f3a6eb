"""The head of a model that FSDP2 has sharded over two processes: the gradient is that of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")

import torch
from ranks import on_ranks
from torch.distributed.fsdp import fully_shard
from trl_runs import SIZES

from dapo_kernels import Objective
from dapo_kernels.integrations.heads import LogitRule
from dapo_kernels.integrations.trl import LossCall, attach_scoring
from dapo_runner.run.tiny_model import make_model, make_tokenizer

RANKS, PROMPT, WIDTH = 2, 5, 8


def network() -> Any:
    torch.manual_seed(0)
    model = make_model(SIZES, make_tokenizer(), max_positions=32)
    attach_scoring(model, LogitRule.of(model.config, 0.9), entropy=True, float32_head=False)
    return model


def backward(model: Any, rows: slice) -> None:
    """Both routes, one after the other, on some rows of a batch of four."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 20, (4, PROMPT + WIDTH), generator=generator)[rows]
    advantages = torch.randn(4, generator=generator)[rows]
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "fused_lm_head": True}
    call = LossCall(Objective(), torch.ones(len(ids), WIDTH, dtype=torch.bool), advantages, None, None, None, 4.0)
    model(**inputs, labels=labels.clone(), dapo_loss=call).loss.backward()
    (0.1 * model(**inputs, labels=labels).log_probs.sum()).backward()


def worker(rank: int, folder: Path) -> None:
    for own_unit in (False, True):
        model = network()
        for layer in model.model.layers:
            fully_shard(layer)
        if own_unit:
            fully_shard(model.lm_head)
        fully_shard(model)
        backward(model, slice(2 * rank, 2 * rank + 2))
        gradients = {name: RANKS * value.grad.full_tensor() for name, value in model.named_parameters()}
        if rank == 0:
            torch.save(gradients, folder / f"own_unit={own_unit}.pt")


@pytest.mark.ranks
def test_gradient_of_a_sharded_model(tmp_path: Path) -> None:
    """``own_unit``: the head is sharded by itself, and nothing calls the module that would gather it."""
    on_ranks(RANKS, worker, tmp_path)
    whole = network()
    backward(whole, slice(0, 4))
    for own_unit in (False, True):
        gradients = torch.load(tmp_path / f"own_unit={own_unit}.pt")
        for name, parameter in whole.named_parameters():
            assert parameter.grad.abs().max() > 0
            message = f"{name}, own_unit={own_unit}"
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-5, msg=message)
