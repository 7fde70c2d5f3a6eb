"""New weights from the trainer's GPU to those of servers, through vLLM's own NCCL transfer.

A server and rank 0 are a group of their own, made anew when either has forgotten it. They meet by an id of NCCL's that
the server gets over HTTP, under its key: vLLM's other way, a store at an address, unpickles whatever comes from there.
NCCL knows no deadline. It runs in
a thread beside the request whose other end does its part, and what has not come to an end in `sync_within`, or whose
request has failed, is given up with the group.
"""

from __future__ import annotations

import base64
import importlib.util
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import resolve_device
from dapo_runner.rollout.client import Server, ServerError
from dapo_runner.rollout.transfer import POLL, Transfer, check_finite
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


def make_unique_id() -> bytes:
    """Return what the members of a new group find each other by. Raises OSError without NCCL, RuntimeError."""
    _import_vllm()  # without its messages
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


class Group:
    """The trainer's end of an NCCL group with the workers of a server. Whoever calls waits for them, without an end."""

    def __init__(self, unique_id: bytes, size: int, device: torch.device) -> None:
        """The workers get the same ``unique_id``. Raises RuntimeError."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self.device = device
        with torch.cuda.device(device):  # a thread begins with the first GPU
            self.nccl = uid_init_process_group(unique_id, 0, size, device)
            self.stream = torch.cuda.Stream()
        if self.nccl.disabled:  # and would send nothing, without a word
            raise RuntimeError("VLLM_DISABLE_PYNCCL is set")
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
        self.world.run_on_rank0(lambda: check_finite(held))
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
        try:
            unique_id = make_unique_id()
        except (OSError, RuntimeError) as error:
            raise ServerError(f"{server}: NCCL on this side: {type(error).__name__}: {error}") from error
        encoded = base64.b64encode(unique_id).decode()
        meeting = {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": size}
        self._groups[server] = self._together(
            server,
            caller,
            lambda: Group(unique_id, size, self.device),
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
