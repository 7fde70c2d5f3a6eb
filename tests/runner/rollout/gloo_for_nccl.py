"""vLLM's NCCL transfer without a GPU: gloo in NCCL's place, on both sides. In a server it is a worker extension."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.distributed import BroadcastOptions, PrefixStore

SWITCH = "GLOO_FOR_NCCL"


class GlooCommunicator:
    """What is used of vLLM's PyNcclCommunicator."""

    disabled = False

    def __init__(self, group: Any, device: Any) -> None:
        from vllm.distributed.utils import init_gloo_process_group

        self.group = group  # has the store
        store = PrefixStore("gloo", group.store)
        self.gloo = init_gloo_process_group(store, group.rank, group.world_size, timedelta(seconds=300))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = BroadcastOptions()
        options.rootRank = src
        self.gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self.gloo


def replace(put: Callable[[Any, str, Any], None]) -> None:
    from vllm.distributed.device_communicators import pynccl

    put(pynccl, "PyNcclCommunicator", GlooCommunicator)
    put(torch.accelerator, "current_device_index", lambda: 0)


def replace_streams(put: Callable[[Any, str, Any], None]) -> None:
    for name in ("Stream", "default_stream", "current_stream"):
        put(torch.cuda, name, MagicMock())
    put(torch.cuda, "device", nullcontext)


class Extension:
    """An empty worker extension: that it is asked for is what counts."""


if SWITCH in os.environ:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from dapo_runner.rollout.vllm import _pack_tied_head

    finish = NCCLWeightTransferEngine.finish_weight_update

    def finish_and_pack(engine: Any) -> None:
        finish(engine)
        _pack_tied_head(engine.model)  # as on any CPU

    replace(setattr)
    torch.cuda.current_stream = torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    NCCLWeightTransferEngine.finish_weight_update = finish_and_pack
