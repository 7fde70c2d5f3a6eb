"""vLLM's NCCL transfer without a GPU: gloo in NCCL's place, on both sides. In a server it is a worker extension."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from dapo_runner.engines.nccl import Group, NCCLTransfer
from dapo_runner.engines.receiver import Receiver

SWITCH = "GLOO_FOR_NCCL"


class GlooCommunicator:
    """What is used of vLLM's PyNcclCommunicator."""

    disabled = False

    def __init__(self, group: Any, device: Any) -> None:
        raise AssertionError("a group over a store, which vLLM unpickles from")

    @classmethod
    def from_unique_id_bytes(cls, unique_id: bytes, rank: int, world_size: int, device: Any) -> GlooCommunicator:
        from vllm.distributed.utils import init_gloo_process_group

        self, timeout = cls.__new__(cls), timedelta(seconds=300)
        self.store = TCPStore("127.0.0.1", int(unique_id), world_size, rank == 0, timeout)
        self.gloo = init_gloo_process_group(PrefixStore("gloo", self.store), rank, world_size, timeout)
        return self

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = BroadcastOptions()
        options.rootRank = src
        self.gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self.gloo


class GlooGroup(Group):
    @staticmethod
    def make_unique_id() -> bytes:
        """Return a free port, as long as an id of NCCL's."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"{free.getsockname()[1]:0128}".encode()


class Transfer(NCCLTransfer):
    group_class = GlooGroup


def replace(put: Callable[[Any, str, Any], None]) -> None:
    from vllm.distributed.device_communicators import pynccl

    put(pynccl, "PyNcclCommunicator", GlooCommunicator)
    put(torch.accelerator, "current_device_index", lambda: 0)


def replace_streams(put: Callable[[Any, str, Any], None]) -> None:
    for name in ("Stream", "default_stream", "current_stream"):
        put(torch.cuda, name, MagicMock())
    put(torch.cuda, "device", nullcontext)


class Extension(Receiver):
    """What `dapo serve` adds to a worker; that this module is imported is what counts."""


if SWITCH in os.environ:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from dapo_runner.engines.vllm import pack_for_cpu

    finish = NCCLWeightTransferEngine.finish_weight_update

    def finish_and_pack(engine: Any) -> None:
        finish(engine)
        pack_for_cpu(engine.model)  # as on any CPU

    replace(setattr)
    torch.cuda.current_stream = torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    NCCLWeightTransferEngine.finish_weight_update = finish_and_pack
