"""New weights from the trainer's GPU to those of servers, through vLLM's own NCCL transfer.

A server and rank 0 are a group of their own, made anew when either has forgotten it. They meet by an id of NCCL's that
the server gets over HTTP, under its key: vLLM's other way, a store at an address, unpickles whatever comes from there.
NCCL knows no deadline. It runs in a thread beside the request whose other end does its part, and what has not come to
an end in `sync_within`, or whose request has failed, is given up with the group.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import resolve_device
from dapo_runner.rollout.client import Server, ServerError
from dapo_runner.rollout.transfer import Transfer, check_finite
from dapo_runner.rollout.vllm import import_vllm

T = TypeVar("T")


def make_unique_id() -> bytes:
    """Return what the members of a new group find each other by. Raises OSError without NCCL, RuntimeError."""
    import_vllm()  # without its messages
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


class Group:
    """The trainer's end of an NCCL group with the workers of a server. Its methods wait for them, without an end."""

    def __init__(self, unique_id: bytes, size: int, device: torch.device) -> None:
        """The workers get the same ``unique_id``. Raises RuntimeError."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self.device = device
        with torch.cuda.device(device):  # a thread begins with the first GPU
            self.nccl = uid_init_process_group(unique_id, 0, size, device)
            self.stream = torch.cuda.Stream()
        if self.nccl.disabled:  # and would send nothing, without a word
            raise RuntimeError("VLLM_DISABLE_PYNCCL is set")
        self.is_aborted = False

    def send(self, tensors: Iterable[Tensor]) -> None:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.default_stream())
            for tensor in tensors:
                if self.is_aborted:
                    raise RuntimeError("the server was given up")
                self.nccl.broadcast(tensor, src=0, stream=self.stream)
            self.stream.synchronize()

    def abort(self) -> None:
        """End what is under way, in whichever thread."""
        self.is_aborted = True
        self.nccl.destroy()


class NCCLTransfer(Transfer):
    """Rank 0 keeps a copy of what was published last on its GPU: the policy changes while servers come back."""

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.sends = world.is_main
        self.device = torch.empty(0, device=world.device or resolve_device(config.run.device)).device  # with its number
        self._groups: dict[Server, Group] = {}

    @classmethod
    def check(cls, config: Config) -> None:
        key = "rollout.server.transfer"
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"{key}: nccl requires vLLM beside the trainer too (docs/vllm.md). Set {key}=file.")
        if (device := resolve_device(config.run.device)).type != "cuda":
            raise ConfigError(f"{key}: nccl requires a CUDA GPU, got {device.type}. Set {key}=file.")

    def publish(self, version: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._published.clear()  # makes room
        held = {name: x.detach().to(self.device, copy=True).contiguous() for name, x in weights if self.world.is_main}
        self.world.run_on_rank0(lambda: check_finite(held))
        self._published[version] = held
        self.version = version

    async def _connect(self, server: Server, present: str, *, is_halfway: bool) -> None:
        """Unless it has the weights that it was given last: a server that was away has no group, and one that another
        process has had is in that one's.
        """
        if server in self._groups and present == server.version:
            return
        self._leave(server)
        if is_halfway:  # layers that are half loaded would take the next weights for their other half
            with suppress(ServerError):  # of an update that is under way
                await server.post("/start_weight_update")
            await server.post("/finish_weight_update")
        await server.post("/shutdown_weight_transfer_engine")
        size = 1 + (await server.get("/get_world_size"))["world_size"]
        try:
            unique_id = make_unique_id()
        except (OSError, RuntimeError) as error:
            raise _failure(server, error) from error
        encoded = base64.b64encode(unique_id).decode()
        meeting = {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": size}
        request = server.post("/init_weight_transfer_engine", {"init_info": meeting})
        self._groups[server] = await self._beside(server, lambda: Group(unique_id, size, self.device), request)

    async def _load(self, server: Server, published: Any) -> None:
        update = {
            "names": list(published),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in published.values()],
            "shapes": [list(tensor.shape) for tensor in published.values()],
        }
        group = self._groups[server]
        try:
            request = server.post("/update_weights", {"update_info": update})
            await self._beside(server, lambda: group.send(published.values()), request)
        except BaseException:
            self._leave(server)
            raise

    def _leave(self, server: Server) -> None:
        if (group := self._groups.pop(server, None)) is not None:
            group.abort()

    async def _beside(self, server: Server, work: Callable[[], T], request: Coroutine[Any, Any, Any]) -> T:
        """Return what ``work`` gives, in a thread beside the ``request``: each ends when the other does its part.

        Raises:
            ServerError: Either failed, or took too long; a thread that never ends is left behind.
        """
        ours, theirs = _in_thread(server, work), asyncio.create_task(request)
        try:
            await asyncio.wait_for(asyncio.gather(ours, theirs), self.within)
        except asyncio.TimeoutError:
            message = f"{server}: NCCL and the server have not ended together within {self.within:g} s"
            raise ServerError(message, self.within) from None
        finally:
            theirs.cancel()
            ours.cancel()
        return ours.result()


def _in_thread(server: Server, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run in a thread that a process which ends does not wait for. A group that comes too late is aborted."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not done.done():
            done.set_exception(_failure(server, error)) if error else done.set_result(result)
        elif isinstance(result, Group):
            result.abort()

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return done


def _failure(server: Server, error: Exception) -> ServerError:
    return ServerError(f"{server}: NCCL on this side: {type(error).__name__}: {error}")
