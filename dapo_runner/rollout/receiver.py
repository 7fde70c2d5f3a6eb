"""What `dapo serve` adds to `vllm serve`: a way in for new weights, and a key for every path.

vLLM 0.32's own transfers (NCCL, CUDA's IPC) want GPUs; this one reads a file. It is registered as this module is
imported, which ``Registered``, a worker extension by name, has every worker do.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from starlette.responses import JSONResponse
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from dapo_runner.rollout.transfer import BACKEND
from dapo_runner.rollout.vllm import _pack_tied_head


@dataclass
class NothingToSay(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there for mypy
    """Both sides know the folder."""


@dataclass
class WeightsInFile(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``path``: of a safetensors file with every parameter of the model."""

    path: str


class FileReceiver(WeightTransferEngine[NothingToSay, WeightsInFile]):  # type: ignore[misc]
    """Loads what `transfer.FileTransfer` has written."""

    init_info_cls = NothingToSay
    update_info_cls = WeightsInFile

    def init_transfer_engine(self, init_info: NothingToSay) -> None:
        """Nothing to meet for."""

    def start_weight_update(self) -> None:
        """``reload_weights`` begins and ends what it does by itself."""

    def finish_weight_update(self) -> None:
        """The same."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """All of it in one call, done when it returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightsInFile) -> None:
        weights = load_file(update_info.path)
        reload_weights(
            self.vllm_config, self.model, iter(weights.items()), weights_path=None, is_checkpoint_format=True
        )
        if self.device.type == "cpu":
            _pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


class Registered:
    """An empty worker extension: that it is asked for is what counts."""


WeightTransferEngineFactory.register_engine(BACKEND, FileReceiver)


class KeyForAll:
    """ASGI middleware: where there is a key, every path but /health wants it. vLLM's own leaves those open that weights
    are changed by.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.wanted = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(given, self.wanted):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
