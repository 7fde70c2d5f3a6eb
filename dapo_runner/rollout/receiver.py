"""What `dapo serve` adds to the workers of `vllm serve`: a way in for new weights.

vLLM 0.32's own transfers (NCCL, CUDA's IPC) want GPUs; this one reads a file. It is registered as this module is
imported, which ``Registered``, a worker extension by name, has every worker do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from dapo_runner.rollout.transfer import BACKEND, checksum
from dapo_runner.rollout.vllm import pack_for_cpu


@dataclass
class NothingToSay(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there for mypy
    """Both sides know the folder."""


@dataclass
class WeightsInFile(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``path``: of a safetensors file with every parameter of the model; ``checksum``: see `transfer.checksum`."""

    path: str
    checksum: int


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
        if checksum(Path(update_info.path)) != update_info.checksum:
            raise ValueError(f"{update_info.path}: its checksum is not that of the file that was written")
        weights = load_file(update_info.path)
        reload_weights(
            self.vllm_config, self.model, iter(weights.items()), weights_path=None, is_checkpoint_format=True
        )
        if self.device.type == "cpu":
            pack_for_cpu(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


class Registered:
    """An empty worker extension: that it is asked for is what counts."""


WeightTransferEngineFactory.register_engine(BACKEND, FileReceiver)
