"""Send new weights from the trainer's GPU to the GPUs of servers, with vLLM's NCCL transfer.

Each server forms an NCCL group with rank 0. A new group is made after the server was excluded. The server gets NCCL's
unique id over HTTP, protected by its key: vLLM's alternative, a store at an address, unpickles whatever it receives.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.engines.client import Server, ServerError
from dapo_runner.engines.transfer import Transfer
from dapo_runner.engines.vllm import import_vllm
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import resolve_device
from dapo_runner.threads import in_thread


class Group:
    """The trainer's end of an NCCL group with the workers of a server. NCCL has no deadlines, so ``join`` and ``send``
    run in a thread, and ``abort`` ends them from another thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nccl: Any = None
        self.is_aborted = False

    @staticmethod
    def make_unique_id() -> bytes:
        """Return the id by which members of a new group find each other. Raises OSError without NCCL, RuntimeError."""
        import_vllm()  # turns off its log messages
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def join(self, unique_id: bytes, size: int) -> None:
        """Connect to the workers, which have the same ``unique_id``. Raises RuntimeError."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        with torch.cuda.device(self.device):  # a thread starts with the first GPU
            self.nccl = uid_init_process_group(unique_id, 0, size, self.device)
            self.stream = torch.cuda.Stream()
        if self.is_aborted:
            self.abort()
        elif self.nccl.disabled:  # it would silently send nothing
            raise RuntimeError("VLLM_DISABLE_PYNCCL is set")

    def send(self, tensors: Iterable[Tensor]) -> None:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.default_stream())
            for tensor in tensors:
                if self.is_aborted:
                    raise RuntimeError("the transfer to the server was aborted")
                self.nccl.broadcast(tensor, src=0, stream=self.stream)
            self.stream.synchronize()

    def abort(self) -> None:
        self.is_aborted = True
        if self.nccl is not None:
            self.nccl.destroy()


class NCCLTransfer(Transfer):
    """Rank 0 keeps a copy of the last published weights on its GPU: the policy changes while servers recover."""

    copies = True
    group_class = Group

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.device = torch.empty(0, device=world.device or resolve_device(config.run.device)).device  # with its index
        self._groups: dict[Server, Group] = {}

    @classmethod
    def check(cls, config: Config) -> None:
        key = "rollout.server.transfer"
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"{key}: nccl requires vLLM also in the trainer (docs/vllm.md). Set {key}=file.")
        if (device := resolve_device(config.run.device)).type != "cuda":
            raise ConfigError(f"{key}: nccl requires a CUDA GPU, got {device.type}. Set {key}=file.")

    async def _load(self, server: Server, held: Any, *, is_halfway: bool) -> None:
        if is_halfway:  # half-loaded layers would take the next weights for their second half
            with suppress(ServerError):  # raised during an update
                await server.post("/start_weight_update")
            await server.post("/finish_weight_update")
        if server.version is None:
            self._leave(server)
        if server not in self._groups:
            await self._meet(server)
        await server.post("/start_weight_update")
        update = {
            "names": list(held),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in held.values()],
            "shapes": [list(tensor.shape) for tensor in held.values()],
        }
        group, request = self._groups[server], server.post("/update_weights", {"update_info": update})
        await self._beside(server, lambda: group.send(held.values()), request)
        await server.post("/finish_weight_update")

    async def _meet(self, server: Server) -> None:
        await server.post("/shutdown_weight_transfer_engine")
        size = 1 + await server.read("/get_world_size", "world_size")
        try:
            unique_id = self.group_class.make_unique_id()
        except (OSError, RuntimeError) as error:
            raise ServerError(f"{server}: NCCL on this side: {error}") from error
        meeting = {"nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": 1, "world_size": size}
        group = self._groups[server] = self.group_class(self.device)
        request = server.post("/init_weight_transfer_engine", {"init_info": meeting})
        await self._beside(server, lambda: group.join(unique_id, size), request)

    def _leave(self, server: Server) -> None:
        if (group := self._groups.pop(server, None)) is not None:
            group.abort()

    async def _beside(self, server: Server, work: Callable[[], None], request: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` in a thread during the ``request`` to the server that takes part in it. Raises ServerError."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                raise ServerError(f"{server}: NCCL on this side: {type(error).__name__}: {error}") from error

        tasks = asyncio.ensure_future(request), asyncio.wrap_future(in_thread(run))
        try:
            done, waiting = await asyncio.wait(tasks, timeout=self.timeout, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if waiting:
                late = f"{server}: the NCCL transfer did not finish within {self.timeout:g} s"
                raise ServerError(late, waited=self.timeout)
        except BaseException:
            self._leave(server)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
