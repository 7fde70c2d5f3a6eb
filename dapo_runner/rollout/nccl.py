"""New weights from the trainer's GPU to those of servers, through vLLM's own NCCL transfer.

A server and rank 0 are a group of their own, made anew when either has forgotten it. NCCL knows no deadline. It runs in
a thread beside the request whose other end does its part, and what has not come to an end in `sync_within`, or whose
request has failed, is given up with the group.
"""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import resolve_device
from dapo_runner.rollout.client import Server, ServerError
from dapo_runner.rollout.transfer import POLL, Transfer
from dapo_runner.rollout.vllm import _import_vllm

T = TypeVar("T")


def check_there(config: Config) -> None:
    """Raises ConfigError where weights cannot go to servers, or to a server, by NCCL."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.server.transfer: expected vLLM in this environment for 'nccl', it is not installed; docs/vllm.md "
            "says how; 'file' needs it for servers alone"
        )
    if (device := resolve_device(config.run.device)).type != "cuda":
        raise ConfigError(
            f"rollout.server.transfer: expected a CUDA GPU for 'nccl', got {device.type}; 'file' needs none"
        )


class Group:
    """The trainer's end of an NCCL group with the workers of a server. Whoever calls waits for them, without an end."""

    def __init__(self, address: str, port: int, size: int, device: torch.device) -> None:
        """The workers are told the same address and port of this machine. Raises RuntimeError."""
        _import_vllm()  # without its messages
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.device = device
        with torch.cuda.device(device):  # a thread begins with the first GPU
            self.nccl = trainer_init({"master_address": address, "master_port": port, "world_size": size})
            self.stream = torch.cuda.Stream()
        if self.nccl.disabled:  # and would send nothing, without a word
            raise RuntimeError("vLLM finds no NCCL, or VLLM_DISABLE_PYNCCL is set")
        self.over = False

    def send(self, tensors: Iterable[Tensor]) -> None:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.default_stream())
            for tensor in tensors:
                if self.over:
                    raise RuntimeError("the server was given up")
                self.nccl.broadcast(tensor, src=0, stream=self.stream)
            self.stream.synchronize()

    def abort(self) -> None:
        """End what is under way, in whichever thread."""
        self.over = True
        self.nccl.destroy()


class NCCLTransfer(Transfer):
    """Rank 0 keeps a copy of what was published last on its GPU: the policy changes while servers come back."""

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.sends = world.is_main
        self.device = torch.empty(0, device=world.device or resolve_device(config.run.device)).device  # with its number
        self._held: dict[str, dict[str, Tensor]] = {}  # by version; there is one
        self._groups: dict[Server, Group] = {}

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._held.clear()  # makes room
        held = {name: x.detach().to(self.device, copy=True).contiguous() for name, x in weights if self.world.is_main}
        self._held[version] = held
        self.version = version

    def _connect(self, server: Server, present: str, halfway: bool, caller: object) -> None:
        """Unless it has the weights that it was given last: a server that was away has no group, and one that another
        process has had is in that one's.
        """
        if server in self._groups and present == server.version:
            return
        self._leave(server)
        post = partial(server.post, caller=caller)
        if halfway:  # layers that are half loaded would take the next weights for their other half
            with suppress(ServerError):  # of an update that is under way
                post("/start_weight_update")
            post("/finish_weight_update")
        post("/shutdown_weight_transfer_engine")
        size = 1 + server.get("/get_world_size", caller)["world_size"]
        address, port = _free_port(server.url)
        meeting = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        self._groups[server] = self._together(
            server,
            caller,
            lambda: Group(address, port, size, self.device),
            lambda: post("/init_weight_transfer_engine", {"init_info": meeting}),
        )

    def _load(self, server: Server, version: str, caller: object) -> None:
        held = self._held.get(version)
        if held is None:
            raise ServerError(f"{server}: weights {version} gave way to newer ones")
        told = {
            "names": list(held),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in held.values()],
            "shapes": [list(tensor.shape) for tensor in held.values()],
        }
        group = self._groups[server]
        try:
            self._together(
                server,
                caller,
                lambda: group.send(held.values()),
                lambda: server.post("/update_weights", {"update_info": told}, caller=caller),
            )
        except BaseException:
            self._leave(server)
            raise

    def _leave(self, server: Server) -> None:
        if (group := self._groups.pop(server, None)) is not None:
            group.abort()

    def _together(self, server: Server, caller: object, ours: Callable[[], T], theirs: Callable[[], Any]) -> T:
        """What ``ours`` gives, in a thread beside the request ``theirs``: each ends when the other does its part.
        Raises ServerError; a thread that never ends is left behind.
        """
        done, over, until = Future[T](), threading.Event(), time.monotonic() + self.within

        def work() -> None:
            try:
                done.set_result(result := ours())
                if over.is_set() and isinstance(result, Group):
                    result.abort()
            except Exception as error:
                done.set_exception(ServerError(f"{server}: NCCL on this side: {type(error).__name__}: {error}"))
                while not over.wait(POLL):
                    server.hang_up(caller)  # which waits for us

        threading.Thread(target=work, name="nccl", daemon=True).start()
        try:
            theirs()
            if not wait([done], until - time.monotonic()).done:
                raise ServerError(f"{server}: has done its part, and NCCL has not ended within {self.within:g} s")
        except ServerError:
            if done.done():
                done.result()  # raises what has failed here, where that came first
            raise
        finally:
            over.set()
        return done.result()


def _free_port(url: str) -> tuple[str, int]:
    """This machine's address as the server at ``url`` sees it, and a port. Raises ServerError."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:  # sends nothing
            towards.connect((parts.hostname or "", parts.port or 80))
            address: str = towards.getsockname()[0]
    except OSError as error:
        raise ServerError(f"{url}: expected an IPv4 address, at which vLLM's NCCL groups meet: {error}") from error
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
