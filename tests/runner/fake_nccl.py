"""NCCL's group of a trainer and a server, by a socket: the group's unique id is a port of the trainer."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import torch
from fake_server import FakeServer

from dapo_runner.engines.nccl import NCCLTransfer

MEET, UPDATE = "/init_weight_transfer_engine", "/update_weights"


class SocketGroup:
    """The trainer's end of a group with two workers."""

    listeners: ClassVar[dict[bytes, Listener]] = {}

    @classmethod
    def make_unique_id(cls) -> bytes:
        listener = Listener(("127.0.0.1", 0))
        unique_id = f"{listener.address[1]:0128}".encode()
        cls.listeners[unique_id] = listener
        return unique_id

    def __init__(self, device: torch.device) -> None:
        self.is_aborted = False
        self.connection: Connection | None = None

    def join(self, unique_id: bytes, size: int) -> None:
        assert size == 3
        with self.listeners.pop(unique_id) as listener:
            self.connection = listener.accept()
        if self.is_aborted:
            self.abort()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        assert self.connection is not None
        for tensor in tensors:
            self.connection.send(tensor.numpy())

    def abort(self) -> None:
        self.is_aborted = True
        if self.connection is not None:
            self.connection.close()


class SocketTransfer(NCCLTransfer):
    group_class: type = SocketGroup

    @classmethod
    def check(cls, config: Any) -> None:
        """No GPU is needed."""


def join(server: FakeServer) -> None:
    """Let a server do what vLLM's NCCL backend does. A restart forgets the group."""

    def meet(body: dict[str, Any]) -> tuple[int, Any]:
        given = body["init_info"]
        assert given.keys() == {"nccl_unique_id_b64", "rank_offset", "world_size"}  # and no store to unpickle from
        assert (given["rank_offset"], given["world_size"]) == (1, 3)
        server.engine.group = Client(("127.0.0.1", int(base64.b64decode(given["nccl_unique_id_b64"]))))
        return 200, {}

    def receive(body: dict[str, Any]) -> tuple[int, Any]:
        given = body["update_info"]
        try:
            found = [torch.from_numpy(server.engine.group.recv()) for _ in given["names"]]
        except (AttributeError, EOFError) as error:  # without a group, or after its end
            return 500, {"error": repr(error)}
        assert [(str(x.dtype), list(x.shape)) for x in found] == [
            (f"torch.{dtype}", shape) for dtype, shape in zip(given["dtype_names"], given["shapes"], strict=True)
        ]
        server.engine.update_weights(zip(given["names"], found, strict=True))
        return 200, {}

    server.hooks |= {MEET: meet, UPDATE: receive, "/get_world_size": lambda _: (200, {"world_size": 2})}
